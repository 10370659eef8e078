"""Weights in files of others: Keras's `.keras` and `.weights.h5`, and `.safetensors`. No class of a model is needed."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from launcher.errors import UsageError

SUFFIXES = (".keras", ".weights.h5", ".safetensors")

# Of https://github.com/huggingface/safetensors: 8 bytes of size, a JSON header, and the arrays, all little-endian.
_SAFETENSORS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
_LARGEST_HEADER_BYTES = 100 * 2**20


class Stored(NamedTuple):
    """One array of a file.

    Attributes:
      name: as a person finds it.
      layer: names of the layers around it, the outermost first, and of its own.
      key: of the weight within its layer: its name, or in Keras's files its number.
      value: the array.
    """

    name: str
    layer: tuple[str, ...]
    key: str
    value: np.ndarray


def read(path: str) -> list[Stored]:
    """The arrays of a file; states of random generators and of optimizers are left out.

    Args:
      path: ends in one of `SUFFIXES`.

    Raises:
      UsageError: another kind of file, or it cannot be read.
    """
    if not path.endswith(SUFFIXES):
        raise UsageError(
            f"train.start_from = {path!r}: expected a file that ends in {', '.join(SUFFIXES)}, or the model_dir of a "
            "run; open another kind of file with what wrote it, and save it as one of these"
        )
    try:
        with _opened(path) as file:
            if path.endswith(".safetensors"):
                return list(_safetensors(file, os.fstat(file.fileno()).st_size if hasattr(file, "fileno") else None))
            return list(_keras(_weights_in_zip(file) if path.endswith(".keras") else file))
    except FileNotFoundError:
        raise UsageError(f"train.start_from = {path!r}: there is no such file") from None
    except (OSError, ValueError, KeyError, TypeError, struct.error, zipfile.BadZipFile) as error:
        raise UsageError(f"train.start_from = {path!r} cannot be read: {error}") from error


def named(name: str, value: np.ndarray, *, shown: str | None = None) -> Stored:
    """An array that has the path of a Keras variable for a name."""
    *layer, key = name.split("/")
    return Stored(shown or name, tuple(layer), key, value)


def _opened(path: str) -> BinaryIO:
    if "://" not in path:
        return open(path, "rb")
    import tensorflow as tf

    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            return io.BytesIO(file.read())
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(path) from error
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def _weights_in_zip(file: BinaryIO) -> BinaryIO:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if "model.weights.h5" not in names:
            raise ValueError(f"it holds no model.weights.h5, only {', '.join(names[:5])}")
        return io.BytesIO(archive.read("model.weights.h5"))


def _keras(file: BinaryIO) -> Iterator[Stored]:
    import h5py

    with h5py.File(file, "r") as root:
        if "layer_names" in root.attrs:
            raise ValueError("it is of Keras 2; load it into its model there, and save that as .keras")
        yield from _group(root, ())


def _group(group: Any, around: tuple[str, ...], depth: int = 0) -> Iterator[Stored]:
    """The arrays of a layer, which stand in its group `vars` with its name, and of the layers inside of it."""
    own = group.get("vars")
    layer = around
    if own is not None and depth:
        layer = (*around, _text(own.attrs.get("name", group.name.rpartition("/")[2])))
    for key in sorted(own or (), key=lambda name: (len(name), name)):
        value = own[key]
        value = np.array(value, dtype=_bfloat16() if value.attrs.get("dtype") == "bfloat16" else None)
        # The state of a random generator: no weight of a layer looks like it.
        if not (value.dtype == np.uint32 and value.shape == (2,)):
            yield Stored("/".join((*layer, key)), layer, key, value)
    for name in group:
        if name != "vars" and not (depth == 0 and name == "optimizer") and hasattr(group[name], "keys"):
            yield from _group(group[name], layer, depth + 1)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _safetensors(file: BinaryIO, size: int | None) -> Iterator[Stored]:
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    if header_bytes > _LARGEST_HEADER_BYTES or (size is not None and header_bytes > size):
        raise ValueError(f"its header would be {header_bytes} bytes long")
    header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        dtype = np.dtype(_bfloat16() if about["dtype"] == "BF16" else _SAFETENSORS[about["dtype"]])
        first, last = about["data_offsets"]
        file.seek(8 + header_bytes + first)
        content = file.read(last - first)
        if len(content) != last - first:
            raise ValueError(f"it ends before {name} does: the file is cut short")
        value = np.frombuffer(content, dtype).reshape(about["shape"])
        yield named(name.replace(".", "/"), value, shown=name)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16

"""Weights in files of others: Keras's `.keras` and `.weights.h5`, and `.safetensors`. No class of a model is needed."""

import io
import itertools
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from launcher.errors import MissingInputError, UsageError

SUFFIXES = (".keras", ".weights.h5", ".safetensors")

# Of https://github.com/huggingface/safetensors: 8 bytes of size, a JSON header, and the arrays, all little-endian.
_SIZES = {"F": (2, 4, 8), "I": (1, 2, 4, 8), "U": (1, 2, 4, 8)}
_SAFETENSORS = {f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind, sizes in _SIZES.items() for size in sizes}
_SAFETENSORS["BOOL"] = "?"
_LARGEST_HEADER_BYTES = 100 * 2**20

# What a file unpacks to is read up to so many times its own size, and up to so many bytes whatever that is: Keras
# compresses nothing, and whoever does so later gains little on trained weights.
_MOST_TIMES = 16
_MOST_IN_ANY_CASE = 64 * 2**20


class TooLargeError(ValueError):
    """A file would unpack to far more than it has."""


class Stored(NamedTuple):
    """One array of a file.

    Attributes:
      name: as a person finds it.
      layer: names of the layers around it, the outermost first, and of its own.
      key: of the weight within its layer: its name, or in Keras's files its number.
    """

    name: str
    layer: tuple[str, ...]
    key: str
    value: np.ndarray


def read(path: str) -> list[Stored]:
    """The arrays of a file, without states of random generators and optimizers; UsageError where it cannot be read."""
    if not path.endswith(SUFFIXES):
        raise UsageError(
            f"StartFrom.path = {path!r}: expected a file that ends in {', '.join(SUFFIXES)}, or the model_dir of a "
            "run; open another kind of file with what wrote it, and save it as one of these"
        )
    try:
        if "://" not in path and os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("it is not a file")
        with _opened(path) as file:
            most = _most(file)
            if path.endswith(".safetensors"):
                return list(_safetensors(file, most))
            return list(_keras(_weights_in_zip(file) if path.endswith(".keras") else file, most))
    except FileNotFoundError:
        raise MissingInputError(f"StartFrom.path = {path!r}: there is no such file") from None
    except Exception as error:  # zipfile, zlib and h5py have many kinds for a file that is not what it claims to be
        raise UsageError(f"StartFrom.path = {path!r} cannot be read: {error}") from error


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Opens a zip archive; TooLargeError where it would unpack to far more than the file has."""
    archive = zipfile.ZipFile(file)
    _check_size(sum(member.file_size for member in archive.infolist()), _most(file))
    return archive


def _most(file: BinaryIO) -> int:
    """Bytes that a file may unpack to; leaves its position at the beginning."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return max(_MOST_TIMES * size, _MOST_IN_ANY_CASE)


def _check_size(unpacked: int, most: int) -> None:
    if unpacked > most:
        raise TooLargeError(f"it would unpack to {unpacked} bytes, where a file of its size is read to at most {most}")


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
    with open_zip(file) as archive:
        names = archive.namelist()
        if "model.weights.h5" not in names:
            raise ValueError(f"it holds no model.weights.h5, only {', '.join(names[:5])}")
        return io.BytesIO(archive.read("model.weights.h5"))


def _keras(file: BinaryIO, most: int) -> Iterator[Stored]:
    import h5py

    with h5py.File(file, "r") as root:
        if "layer_names" in root.attrs:
            raise ValueError("it is of Keras 2; load it into its model there, and save that as .keras")
        names, weights = dict[str, str](), list[Any]()

        def visit(path: str, item: Any) -> None:  # each object once, and none through a link, which may lead elsewhere
            around, _, last = path.rpartition("/")
            if isinstance(item, h5py.Group) and last == "vars" and around:
                name = item.attrs.get("name", around.rpartition("/")[2])
                names[around] = name.decode() if isinstance(name, bytes) else str(name)
            is_weight = isinstance(item, h5py.Dataset) and around.rpartition("/")[2] == "vars"
            if is_weight and not path.startswith("optimizer/"):
                weights.append(item)

        root.visititems(visit)
        _check_size(sum(item.size * item.dtype.itemsize for item in weights), most)
        for item in sorted(weights, key=lambda item: (item.parent.name, len(item.name), item.name)):
            if item.external or item.is_virtual:
                raise ValueError(f"{item.name} is in another file")
            *around, _, key = item.name[1:].split("/")
            layer = tuple(names[path] for path in itertools.accumulate(around, "{}/{}".format) if path in names)
            array = np.array(item, dtype=_bfloat16() if item.attrs.get("dtype") == "bfloat16" else None)
            # The state of a random generator: no weight of a layer looks like it.
            if not (array.dtype == np.uint32 and array.shape == (2,)):
                yield Stored("/".join((*layer, key)), layer, key, array)


def _safetensors(file: BinaryIO, most: int) -> Iterator[Stored]:
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    if header_bytes > min(_LARGEST_HEADER_BYTES, most):
        raise ValueError(f"its header would be {header_bytes} bytes long")
    header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
    _check_size(sum(abs(last - first) for first, last in (about["data_offsets"] for _, about in entries)), most)
    for name, about in entries:
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

"""Weights in files of others: Keras's `.keras` and `.weights.h5`, and `.safetensors`. No class of a model is needed."""

import contextlib
import io
import itertools
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from launcher.errors import MissingInputError, UsageError

SUFFIXES = (".keras", ".weights.h5", ".safetensors")

# What a file unpacks to is read up to so many times its own size, and up to so many bytes whatever that is: Keras
# compresses nothing, and whoever does so later gains little on trained weights.
_MOST_TIMES = 16
_MOST_IN_ANY_CASE = 64 * 2**20

NOT_READ = np.dtype("V1")
"""Dtype of an array that has a name and a shape and could not be read."""

# Floats of 8 bits in safetensors' names and ml_dtypes': bfloat16 has room for each of them.
_IN_16_BITS = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}

_KINDS = {f"{word}{bits}": f"{word[0].upper()}{bits}" for word in ("int", "uint", "float") for bits in (8, 16, 32, 64)}
_KINDS |= {"bfloat16": "BF16", "bool": "BOOL"}


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
        with _local(path) as local:
            if path.endswith(".safetensors"):
                return list(_safetensors(local))
            with open(local, "rb") as file:
                most = _most(file)
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


@contextlib.contextmanager
def _local(path: str) -> Iterator[str]:
    """The path of a file of this host; of one in a bucket, that of a copy."""
    if "://" not in path:
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError("it is not a file")
        yield path
        return
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "weights")
        try:
            tf.io.gfile.copy(path, copy)
        except tf.errors.NotFoundError as error:
            raise FileNotFoundError(path) from error
        yield copy


def _weights_in_zip(file: BinaryIO) -> BinaryIO:
    with open_zip(file) as archive:
        names = archive.namelist()
        if "model.weights.h5" not in names:
            raise ValueError(f"it holds no model.weights.h5, only {', '.join(names[:5])}")
        return io.BytesIO(archive.read("model.weights.h5"))


def _keras(file: BinaryIO, most: int) -> Iterator[Stored]:
    import h5py
    import ml_dtypes

    with h5py.File(file, "r") as root:
        if "layer_names" in root.attrs:
            raise ValueError("it is of Keras 2; load it into its model there, and save that as .keras")
        names, weights = dict[str, str](), list[Any]()

        def visit(path: str, item: Any) -> None:  # each object once, and none through a link, which may lead elsewhere
            around, _, last = path.rpartition("/")
            if isinstance(item, h5py.Group) and last == "vars" and around:
                name = item.attrs.get("name", around.rpartition("/")[2])
                names[around] = name.decode() if isinstance(name, bytes) else str(name)
            if isinstance(item, h5py.Dataset) and not path.startswith("optimizer/"):
                weights.append(item)

        root.visititems(visit)
        _check_size(sum(item.size * item.dtype.itemsize for item in weights), most)
        for item in sorted(weights, key=lambda item: (item.parent.name, len(item.name), item.name)):
            if item.external or item.is_virtual:
                raise ValueError(f"{item.name} is in another file")
            around, _, key = item.name.rpartition("/vars/")  # what stands elsewhere goes by its whole name
            paths = itertools.accumulate(around[1:].split("/"), "{}/{}".format)
            layer = tuple(names[path] for path in paths if path in names)
            array = np.array(item, dtype=ml_dtypes.bfloat16 if item.attrs.get("dtype") == "bfloat16" else None)
            # The state of a random generator: no weight of a layer looks like it.
            if not (array.dtype == np.uint32 and array.shape == (2,)):
                yield Stored("/".join((*layer, key)), layer, key, array)


def _safetensors(path: str) -> Iterator[Stored]:
    import ml_dtypes
    import safetensors

    with safetensors.safe_open(path, "np") as file, open(path, "rb") as raw:  # which has checked the header
        size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(size))
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            told = header[name]
            if told["dtype"] in _IN_16_BITS:
                around = name.rpartition(".")[0]
                for other in file.keys():  # noqa: SIM118
                    if other.rpartition(".")[0] in (around, "") and "scale" in other.rpartition(".")[2]:
                        raise ValueError(
                            f"{name} is in 8 bits ({told['dtype']}) with a scale of its own, {other}: multiply them in "
                            "what wrote the file, and save it in 16 bits"
                        )
                raw.seek(8 + size + told["data_offsets"][0])
                kind = np.dtype(getattr(ml_dtypes, _IN_16_BITS[told["dtype"]]))
                flat = np.frombuffer(raw.read(told["data_offsets"][1] - told["data_offsets"][0]), kind)
                value = flat.reshape(told["shape"]).astype(ml_dtypes.bfloat16)
            else:
                try:
                    value = file.get_tensor(name)
                except (AttributeError, KeyError, TypeError, safetensors.SafetensorError):  # NumPy has no such kind
                    value = np.broadcast_to(np.zeros((), NOT_READ), told["shape"])
            yield named(name.replace(".", "/"), value, shown=name)


def write_safetensors(path: str, arrays: Mapping[str, Callable[[], np.ndarray]]) -> None:
    """Writes arrays by name to a `.safetensors` file, each made when it is due, once for its shape and once for itself.

    The format: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {}
    end = 0
    for name, make in arrays.items():
        array = make()
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _KINDS[array.dtype.name],
            "shape": [*array.shape],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for make in arrays.values():
            file.write(np.ascontiguousarray(make()).tobytes())


def told(path: str) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """Layers, and whatever else a `.keras` file has a config of, each by its class, and the words that some learned.

    The text is for a person: layers whose LoRA matrices Keras has merged into kernels, or why nothing is read.
    """

    def found(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(config, dict) and isinstance(config.get("config"), dict):
            yield str(config.get("class_name")), config["config"]
        parts = config.values() if isinstance(config, dict) else config if isinstance(config, list) else ()
        for part in parts:
            yield from found(part)

    if not path.endswith(".keras"):
        return [], ""
    with _local(path) as local, open(local, "rb") as file, open_zip(file) as archive:
        try:
            layers = [*found(json.loads(archive.read("config.json")))]
            for name in archive.namelist():
                *_, layer, last = ["", *name.split("/")]  # of a class's name and a number
                if last == "vocabulary.txt":
                    kind = re.sub(r"_\d+$", "", layer).title().replace("_", "")
                    layers.append((kind, {"vocabulary": archive.read(name).decode().split("\n")}))
        except (KeyError, ValueError, RecursionError) as error:
            return [], f"its config.json is not read ({error})"
    merged = ", ".join(str(config.get("name")) for _, config in layers if config.get("lora_rank"))
    return layers, f"LoRA's matrices are merged into the kernels there: {merged}" if merged else ""

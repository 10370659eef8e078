"""Weights in files of others: Keras's `.keras` and `.weights.h5`, and `.safetensors`. No class of a model is needed."""

import contextlib
import io
import itertools
import os
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from launcher.errors import MissingInputError, UsageError

SUFFIXES = (".keras", ".weights.h5", ".safetensors")

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
            array = np.array(item, dtype=ml_dtypes.bfloat16 if item.attrs.get("dtype") == "bfloat16" else None)
            # The state of a random generator: no weight of a layer looks like it.
            if not (array.dtype == np.uint32 and array.shape == (2,)):
                yield Stored("/".join((*layer, key)), layer, key, array)


def _safetensors(path: str) -> Iterator[Stored]:
    import safetensors

    with safetensors.safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118  (it is no dict)
            yield named(name.replace(".", "/"), file.get_tensor(name), shown=name)

"""What is made from text once and kept in the data directory: vocabularies, and rows of tokens.

Whoever needs it first makes it; of several workers that race, each puts a whole file or folder in place under its final
name, and the last or the first one stays: they are the same.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from launcher.data import tfds
from launcher.data.pipeline import ArrayExamples, Batch, Examples
from launcher.errors import UsageError

_FACTS = "facts.json"
_THERE_ALREADY = (errno.EEXIST, errno.ENOTEMPTY)

Arrays = dict[str, np.ndarray]
Built = tuple[Arrays, dict[str, float]]


def folder() -> Path:
    """Where vocabularies and rows are kept."""
    return Path(tfds.data_dir()) / "text"


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that change with every part."""
    return hashlib.sha256("\0".join(str(part) for part in parts).encode()).hexdigest()[:16]


def file_name(name: str) -> str:
    """A data set's name with nothing in it that a path would mind."""
    return re.sub(r"[^\w.-]+", "_", name)


def stored_bytes(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of `path`, made and put there if it is missing.

    Raises:
      UsageError: the folder cannot be written.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    content = make()
    with _place_for(path) as partial:
        partial.write_bytes(content)
        os.replace(partial, path)
    return content


def stored_rows(path: Path, make: Callable[[], Built]) -> Built:
    """The arrays in folder `path`, memory-mapped, and facts about them; made and put there if they are missing.

    Args:
      path: folder of one .npy file an array.
      make: gives the arrays, none of them empty, and the facts.

    Raises:
      UsageError: the folder cannot be written.
    """
    if not path.is_dir():
        arrays, facts = make()
        with _place_for(path) as partial:
            partial.mkdir()
            for key, array in arrays.items():
                np.save(partial / f"{key}.npy", array)
            (partial / _FACTS).write_text(json.dumps(facts))
            try:
                os.rename(partial, path)
            except OSError as error:
                if error.errno not in _THERE_ALREADY:  # another worker was faster
                    raise
    facts = json.loads((path / _FACTS).read_text())
    return {file.stem: np.load(file, mmap_mode="r") for file in sorted(path.glob("*.npy"))}, facts


@contextlib.contextmanager
def _place_for(path: Path) -> Iterator[Path]:
    """A name of one's own beside `path`; what is still under it at the end is removed."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
    except OSError as error:
        raise UsageError(f"--data_dir={tfds.data_dir()} cannot be written ({error}); choose another folder") from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            with contextlib.suppress(OSError):
                partial.unlink()


class MappedExamples:
    """Examples that stay on disk: what is fetched is read.

    Args:
      arrays: key to memory-mapped array [n, ...], all of one length.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = dict(arrays)
        self._length = len(next(iter(self._arrays.values())))

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: tf.Tensor) -> Batch:
        rows = tf.numpy_function(
            lambda chosen: [np.asarray(array[chosen]) for array in self._arrays.values()],
            [indices],
            [tf.as_dtype(array.dtype) for array in self._arrays.values()],
            stateful=False,
        )
        return {
            key: tf.ensure_shape(row, [indices.shape[0], *self._arrays[key].shape[1:]])
            for key, row in zip(self._arrays, rows, strict=True)
        }


def examples(arrays: Mapping[str, np.ndarray], memory_limit_bytes: int) -> Examples:
    """Rows held in memory if they take no more than `memory_limit_bytes`, else left on disk."""
    if sum(array.nbytes for array in arrays.values()) <= memory_limit_bytes:
        return ArrayExamples(arrays)
    return MappedExamples(arrays)

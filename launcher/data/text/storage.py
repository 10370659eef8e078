"""Vocabularies and rows of tokens: made from text once and kept in the data directory.

Whoever needs it first makes it; of several workers that race, each puts a whole file or folder in place under its final
name, and the last or the first one stays: they are the same. Imports no TensorFlow.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from launcher.data import tfds
from launcher.errors import MissingInputError

_FACTS = "facts.json"
_THERE_ALREADY = (errno.EEXIST, errno.ENOTEMPTY)
_NOT_WRITABLE = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)

Arrays = dict[str, np.ndarray]
Built = tuple[Arrays, dict[str, float]]


def folder(kind: str = "text") -> Path:
    """The folder of vocabularies and rows, or of what is known of another kind of data."""
    return Path(tfds.data_dir()) / kind


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits that change with every part; of an array, with every byte."""
    return hashlib.sha256("\0".join(map(_text, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _text(part: object) -> str:
    if not isinstance(part, np.ndarray):
        return str(part)
    content = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
    return f"{part.dtype}{part.shape}{hashlib.sha256(content).hexdigest()}"


def file_name(name: str) -> str:
    """A data set's name with nothing in it that a path would mind."""
    return re.sub(r"[^\w.-]+", "_", name)[:80]


def stored_bytes(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of `path`, made and put there if it is missing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return path.read_bytes()
    content = make()
    with place_for(path) as partial:
        partial.write_bytes(content)
        os.replace(partial, path)
    return content


def stored_rows(path: Path, make: Callable[[], Built]) -> Built:
    """The arrays in folder `path`, memory-mapped, and facts about them; made, none of them empty, if missing."""
    if not path.is_dir():
        arrays, facts = make()
        with place_for(path) as partial:
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
    return {file.stem: np.load(file, mmap_mode="c") for file in sorted(path.glob("*.npy"))}, facts


@contextlib.contextmanager
def place_for(path: Path) -> Iterator[Path]:
    """A name of one's own beside `path`, in a folder that is there; what is still under it at the end is removed.

    Raises:
      UsageError: the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(error) from None
        yield partial
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise _cannot_write(error) from None
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        with contextlib.suppress(OSError):
            partial.unlink()


def _cannot_write(error: OSError) -> MissingInputError:
    return MissingInputError(f"--data_dir={tfds.data_dir()} cannot be written ({error}); choose another folder")

"""Files of the user's own, on this machine or wherever TensorFlow's file systems reach: found, opened, held out.

A path with "://" in it, such as gs://bucket/train-*.tfrecord, is TensorFlow's to open; every other one is opened by
Python. Imports no TensorFlow before such a path is met.
"""

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator
from typing import IO, Any

from launcher.config.bound_types import check_value
from launcher.errors import MissingInputError, UsageError

EVAL_SHARE = 0.1
"""The share of a set without held-out files that is held out, unless `eval_share` is bound."""


def is_remote(path: str) -> bool:
    return "://" in path


def matching(pattern: str, binding: str) -> list[str]:
    """The files that match a shell pattern such as "~/data/train-*.tfrecord", sorted by name.

    Raises:
      UsageError: there are none; it names the `binding` that the user wrote the pattern in.
    """
    if is_remote(pattern):
        with readable(pattern):
            paths = [path for path in _gfile().glob(pattern) if not _gfile().isdir(path)]
    else:
        paths = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
    if not paths:
        raise MissingInputError(f"{binding}: no file matches {pattern!r}{_from(pattern)}")
    return sorted(map(named, paths))


def named(path: str) -> str:
    """The path, if its name is text, which TensorFlow needs; raises UsageError if not."""
    if path.encode(errors="replace") != path.encode(errors="surrogateescape"):
        raise UsageError(f"{path!a}: its name is no UTF-8; rename it")
    return path


def opened(path: str) -> IO[bytes]:
    """The file, to be read and sought in, local ones not buffered; raises UsageError where it cannot be read."""
    if is_remote(path):
        return _gfile().GFile(path, "rb")  # opened when it is read
    with readable(path):
        return open(path, "rb", buffering=0)


def version(path: str) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds: other numbers mean another content.

    Raises:
      UsageError: the file cannot be found.
    """
    with readable(path):
        if is_remote(path):
            there = _gfile().stat(path)
            return there.length, there.mtime_nsec
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns


def is_held_out(name: str, share: float) -> bool:
    """Whether an example belongs to the held-out share: by a hash of its name, so for good, whatever is added."""
    number = int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")
    return number < share * 2**64


def check_share(share: float | None, binding: str) -> float:
    """The share to hold out; raises UsageError where it is not in [0, 1)."""
    share = EVAL_SHARE if share is None else share
    check_value(f"{binding}.eval_share", share, 0 <= share < 1, "at least 0, for none, and less than 1")
    return share


def share_words(share: float, by: str = "name") -> str:
    """A share and how it is held out, for the plan."""
    return f"{share:.0%} held out by a hash of the {by}" if share else "none held out"


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """A missing or forbidden file as the user's mistake; a disk or a network that fails may do better next time."""
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise MissingInputError(f"{path} cannot be read: {error.strerror}{_from(path)}") from None
    except Exception as error:
        if type(error).__name__ not in ("NotFoundError", "PermissionDeniedError", "UnimplementedError"):
            raise
        # TensorFlow's, which is not imported for this.
        raise MissingInputError(f"{path} cannot be read: {error}") from None


def _from(path: str) -> str:
    """The working directory, for a message that names a path in it."""
    return "" if is_remote(path) or os.path.isabs(os.path.expanduser(path)) else f" (from {os.getcwd()})"


def _gfile() -> Any:
    import tensorflow as tf

    return tf.io.gfile

"""Files that somebody else may have made: a pipe or a device is not opened, and no more is read than belongs there."""

import stat
from pathlib import Path

_MOST_BYTES = 256 * 2**20


class UnfitError(ValueError):
    """Why a file is not read, as the end of a sentence that begins with its name."""


def read(path: Path, most_bytes: int | None = _MOST_BYTES) -> bytes:
    """The contents of a file.

    Raises:
      UnfitError: it is a pipe, a device or a folder, or larger than `most_bytes`, if not None.
      OSError: it cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # to open a pipe waits for its writer
        raise UnfitError("is not a file")
    if most_bytes is not None and status.st_size > most_bytes:
        raise UnfitError(f"has {status.st_size} bytes, and at most {most_bytes} are read")
    return path.read_bytes()

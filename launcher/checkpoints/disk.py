"""Durable changes of the disk: whole or not there after a crash, under a name of their own until they are whole."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

WRITING = ".writing-"
DELETING = ".deleting-"


def aside(prefix: str, path: Path) -> Path:
    """A name beside `path` that no reader looks at, for what is being written or deleted."""
    return path.with_name(f"{prefix}{path.name}-{os.getpid()}")


def write_durably(path: Path, content: bytes) -> None:
    """Writes a new file and waits until its contents are on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, record: Any) -> None:
    """Replaces a small file of JSON: whoever reads it finds all of the old one or of the new one."""
    temporary = aside(WRITING, path)
    try:
        write_durably(temporary, json.dumps(record).encode())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError:
        remove(temporary)
        raise


def sync(path: Path) -> None:
    """Synchronises a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network file systems have no fsync for folders.
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a file or a folder with all in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()

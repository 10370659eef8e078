"""JSON that every reader accepts: plain numbers, and no NaN or Infinity, which JSON does not have."""

import errno
import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.machine import regular_file

NON_FINITE = "non_finite"

Record = Mapping[str, Any]
"""An object of JSON, written or read: an event of a run, a summary."""


def number(value: Any) -> int | float:
    """Returns a Python number for a Python, NumPy or TensorFlow scalar."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (int, float)):
        return value
    raise TypeError(f"a measurement is one number, got {value!r}")


def dumps(record: Record, *, indent: int | None = None) -> str:
    """Strings, booleans, None, numbers (also NumPy and TensorFlow scalars), mappings and lists of them as strict JSON.

    Values that are NaN or infinite become null, and their dotted names are listed under "non_finite":
    `{"loss": nan}` gives `{"loss": null, "non_finite": ["loss"]}`.
    """
    non_finite: list[str] = []
    plain = _plain(record, "", non_finite)
    if non_finite:
        plain[NON_FINITE] = non_finite
    return json.dumps(plain, indent=indent, allow_nan=False)


def read_object(path: Path) -> dict[str, Any]:
    """The object in a file that may be missing, damaged or somebody else's; {} where there is none to be read."""
    try:
        return parsed(regular_file.read(path)) or {}
    except (OSError, regular_file.UnfitError):
        return {}


def read_lines(path: Path, most_bytes: int | None = None) -> list[dict[str, Any]]:
    """The objects in the whole lines of a file, of which a kill leaves half a last one; [] where there is no file."""
    try:
        lines = regular_file.read(path, most_bytes).splitlines()
    except (FileNotFoundError, NotADirectoryError, regular_file.UnfitError):
        return []
    return [record for line in lines if (record := parsed(line)) is not None]


def parsed(text: str | bytes) -> dict[str, Any] | None:
    """The object that a text is; None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def replace_file(path: Path, content: str) -> Path:
    """Writes a whole file atomically: after a crash it has its old contents or the new ones, never half of them.

    Its folder is made if it is missing. Returns the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Process ids may be the same in two containers.
    temporary = path.with_name(f".{path.name}.writing-{uuid.uuid4().hex}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(path: Path, record: Record, *, indent: int = 2) -> None:
    """Writes a record as a whole file; see `replace_file`."""
    replace_file(path, f"{dumps(record, indent=indent)}\n")


def append(path: Path, record: Record) -> None:
    """Appends a record as one line to a file of lines, in one write; half a line that a crash has left is ended first.

    OSError where the disk refuses it: nothing of it is in the file then.
    """
    line = f"{dumps(record)}\n".encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _plain(value: Any, name: str, non_finite: list[str]) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        return {str(key): _plain(item, f"{prefix}{key}", non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    value = number(value)
    if math.isfinite(value):
        return value
    non_finite.append(name)
    return None

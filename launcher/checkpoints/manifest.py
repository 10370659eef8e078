"""The manifest of a checkpoint: what its folder must hold, byte for byte, and what is wrong when it does not.

Reading and verifying need no TensorFlow, so whoever only asks for steps starts in milliseconds.
"""

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.errors import read_error
from launcher.machine import regular_file
from launcher.machine.array_parts import Part

MANIFEST = "manifest.json"
FORMAT = 1
STATE = "state"  # what the names of all other files begin with
HOST = "host/"  # begins the names of state that belongs to no variable, of any size, understood by who wrote it
PROGRAM = "program"  # the part that says what the program is
DATA = "data"  # the part of a run's record that says what its order of examples owes to the data
_FILE = re.compile(rf"{STATE}\.[\w-]+")
_CHUNK_BYTES = 4 * 2**20
_MISSING = (FileNotFoundError, NotADirectoryError)


def array_of(record: Any) -> np.ndarray:
    """A record as the bytes of its JSON, uint8: how a checkpoint holds state that is no variable's."""
    return np.frombuffer(json.dumps(record).encode(), np.uint8)


def record_of(array: np.ndarray) -> Any:
    """The record that such bytes hold."""
    return json.loads(array.tobytes())


class Damage(Exception):
    """Damage of a checkpoint folder, as one clause."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def find_damage(folder: Path) -> str | None:
    """Says what is wrong with a checkpoint (missing file, size, checksum); None when every byte is as written.

    Raises:
        CheckpointReadError: A file cannot be read, so that nobody knows.
    """
    try:
        for name, expected in complete_manifest(folder)["files"].items():
            try:
                digest = sha256_of(folder / name)
            except _MISSING:
                return f"{name} is missing"
            if digest != expected["sha256"]:
                return f"the contents of {name} do not match the checksum in the manifest"
    except Damage as damage:
        return str(damage)
    except OSError as error:
        raise read_error(folder, error) from error
    return None


def is_complete(folder: Path) -> bool:
    """Whether every file is there with its size, as far as that can be seen now; contents are not read."""
    try:
        return bool(complete_manifest(folder))
    except (Damage, OSError):
        return False


def complete_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest and checks that every file is there with its size, without reading the tensors."""
    manifest = read_manifest(folder)
    if folder_name(manifest["step"]) != folder.name:
        raise Damage(f"{MANIFEST} is of step {manifest['step']}")
    for name, expected in manifest["files"].items():
        try:
            file = (folder / name).lstat()
        except _MISSING:
            raise Damage(f"{name} is missing") from None
        if not stat.S_ISREG(file.st_mode):
            raise Damage(f"{name} is {'a link' if stat.S_ISLNK(file.st_mode) else 'not a file'}")
        if file.st_size != expected["size"]:
            raise Damage(f"{name} has {file.st_size} bytes, the manifest says {expected['size']}")
    for path in folder.glob(f"{STATE}.*"):  # which TensorFlow would read as well
        if path.name not in manifest["files"]:
            raise Damage(f"{path.name!r} is not in the manifest")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest without its checksum; what else a newer version has written in it is left in.

    Raises:
        Damage: It is missing, damaged or of another format.
        OSError: It cannot be read.
    """
    try:
        manifest = json.loads(regular_file.read(folder / MANIFEST))
        is_whole = isinstance(manifest, dict) and manifest.pop("sha256", None) == checksum(manifest)
    except _MISSING:
        raise Damage(f"{MANIFEST} is missing") from None
    except regular_file.UnfitError as error:
        raise Damage(f"{MANIFEST} {error}") from None
    except (ValueError, RecursionError) as error:
        raise Damage(f"{MANIFEST} is not JSON ({error})") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise Damage(f"{MANIFEST} has format {version}: a newer version of Launcher wrote it, this one reads {FORMAT}")
    if not is_whole:
        raise Damage(f"{MANIFEST} does not match its own checksum")
    if wrong := [name for name, is_right in _ENTRIES.items() if not is_right(manifest.get(name))]:
        raise Damage(f"{MANIFEST} has no {wrong[0]} that could be one")
    return manifest


def _is_whole_number(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_table(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _are_files(value: Any) -> bool:
    """Names of this folder's alone, so that none leads out of it."""

    def is_file(name: str, about: Any) -> bool:
        is_known = bool(_FILE.fullmatch(name)) and isinstance(about, dict)
        return is_known and _is_whole_number(about.get("size")) and isinstance(about.get("sha256"), str)

    return isinstance(value, dict) and f"{STATE}.index" in value and all(is_file(*item) for item in value.items())


def _is_tensor(about: Any) -> bool:
    is_known = isinstance(about, dict) and isinstance(about.get("dtype"), str) and isinstance(about.get("shape"), list)
    return is_known and all(map(_is_whole_number, about["shape"]))


# What this version relies on, each with whether a value can be one.
_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "format": lambda value: _is_whole_number(value) and value == FORMAT,
    "step": _is_whole_number,
    "time": lambda value: type(value) in (int, float) and -math.inf < value < math.inf,
    "metrics": _is_table,
    "run": lambda value: _is_table(value) and _is_table((value or {}).get(PROGRAM)),
    "scaling": _is_table,
    "files": _are_files,
    "tensors": lambda value: isinstance(value, dict) and all(map(_is_tensor, value.values())),
}


def described(array: np.ndarray | Part) -> dict[str, Any]:
    """The manifest's entry for one tensor."""
    values = array.array if isinstance(array, Part) else array
    return {"shape": list(array.shape), "dtype": values.dtype.name}


def checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

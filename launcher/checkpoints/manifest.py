"""The manifest of a checkpoint: what its folder must hold, byte for byte, and what is wrong when it does not.

Reading and verifying need no TensorFlow, so whoever only asks for steps starts in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.errors import read_error

MANIFEST = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 4 * 2**20
_MISSING = (FileNotFoundError, NotADirectoryError)


class Damage(Exception):
    """What is wrong with a checkpoint folder, as one clause."""


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def find_damage(folder: Path) -> str | None:
    """Says what is wrong with a checkpoint (missing file, size, checksum); None when every byte is as written.

    Raises:
        CheckpointReadError: A file cannot be read, so that nobody knows.
    """
    try:
        for name, expected in complete_manifest(folder)["files"].items():
            if _sha256_in(folder, name) != expected["sha256"]:
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
            found = (folder / name).stat()
        except _MISSING:
            raise Damage(f"{name} is missing") from None
        if not stat.S_ISREG(found.st_mode):
            raise Damage(f"{name} is not a file")
        size = found.st_size
        if size != expected["size"]:
            raise Damage(f"{name} has {size} bytes, the manifest says {expected['size']}")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest without its checksum.

    Raises:
        Damage: It is missing, damaged or of another format.
        OSError: It cannot be read.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except _MISSING:
        raise Damage(f"{MANIFEST} is missing") from None
    except IsADirectoryError:
        raise Damage(f"{MANIFEST} is not a file") from None
    except ValueError as error:
        raise Damage(f"{MANIFEST} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != checksum(manifest):
        raise Damage(f"{MANIFEST} does not match its own checksum")
    if manifest["format"] != FORMAT:
        raise Damage(f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}")
    return manifest


def described(array: np.ndarray) -> dict[str, Any]:
    """What the manifest says of one tensor."""
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _sha256_in(folder: Path, name: str) -> str:
    try:
        return sha256_of(folder / name)
    except _MISSING:
        raise Damage(f"{name} is missing") from None


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()

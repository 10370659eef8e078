"""The compile cache: a folder where XLA keeps what it compiled for `train.jit_compile`, for the next start.

TensorFlow 2.21 trusts what it finds there: an entry that a power cut left half written, or a bit that a disk lost, ends
each run at its first step, or is run. So each entry gets a checksum beside it, and what has none is compiled again.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.errors import UsageError

_SEAL = ".sha256"
folder_in_use: str | None = None  # of this process


# Leans on TensorFlow: `TF_XLA_FLAGS` names the persistent cache's folder, and an entry is one file. Noticed by
# tests/run/test_compile_cache.py. Then: look the flag up in TensorFlow's `xla/flags`; refuse `--compile_cache` until
# then.
def use(folder: str) -> None:
    """Has this process use the folder: TensorFlow reads a variable when it first compiles, and knows no other way."""
    global folder_in_use
    path = str(_path(folder))
    if path.split() != [path] or "://" in folder:
        raise UsageError(f"--compile_cache={folder}: must be a folder of this machine, without spaces in its name")
    present = os.environ.get("TF_XLA_FLAGS", "")
    os.environ["TF_XLA_FLAGS"] = f"{present} --tf_xla_persistent_cache_directory={path}".strip()
    folder_in_use = path


def prepare(folder: str) -> None:
    """Makes the folder where there is none, and removes what is not as it was written."""
    try:
        _path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=_path(folder)):
            pass
        for entry, seal in _entries(folder):
            with contextlib.suppress(FileNotFoundError):  # another worker that begins may have removed it just now
                if seal.read_text() == _checksum(entry):
                    continue
            entry.unlink(missing_ok=True)
            seal.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"--compile_cache={folder}: cannot be used: {error.strerror}") from None


def seal_new(folder: str) -> None:
    """Writes the checksums of entries that have none. Where it cannot, they are compiled again at the next start."""
    with contextlib.suppress(OSError):
        for entry, seal in _entries(folder):
            if not seal.exists():
                seal.write_text(_checksum(entry))


def kept(key: str, make: Callable[[], str]) -> str:
    """What `make` gives; where an earlier process left that whole in the folder in use, under this key, it is read."""
    path = Path(folder_in_use or "", f"{key}.program")
    with contextlib.suppress(OSError, ValueError):
        seal, _, text = path.read_text("utf-8").partition("\n")
        if seal == hashlib.sha256(text.encode()).hexdigest():
            return text
    text = make()
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}", "utf-8")
        partial.replace(path)
    except OSError:  # it is made again at the next start
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return text


def _path(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def _entries(folder: str) -> Iterator[tuple[Path, Path]]:
    for entry in sorted(_path(folder).glob("*.pb")):
        yield entry, entry.with_name(entry.name + _SEAL)


def _checksum(entry: Path) -> str:
    return hashlib.sha256(entry.read_bytes()).hexdigest()

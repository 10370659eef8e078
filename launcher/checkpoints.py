"""Checkpoints: written whole or not at all, verified before they are trusted, kept by rank.

A checkpoint is a folder `step_00000100` with a TensorFlow tensor bundle (`tf.train.load_checkpoint` reads it) and a
`manifest.json` that names every tensor, file size and checksum. It is written under a temporary name beside it,
synchronised to the disk and committed by one rename: whatever is killed, readers see whole checkpoints only.

TensorFlow is imported when tensors are written or read, so whoever only asks for steps starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher import drill
from launcher.errors import EXIT_RETRY, LauncherError, UsageError

_FORMAT = 1
_STATE = "state"
_MANIFEST = "manifest.json"
_BEST = "best.json"
_FOLDER = re.compile(r"step_(\d{8}|[1-9]\d{8,})")
_WRITING = ".writing-"
_DELETING = ".deleting-"
_NAMES_SHOWN = 5
_CHUNK_BYTES = 4 * 2**20

_logger = logging.getLogger(__name__)


class CheckpointWriteError(LauncherError):
    """A checkpoint could not be written; the older ones are untouched. Exit 75: make room, run the same command."""

    exit_code = EXIT_RETRY


class CheckpointReadError(LauncherError):
    """A checkpoint is missing or damaged. Exit 75: the same command takes the newest whole one."""

    exit_code = EXIT_RETRY


class _Damage(Exception):
    """What is wrong with a checkpoint folder, as one clause."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Best:
    """The step of the checkpoint that evaluated best so far, and the metric it was judged by."""

    step: int
    metric: str
    value: float


class CheckpointStore:
    """The checkpoints of one run, in one directory that every worker can read and the chief writes.

    Args:
        directory: Where checkpoints live; made by the first save. A local or mounted path: a bucket has no rename.
        keep: How many of the newest whole checkpoints to keep; the best one is kept besides.
        is_chief: Whether this process writes. Elsewhere `save` and `mark_best` return at once.

    Raises:
        UsageError: `keep` is below 1 or `directory` is a URL.
    """

    def __init__(self, directory: str, *, keep: int = 3, is_chief: bool = True):
        if keep < 1:
            raise UsageError(f"The number of checkpoints to keep is {keep}; it must be at least 1.")
        if "://" in directory:
            raise UsageError(
                f"Checkpoints cannot be written to {directory}: they need a file system with an atomic rename. "
                "Mount the bucket or a shared disk and give its path as --model_dir."
            )
        self._directory = Path(directory)
        self._keep = keep
        self._is_chief = is_chief
        self._whole: dict[int, bool] = {}  # What retention knows, so that it reads each old checkpoint once.

    def save(self, step: int, state: Mapping[str, np.ndarray], *, metrics: Mapping[str, float] | None = None) -> str:
        """Saves `state` as the checkpoint of `step` and retires the checkpoints that are no longer kept.

        A whole checkpoint of this step is left as it is; a damaged one is replaced.

        Args:
            step: Training step, 0 or more.
            state: Arrays by name ('/' allowed) of any shape and any numeric or boolean dtype, bfloat16 included.
            metrics: Recorded in the manifest for people.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointWriteError: The disk is full or may not be written; nothing older is lost.
        """
        folder = self._folder(step)
        if not self._is_chief:
            return str(folder)
        if folder.exists():
            if not (damage := find_damage(folder)):
                return str(folder)
            _logger.warning("Replacing the damaged checkpoint %s: %s.", folder, damage)
        self._remove_leftovers()
        write_checkpoint(self._directory, step, state, metrics or {})
        self._whole[step] = True
        self._retire()
        return str(folder)

    def steps(self) -> list[int]:
        """Returns the steps with a complete checkpoint, ascending; contents are not verified (`latest` does)."""
        return [step for step in self._folders() if _is_complete(self._folder(step))]

    def latest(self) -> int | None:
        """Returns the newest step whose checkpoint verifies, None when there is none.

        Every file is read and compared with its checksum. A damaged checkpoint is named in a warning, left where it
        is for a person to look at, and the next older one is tried.
        """
        skipped: set[int] = set()
        while True:
            candidates = [step for step in self._folders() if step not in skipped]
            if not candidates:
                return None
            step = candidates[-1]
            folder = self._folder(step)
            damage = find_damage(folder)
            if damage is None:
                return step
            if not folder.exists():
                continue  # Retired by the chief while it was being read, so there are newer ones: look again.
            _logger.warning("Skipping the damaged checkpoint %s: %s.", folder, damage)
            skipped.add(step)

    def best(self) -> int | None:
        """Returns the step last given to `mark_best` when its checkpoint verifies, None otherwise."""
        record = self.best_record()
        if record is None:
            return None
        if damage := find_damage(self._folder(record.step)):
            _logger.warning("The best checkpoint %s is damaged: %s.", self._folder(record.step), damage)
        return None if damage else record.step

    def best_record(self) -> Best | None:
        """Returns what `mark_best` recorded last, so that a resumed run knows what it has to beat."""
        path = self._directory / _BEST
        try:
            record = json.loads(path.read_bytes())
            return Best(step=int(record["step"]), metric=str(record["metric"]), value=float(record["value"]))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            _logger.warning("Ignoring the damaged record of the best checkpoint %s: %r.", path, error)
        return None

    def mark_best(self, step: int, *, metric: str, value: float) -> None:
        """Records that `step` is the best checkpoint; compares nothing, the caller decides.

        Raises:
            ValueError: `step` has no complete checkpoint, or `value` is not finite.
            CheckpointWriteError: The record could not be written.
        """
        if not self._is_chief:
            return
        if not math.isfinite(value) or not _is_complete(self._folder(step)):
            raise ValueError(f"step {step} ({metric} {value}) must be finite and have a complete checkpoint to be best")
        record = {"step": int(step), "metric": metric, "value": float(value), "time": time.time()}
        temporary = _aside(_WRITING, self._directory / _BEST)
        try:
            _write_durably(temporary, json.dumps(record).encode())
            os.replace(temporary, self._directory / _BEST)
            _sync(self._directory)
        except OSError as error:
            _remove(temporary)
            raise _write_error(f"the record of the best checkpoint (step {step})", temporary, 1024, error) from error

    def read(self, step: int) -> dict[str, np.ndarray]:
        """Returns the arrays saved at `step`, bit for bit, by name, in the order they were given to `save`.

        Raises:
            CheckpointReadError: There is no such checkpoint (any more), or it is damaged.
        """
        import tensorflow as tf

        folder = self._folder(step)
        described = self.manifest(step)["tensors"]
        try:
            reader = tf.train.load_checkpoint(str(folder / _STATE))
            state = {name: np.asarray(reader.get_tensor(name)) for name in described}
        except (tf.errors.OpError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointReadError(f"The checkpoint {folder} cannot be read: {error}") from error
        for name, array in state.items():
            if _described(array) != described[name]:
                raise CheckpointReadError(
                    f"The checkpoint {folder} holds {name} as {_described(array)}, its manifest says {described[name]}."
                )
        return state

    def manifest(self, step: int) -> dict[str, Any]:
        """Returns what is recorded of a checkpoint: step, time (Unix seconds), metrics, files, tensors.

        Raises:
            CheckpointReadError: There is no such checkpoint (any more), or its manifest is damaged.
        """
        try:
            return _read_manifest(self._folder(step))
        except (_Damage, OSError) as damage:
            raise CheckpointReadError(f"The checkpoint {self._folder(step)} cannot be read: {damage}.") from damage

    def check_compatible(self, step: int, expected: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        """Refuses a checkpoint that was written by another model.

        Args:
            step: A step of this store.
            expected: Shape and dtype (NumPy's, TensorFlow's or a name) of every array the model needs, by name.

        Raises:
            UsageError: Names are missing or unexpected, or shapes or dtypes differ; at most five of each are shown.
            CheckpointReadError: There is no such checkpoint, or its manifest is damaged.
        """
        found = self.manifest(step)["tensors"]
        wanted = {name: {"shape": list(size), "dtype": _dtype_name(dtype)} for name, (size, dtype) in expected.items()}
        differences = {
            "missing": [f"{name} {_show(wanted[name])}" for name in wanted if name not in found],
            "unexpected": [f"{name} {_show(found[name])}" for name in found if name not in wanted],
            "different": [
                f"{name} is {_show(found[name])} in the checkpoint, {_show(wanted[name])} in the model"
                for name in wanted
                if name in found and found[name] != wanted[name]
            ],
        }
        details = "".join(f"\n  {kind}: {_shorten(names)}" for kind, names in differences.items() if names)
        if details:
            raise UsageError(
                f"This model_dir holds a checkpoint of another model (step {step} in {self._directory}).{details}\n"
                f"Choose another --model_dir, or remove {self._directory}."
            )

    def _folder(self, step: int) -> Path:
        return self._directory / _folder_name(step)

    def _folders(self) -> list[int]:
        """Steps that have a folder, whole or not, ascending."""
        try:
            entries = [entry.name for entry in os.scandir(self._directory) if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointReadError(f"The checkpoints in {self._directory} cannot be listed: {error}.") from error
        return sorted(int(match[1]) for match in map(_FOLDER.fullmatch, entries) if match)

    def _remove_leftovers(self) -> None:
        """Removes what a killed writer left half-done. The chief is the only writer, so nobody is at work there."""
        for prefix in (_WRITING, _DELETING):
            for path in self._directory.glob(f"{prefix}*"):
                _remove(path)

    def _retire(self) -> None:
        """Deletes all whole checkpoints but the newest few and the best; damaged ones are evidence and stay."""
        whole = [step for step in self.steps() if self._is_whole(step)]
        best = self.best_record()
        kept = {*whole[-self._keep :], best.step if best else -1}
        for step in sorted(set(whole) - kept):
            folder = self._folder(step)
            hidden = _aside(_DELETING, folder)
            try:
                os.rename(folder, hidden)  # Readers see a checkpoint or none, never half of one.
                _remove(hidden)
            except OSError as error:
                _logger.warning("Could not delete the old checkpoint %s: %s.", folder, error)

    def _is_whole(self, step: int) -> bool:
        if step not in self._whole:
            self._whole[step] = find_damage(self._folder(step)) is None
        return self._whole[step]


def write_checkpoint(directory: Path, step: int, state: Mapping[str, np.ndarray], metrics: Mapping[str, float]) -> Path:
    """Writes one checkpoint durably and commits it.

    It depends on its arguments alone, so a snapshot may be written from another thread while training goes on; the
    arrays must not change meanwhile.

    Args:
        directory: The store's directory, made when it is missing.
        step, state, metrics: As for `CheckpointStore.save`; a metric that is not finite is recorded as null.

    Returns:
        The committed folder.

    Raises:
        CheckpointWriteError: As `CheckpointStore.save`; the half-written folder has been removed.
    """
    arrays = {name: np.asarray(value) for name, value in state.items()}
    _check_savable(step, arrays)
    final = directory / _folder_name(step)
    temporary = _aside(_WRITING, final)
    needed_bytes = sum(array.nbytes for array in arrays.values())
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            _sync(directory.parent)
        temporary.mkdir()
        drill.before_write()
        _write_bundle(temporary / _STATE, arrays)
        files = {path.name: _synchronised(path) for path in sorted(temporary.iterdir())}
        if sum(file["size"] for file in files.values()) < needed_bytes:
            raise OSError(errno.EIO, "the file system kept fewer bytes than were written")
        manifest: dict[str, Any] = {
            "format": _FORMAT,
            "step": int(step),
            "time": time.time(),
            "metrics": {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()},
            "files": files,
            "tensors": {name: _described(array) for name, array in arrays.items()},
        }
        manifest["sha256"] = _manifest_sha256(manifest)
        _write_durably(temporary / _MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync(temporary)
        _commit(temporary, final)
    except BaseException as error:
        _remove(temporary)
        if isinstance(error, OSError):
            raise _write_error(f"the checkpoint of step {step}", temporary, needed_bytes, error) from error
        raise
    return final


def find_damage(folder: Path) -> str | None:
    """Says what is wrong with a checkpoint (missing file, size, checksum); None when every byte is as written."""
    try:
        for name, expected in _complete_manifest(folder)["files"].items():
            if _sha256(folder / name) != expected["sha256"]:
                return f"the contents of {name} do not match the checksum in the manifest"
    except (_Damage, OSError) as damage:
        return str(damage)
    return None


def _complete_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest and checks that every file is there with its size, without reading the tensors."""
    manifest = _read_manifest(folder)
    if _folder_name(manifest["step"]) != folder.name:
        raise _Damage(f"{_MANIFEST} is of step {manifest['step']}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise _Damage(f"{name} is missing")
        size = path.stat().st_size
        if size != expected["size"]:
            raise _Damage(f"{name} has {size} bytes, the manifest says {expected['size']}")
    return manifest


def _is_complete(folder: Path) -> bool:
    try:
        return bool(_complete_manifest(folder))
    except (_Damage, OSError):
        return False


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except FileNotFoundError:
        raise _Damage(f"{_MANIFEST} is missing") from None
    except ValueError as error:
        raise _Damage(f"{_MANIFEST} is not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _manifest_sha256(manifest):
        raise _Damage(f"{_MANIFEST} does not match its own checksum")
    if manifest["format"] != _FORMAT:
        raise _Damage(f"{_MANIFEST} has format {manifest['format']}, this version reads {_FORMAT}")
    return manifest


def _manifest_sha256(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _check_savable(step: int, arrays: Mapping[str, np.ndarray]) -> None:
    if step < 0 or not arrays or "" in arrays:
        raise ValueError(f"a checkpoint needs a step >= 0 and named arrays; got step {step}, {list(arrays)[:3]}")
    refused = [f"{name} ({array.dtype})" for name, array in arrays.items() if array.dtype.kind in "OSUMm"]
    if refused:
        raise TypeError(f"a checkpoint holds numbers and booleans, not {_shorten(refused)}")


def _write_bundle(prefix: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import tensorflow as tf

    try:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=list(arrays),
                shape_and_slices=[""] * len(arrays),
                tensors=[tf.convert_to_tensor(array) for array in arrays.values()],
            )
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message) from error


def _commit(temporary: Path, final: Path) -> None:
    replaced = _aside(_DELETING, final)
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    _sync(final.parent)
    _remove(replaced)


def _write_durably(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    """Synchronises a file's contents, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some network file systems have no fsync for folders.
            raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _synchronised(path: Path) -> dict[str, Any]:
    _sync(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _write_error(what: str, path: Path, needed_bytes: int, error: OSError) -> CheckpointWriteError:
    place = next(parent for parent in path.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(place).free
    return CheckpointWriteError(
        f"Could not write {what} in {path.parent}: {error.strerror or error}. "
        f"It needs {needed_bytes / 2**20:.2f} MiB; {free_bytes / 2**20:.2f} MiB are free. Older checkpoints are kept. "
        "Make room or allow writing there, then run the same command again."
    )


def _aside(prefix: str, path: Path) -> Path:
    return path.with_name(f"{prefix}{path.name}-{os.getpid()}")


def _folder_name(step: int) -> str:
    return f"step_{step:08d}"


def _described(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name}


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        return dtype
    return str(dtype.name) if hasattr(dtype, "name") else np.dtype(dtype).name


def _show(description: Mapping[str, Any]) -> str:
    return f"{description['dtype']}{description['shape']}"


def _shorten(names: Sequence[str]) -> str:
    hidden = len(names) - _NAMES_SHOWN
    return "; ".join(names[:_NAMES_SHOWN]) + (f"; and {hidden} more" if hidden > 0 else "")

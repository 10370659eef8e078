"""The tensors of one checkpoint: written whole or not at all, read back bit for bit."""

import contextlib
import dataclasses
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.disk import DELETING, WRITING, aside, remove, replace_durably, sync, write_durably
from launcher.checkpoints.errors import CheckpointReadError, write_error
from launcher.checkpoints.manifest import FORMAT, MANIFEST, STATE, checksum, described, folder_name, sha256_of
from launcher.machine.array_parts import Part, Range, Source
from launcher.worker import drill

State = Mapping[str, np.ndarray | Part]
_PART = "part-{}"
_LOOK_SECONDS = 0.05  # between two looks whether the others have written their parts


@dataclasses.dataclass(frozen=True)
class Writers:
    """The processes that write one checkpoint together, each what it has of it; the first commits it.

    Attributes:
      index, count: which of them this one is.
      any: whether one of them says so; all call it after the same steps.
      given_up: set when nobody waits for the others any more.
    """

    index: int = 0
    count: int = 1
    any: Callable[[bool], bool] = bool
    given_up: threading.Event = dataclasses.field(default_factory=threading.Event)


def make_room(directory: Path, step: int) -> None:
    """Makes the folder in which the checkpoint of a step is written, before any writer begins."""
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        sync(directory.parent)
    _room(directory, step).mkdir(exist_ok=True)


def write_checkpoint(
    directory: Path,
    step: int,
    state: State,
    about: Mapping[str, Any],
    before_commit: Callable[[], None],
    writers: Writers,
) -> None:
    """Writes one checkpoint durably and commits it.

    It depends on its arguments alone, so a snapshot may be written from another thread while training goes on; the
    arrays must not change meanwhile.

    Args: as for `CheckpointStore` and its `save`; `about` is what else the manifest records. An error that
    `before_commit` raises, when all is written but the commit, leaves nothing behind. Several `writers` after
    `make_room`.

    Raises:
        CheckpointWriteError: As `CheckpointStore.save`; the half-written folder has been removed.
    """
    arrays = {name: value if isinstance(value, Part) else np.asarray(value) for name, value in state.items()}
    if writers.index:  # what all have alike is for the first of them
        arrays = {name: value for name, value in arrays.items() if isinstance(value, Part)}
    final, room, part = directory / folder_name(step), _room(directory, step), _PART.format(writers.index)
    needed_bytes = sum(_own(array).nbytes for array in arrays.values())
    try:
        if writers.count == 1:
            make_room(directory, step)
        drill.before_write()
        _write_bundle(room / part, arrays)
        files = _durable(room.glob(f"{part}.*"))
        if sum(file["size"] for file in files.values()) < needed_bytes:
            raise OSError(errno.EIO, "the file system kept fewer bytes than were written")
        if writers.index:
            replace_durably(room / f"{part}.json", files)
            return
        files = _merged(room, writers, files)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": int(step),
            "time": time.time(),
            **about,
            "files": files,
            "tensors": {name: described(array) for name, array in arrays.items()},
        }
        manifest["sha256"] = checksum(manifest)
        write_durably(room / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync(room)
        before_commit()
        replaced = aside(DELETING, final)
        if final.exists():
            os.rename(final, replaced)
        os.rename(room, final)
        sync(final.parent)
        remove(replaced)
    except BaseException as error:
        if not writers.index:
            remove(room)
        else:
            with contextlib.suppress(OSError):
                replace_durably(room / f"{part}.json", {"error": str(error)})
        if isinstance(error, OSError):
            raise write_error(f"the checkpoint of step {step}", room, needed_bytes, error) from error
        raise


def _room(directory: Path, step: int) -> Path:
    return directory / f"{WRITING}{folder_name(step)}"


def _own(value: np.ndarray | Part) -> np.ndarray:
    return value.array if isinstance(value, Part) else value


def _durable(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Brings files to the disk; what a manifest says of them, by name."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(paths):
        sync(path)
        files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
    return files


def _merged(folder: Path, writers: Writers, own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Waits for the parts of the others, and makes one bundle of all; what a manifest says of its files."""
    written = [own]
    for index in range(1, writers.count):
        path = folder / f"{_PART.format(index)}.json"
        while not path.exists():
            if writers.given_up.wait(_LOOK_SECONDS):
                raise OSError(errno.EIO, f"worker {index} did not write its part")
        written.append(json.loads(path.read_bytes()))
        if "error" in written[-1]:
            raise OSError(errno.EIO, f"worker {index} could not write its part: {written[-1]['error']}")
        path.unlink()
    prefixes = [str(folder / _PART.format(index)) for index in range(writers.count)]
    # Data files are renamed, in the order of the prefixes; nothing is copied.
    with _on_host() as ops:
        ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes, destination_prefix=str(folder / STATE), delete_old_dirs=False
        )
    of_data = [about for files in written for name, about in files.items() if ".data-" in name]
    files = dict(zip((path.name for path in sorted(folder.glob(f"{STATE}.data-*"))), of_data, strict=True))
    return {**files, **_durable([folder / f"{STATE}.index"])}


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint, of which is read what is asked for; a source, see `array_parts`."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # NumPy's name

    def __call__(self, where: Range | None) -> np.ndarray:
        return read_arrays([self], where)[0]

    def astype(self, dtype: str) -> Source:
        if dtype == self.dtype:
            return self
        import tensorflow as tf

        return lambda where: self(where).astype(tf.dtypes.as_dtype(dtype).as_numpy_dtype)


def read_arrays(stored: Sequence[StoredArray], where: Range | None = None) -> list[np.ndarray]:
    """Arrays of one checkpoint, bit for bit as they were saved: a file is opened once for all of them.

    Raises:
        CheckpointReadError: One cannot be read, or is something else than the manifest says.
    """
    import tensorflow as tf

    if not stored:
        return []
    try:
        with _on_host() as ops:
            tensors = ops.RestoreV2(
                prefix=str(stored[0].folder / STATE),
                tensor_names=[one.name for one in stored],
                shape_and_slices=["" if where is None else _slice(one.shape, where) for one in stored],
                dtypes=[tf.dtypes.as_dtype(one.dtype) for one in stored],
            )
        arrays = list(map(np.asarray, tensors))
        for one, array in zip(stored, arrays, strict=True):
            if where is None and array.shape != one.shape:
                raise ValueError(f"{one.name} has the shape {array.shape}, its manifest says {one.shape}")
    except (OSError, TypeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointReadError(f"The checkpoint {stored[0].folder} cannot be read: {why}") from error
    return arrays


def _slice(shape: Sequence[int], where: Range) -> str:
    """As TensorFlow's bundles write what of an array of a shape a tensor is."""
    slices = [f"{where.begin},{where.size}" if axis == where.axis else "-" for axis in range(len(shape))]
    return f"{' '.join(map(str, shape))} {':'.join(slices)}"


def _write_bundle(prefix: Path, arrays: State) -> None:
    from launcher.machine.host_arrays import shared_tensor

    with _on_host() as ops:
        ops.SaveV2(
            prefix=str(prefix),
            tensor_names=list(arrays),
            shape_and_slices=[_slice(it.shape, it.where) if isinstance(it, Part) else "" for it in arrays.values()],
            tensors=[shared_tensor(_own(array)) for array in arrays.values()],
        )


@contextlib.contextmanager
def _on_host() -> Iterator[Any]:
    """TensorFlow's operations on bundles, by this host; OSError where one fails."""
    import tensorflow as tf

    try:
        # Not in the scope of whoever calls: connected to a TPU's hosts, TensorFlow writes from one of those by default.
        with tf.device(None), tf.device("CPU:0"):
            yield tf.raw_ops
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message) from error

"""The tensors of one checkpoint: written whole or not at all, read back bit for bit."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launcher.checkpoints.disk import DELETING, WRITING, aside, remove, sync, write_durably
from launcher.checkpoints.errors import CheckpointReadError, shorten, write_error
from launcher.checkpoints.manifest import FORMAT, MANIFEST, STATE, checksum, described, folder_name, sha256_of
from launcher.worker import drill


def write_checkpoint(
    directory: Path,
    step: int,
    state: Mapping[str, np.ndarray],
    metrics: Mapping[str, float],
    run: Mapping[str, Any],
    scaling: Mapping[str, Any] | None,
    before_commit: Callable[[], None],
) -> None:
    """Writes one checkpoint durably and commits it.

    It depends on its arguments alone, so a snapshot may be written from another thread while training goes on; the
    arrays must not change meanwhile.

    Args: as for `CheckpointStore` and its `save`; a metric that is not finite is recorded as null. An error that
    `before_commit` raises, when all is written but the commit, leaves nothing behind.

    Raises:
        CheckpointWriteError: As `CheckpointStore.save`; the half-written folder has been removed.
    """
    arrays = {name: np.asarray(value) for name, value in state.items()}
    _check_savable(step, arrays)
    final = directory / folder_name(step)
    temporary = aside(WRITING, final)
    needed_bytes = sum(array.nbytes for array in arrays.values())
    try:
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            sync(directory.parent)
        temporary.mkdir()
        drill.before_write()
        _write_bundle(temporary / STATE, arrays)
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(temporary.iterdir()):
            sync(path)
            files[path.name] = {"size": path.stat().st_size, "sha256": sha256_of(path)}
        if sum(file["size"] for file in files.values()) < needed_bytes:
            raise OSError(errno.EIO, "the file system kept fewer bytes than were written")
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "step": int(step),
            "time": time.time(),
            "metrics": {name: float(v) if math.isfinite(v) else None for name, v in metrics.items()},
            "run": dict(run),
            "scaling": scaling,
            "files": files,
            "tensors": {name: described(array) for name, array in arrays.items()},
        }
        manifest["sha256"] = checksum(manifest)
        write_durably(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
        sync(temporary)
        before_commit()
        replaced = aside(DELETING, final)
        if final.exists():
            os.rename(final, replaced)
        os.rename(temporary, final)
        sync(final.parent)
        remove(replaced)
    except BaseException as error:
        remove(temporary)
        if isinstance(error, OSError):
            raise write_error(f"the checkpoint of step {step}", temporary, needed_bytes, error) from error
        raise


def read_checkpoint(folder: Path, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of a committed checkpoint, bit for bit, by name; `tensors` is what its manifest says of each.

    Raises:
        CheckpointReadError: The files cannot be read, or hold something else than the manifest says.
    """
    import tensorflow as tf

    try:
        reader = tf.train.load_checkpoint(str(folder / STATE))
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
        for name, about in tensors.items():  # before memory is taken for any of them
            found = {"shape": shapes[name], "dtype": dtypes[name].name} if name in shapes else "nothing"
            if found != {key: about[key] for key in ("shape", "dtype")}:
                raise CheckpointReadError(
                    f"The checkpoint {folder} holds {name} as {found}, its manifest says {about}."
                )
        return {name: np.asarray(reader.get_tensor(name)) for name in tensors}
    except (tf.errors.OpError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointReadError(f"The checkpoint {folder} cannot be read: {error}") from error


def _check_savable(step: int, arrays: Mapping[str, np.ndarray]) -> None:
    if step < 0 or not arrays or "" in arrays:
        raise ValueError(f"a checkpoint needs a step >= 0 and named arrays; got step {step}, {list(arrays)[:3]}")
    refused = [f"{name} ({array.dtype})" for name, array in arrays.items() if array.dtype.kind in "OSUMm"]
    if refused:
        raise TypeError(f"a checkpoint holds numbers and booleans, not {shorten(refused)}")


def _write_bundle(prefix: Path, arrays: Mapping[str, np.ndarray]) -> None:
    import tensorflow as tf

    from launcher.machine.host_arrays import shared_tensor

    try:
        # Not in the scope of whoever calls: connected to a TPU's hosts, TensorFlow writes from one of those by default.
        with tf.device(None), tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=list(arrays),
                shape_and_slices=[""] * len(arrays),
                tensors=[shared_tensor(array) for array in arrays.values()],
            )
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message) from error

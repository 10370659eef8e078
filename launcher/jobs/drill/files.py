"""The checkpoint files of a job and of a drill: the newest found, one damaged, the last two compared."""

import contextlib
from pathlib import Path
from typing import Any

_DAMAGED_BYTES = 64


def newest_step(model_dir: Path) -> int | None:
    """The newest complete checkpoint; None without one."""
    return max(all_steps(model_dir), default=None)


def all_steps(model_dir: Path) -> list[int]:
    """Steps that have a complete checkpoint, as far as manifests tell, ascending."""
    # Reads manifests only. NumPy comes with it, which a job that never ends early need not wait for.
    if not (model_dir / "checkpoints").is_dir():
        return []
    from launcher.checkpoints import CheckpointReadError, CheckpointStore

    try:
        return CheckpointStore(str(model_dir / "checkpoints")).steps()
    except CheckpointReadError:
        return []


def damage(model_dir: Path, step: int) -> tuple[int, int]:
    """Flips bytes of a checkpoint's largest file, as a bad disk does; returns the file's size and time."""
    from launcher.checkpoints import CheckpointStore
    from launcher.checkpoints.manifest import folder_name

    folder = model_dir / "checkpoints" / folder_name(step)
    names = CheckpointStore(str(model_dir / "checkpoints")).manifest(step)["files"]
    path = max((folder / name for name in names), key=lambda path: path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(max(0, path.stat().st_size - _DAMAGED_BYTES) // 2)
        before = file.read(_DAMAGED_BYTES)
        file.seek(-len(before), 1)
        file.write(bytes(byte ^ 0xFF for byte in before))
    return _size_and_time(path)


def is_kept(model_dir: Path, damaged: tuple[int, int]) -> bool:
    """Whether a damaged file is still there, under whatever name, for a person to look at."""
    for _ in range(3):  # again, because it may get its other name between being listed and being looked at
        for path in (model_dir / "checkpoints").rglob("*"):
            with contextlib.suppress(OSError):  # moved or retired meanwhile
                if _size_and_time(path) == damaged:
                    return True
    return False


def _size_and_time(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def difference(ours: Path, other: Path) -> str:
    """The difference between the last checkpoints of two runs; empty when their arrays are equal bit for bit."""
    from launcher.checkpoints import CheckpointReadError, CheckpointStore

    last = []
    for model_dir in (ours, other):
        store = CheckpointStore(str(model_dir / "checkpoints"))
        try:
            step = store.latest()
            if step is None:
                return f"no whole checkpoint in {model_dir}"
            last.append((step, store.manifest(step)))
        except CheckpointReadError as error:
            return str(error)
    (step, manifest), (other_step, other_manifest) = last
    if step != other_step:
        return f"the last checkpoint is of step {step}, that of {other} of step {other_step}"
    if manifest["tensors"] != other_manifest["tensors"]:
        return f"the arrays of step {step} have other names, shapes or dtypes than those in {other}"
    differing = [name for name, sha256 in _data(manifest).items() if _data(other_manifest).get(name) != sha256]
    return f"the bytes of step {step} in {', '.join(differing)} differ from those in {other}" if differing else ""


def _data(manifest: dict[str, Any]) -> dict[str, str]:
    """Checksums of the files that hold the arrays; an index beside them says only where."""
    return {name: file["sha256"] for name, file in manifest["files"].items() if not name.endswith(".index")}

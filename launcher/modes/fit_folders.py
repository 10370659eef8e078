"""Folders of `launcher.fit` without `model_dir`: a fresh one for each call, and `--mode=clean`, which deletes them.

A fresh one lies in runs/fit and is named after the time; runs/fit/latest leads to the newest. The newest 20 are kept,
and those that are written to. What a scheduler starts again, as Slurm does, finds the folders of its job: its calls are
numbered. Where a person starts a program again, it is another training.
"""

import contextlib
import itertools
import os
import shutil
import sys
import time
import uuid
import zlib
from pathlib import Path

from launcher.errors import EXIT_DONE, LauncherError, notebook
from launcher.machine import cluster
from launcher.model_dir import lease
from launcher.modes import Request

_ROOT, _KEPT = os.path.join("runs", "fit"), 20
_FRESH = "-".join(("[0-9]" * 8, "[0-9]" * 6, "[0-9a-f]" * 8))  # as `chosen` names them: others are not deleted
_calls = itertools.count(1)  # of this process


def chosen() -> str:
    """The folder of a call that names none."""
    job = os.environ.get("SLURM_JOB_ID") or cluster.resolve(os.environ).workers
    if not job or os.isatty(0) or notebook.shell():
        seconds, rest = divmod(time.time_ns(), 10**9)  # two calls of one second are in order, too
        return os.path.join(_ROOT, f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(seconds))}-{rest:08x}")
    program = zlib.crc32(repr((job, sys.argv)).encode())
    return os.path.join(_ROOT, f"job_{program:08x}_{next(_calls)}")


def tidy(root: str = _ROOT, keep: int = _KEPT) -> None:
    """Deletes all but the newest fresh folders and what is written to, and has `latest` lead to the newest."""
    found = sorted(Path(root).glob(_FRESH), reverse=True)
    for one in found[keep:]:
        with contextlib.suppress(LauncherError), lease.held(str(one), environ={}, say=lambda text: None):
            shutil.rmtree(one, ignore_errors=True)
    latest, partial = Path(root, "latest"), Path(root, f"latest.{uuid.uuid4()}")
    with contextlib.suppress(OSError):
        if left := [one for one in found if one.exists()]:
            partial.symlink_to(left[0].name)
            partial.replace(latest)
        elif latest.is_symlink():
            latest.unlink()
            os.removedirs(root)


def run(request: Request) -> int:
    """Deletes all that nobody writes to, in runs/fit or --model_dir."""
    if not request.dry_run:
        tidy(request.model_dir or _ROOT, 0)
    return EXIT_DONE

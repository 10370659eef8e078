"""The worker's side of a drill: one fault of its own making, when the supervisor gives the sign.

`python -m launcher.launch --drill=…` sets LAUNCHER_DRILL for one worker of the first attempt and sends it SIGUSR2 when
the time has come. Without the variable, every function here does nothing. Imports no TensorFlow.
"""

import dataclasses
import errno
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

from launcher.errors import UsageError

VARIABLE = "LAUNCHER_DRILL"
EXCEPTION, STUCK, DISK_FULL, FLIP_BIT = KINDS = ("exception", "stuck", "disk_full", "flip_bit")


@dataclasses.dataclass
class _Drill:
    kind: str = ""
    armed: bool = False
    struck: bool = False


_drill = _Drill()


def install(environ: Mapping[str, str]) -> None:
    """Waits for the sign, if LAUNCHER_DRILL asks for it; to be called in the main thread, before the first step."""
    kind = environ.get(VARIABLE)
    if kind is None:
        return
    if kind not in KINDS:
        raise UsageError(f"{VARIABLE}={kind!r}: expected one of {', '.join(KINDS)}; unset it, --drill sets it")
    _drill.kind, _drill.armed, _drill.struck = kind, False, False
    signal.signal(signal.SIGUSR2, _arm)


def has_struck() -> bool:
    """Whether the fault has happened and this process lives on."""
    return _drill.struck


def between_steps() -> None:
    """Fails here, as when a network disk cannot be read for a moment, or never returns, when it is time for that."""
    if _strikes(EXCEPTION):
        raise OSError(errno.EIO, "drill: a read that failed")
    if _strikes(STUCK):
        _never_return()


def before_write() -> None:
    """Stands where a checkpoint is being written, and fails once, as a full disk does (OSError, ENOSPC)."""
    if _strikes(DISK_FULL):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (drill)")


def flips_bit() -> bool:
    """Whether a bit of what a device computes is to come out wrong now, once."""
    return _strikes(FLIP_BIT)


def _arm(number: int, frame: FrameType | None) -> None:
    _drill.armed = True


def _strikes(kind: str) -> bool:
    if _drill.kind != kind or not _drill.armed or _drill.struck:
        return False
    _drill.struck = True
    return True


def _never_return() -> None:  # a name that stacks show
    threading.Event().wait()

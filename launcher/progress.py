"""The worker's side of being watched: where it is, why it failed, what it is doing when somebody asks.

A supervisor (`launcher.jobs`) names two files in the worker's environment and sends one signal. Without a supervisor,
every function here does nothing. Imports no TensorFlow: it must work before that import, and after a failed one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher import drill
from launcher.errors import EXIT_DONE, EXIT_PREEMPTED

PROGRESS_FILE = "LAUNCHER_PROGRESS_FILE"
ERROR_FILE = "LAUNCHER_ERROR_FILE"

_STDERR = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Where a worker is.

    Attributes:
      step: training steps done; None before the first is known.
      phase: "startup", "compile", "train", "evaluate" or "checkpoint".
      count: how many reports the writing `Progress` has made.
      time: Unix seconds.
      monotonic: seconds of the host's monotonic clock, which all its processes share.
      first_step: the step this worker began at; None before it is known.
      drill_struck: whether a drill's fault has happened in it.
    """

    step: int | None
    phase: str
    count: int
    time: float
    monotonic: float
    first_step: int | None = None
    drill_struck: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """Why a worker failed, in its own words: the exception, the exit code it was about to end with, and when."""

    type: str
    message: str
    traceback: str
    exit_code: int
    time: float
    monotonic: float


class Progress:
    """Tells the supervisor, in one small file, how far this worker is.

    A report costs the writing of a hundred bytes to a local temporary file, so every turn of a host loop may make one.

        progress = Progress(os.environ)
        progress.report(phase="train", step=120)

    Args:
      environ: the process's environment; without LAUNCHER_PROGRESS_FILE in it, reports go nowhere.
    """

    def __init__(self, environ: Mapping[str, str]):
        self._path = environ.get(PROGRESS_FILE) or None
        self._step: int | None = None
        self._first_step: int | None = None
        self._count = 0
        self._lock = threading.Lock()

    def report(self, *, phase: str, step: int | None = None) -> None:
        """Says that this worker now begins `phase`, having done `step` steps (as last reported, when None)."""
        if self._path is None:
            return
        with self._lock:
            self._step = self._step if step is None else int(step)
            self._first_step = self._step if self._first_step is None else self._first_step
            self._count += 1
            report = Report(
                step=self._step,
                phase=phase,
                count=self._count,
                time=time.time(),
                monotonic=time.monotonic(),
                first_step=self._first_step,
                drill_struck=drill.has_struck(),
            )
            _replace(self._path, dataclasses.asdict(report))


def install_stack_dump(environ: Mapping[str, str]) -> None:
    """Lets SIGUSR1 print the Python stacks of all threads to stderr, under a supervisor.

    The dump is made in the signal's C handler, so it also comes from a process whose main thread never returns to
    Python. To be called before the first report: the supervisor sends the signal only to those who reported.
    """
    if environ.get(PROGRESS_FILE) and hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)


def record_error(environ: Mapping[str, str], error: BaseException, exit_code: int) -> None:
    """Tells the supervisor why this worker is about to end with `exit_code`.

    Only the first error of a process is kept, and a preemption (42) is none.
    """
    path = environ.get(ERROR_FILE)
    if not path or exit_code in (EXIT_DONE, EXIT_PREEMPTED) or os.path.exists(path):
        return
    record = ErrorRecord(
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=exit_code,
        time=time.time(),
        monotonic=time.monotonic(),
    )
    _replace(path, dataclasses.asdict(record))


def read_report(path: Path) -> Report | None:
    """The newest report in a worker's progress file; None before the first."""
    record = _read(path)
    return None if record is None else Report(**record)


def read_error(path: Path) -> ErrorRecord | None:
    """What `record_error` wrote; None when it wrote nothing."""
    record = _read(path)
    return None if record is None else ErrorRecord(**record)


def _replace(path: str, record: Mapping[str, Any]) -> None:
    temporary = f"{path}.{os.getpid()}"
    # Being watched is a help, never a reason to fail: a full disk must not end the training that it describes.
    with contextlib.suppress(OSError):
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(temporary, path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None

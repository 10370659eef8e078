"""Progress reports of a supervised worker: where it is, why it failed, what it is doing when somebody asks.

A supervisor (`launcher.jobs`) names two files in the worker's environment and sends one signal. Without a supervisor,
every function here does nothing. Imports no TensorFlow: it must work before that import, and after a failed one.

The supervisor makes both files at their full size before it starts the worker, which overwrites them in place: a
temporary folder that fills up later silences no worker. (A file system that copies on write, such as btrfs, may need
room even for that.) A record carries a checksum, so that a reader never takes half of one for a whole one.
"""

import contextlib
import dataclasses
import errno
import faulthandler
import json
import os
import signal
import threading
import time
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_PREEMPTED, LauncherError
from launcher.worker import drill

PROGRESS_FILE = "LAUNCHER_PROGRESS_FILE"
ERROR_FILE = "LAUNCHER_ERROR_FILE"
RESTARTED = "LAUNCHER_RESTARTED"

_STDERR = 2
_REPORT_BYTES = 1024
_ERROR_BYTES = 64 * 1024
# As JSON, a character may take six bytes.
_MESSAGE_LENGTH, _TRACEBACK_LENGTH = 2_000, 8_000
_CHECKSUM_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """A report of where a worker is.

    Attributes:
      step: training steps done; None before the first is known.
      phase: "startup", "connect", "compile", "train", "evaluate" or "checkpoint".
      count: how many reports the writing `Progress` has made.
      time: Unix seconds.
      monotonic: seconds of the host's monotonic clock, which all its processes share.
      first_step: the step this worker began at; None before it is known.
      drill_struck: whether a drill's fault has happened in it.
      stopping: whether it has been asked to stop, so that all are.
      straggler: the worker that is slower than the others nearly always.
    """

    step: int | None
    phase: str
    count: int
    time: float
    monotonic: float
    first_step: int | None = None
    drill_struck: bool = False
    stopping: bool = False
    straggler: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """Why a worker failed, in its own words: the exception, the exit code it was about to end with, and when.

    `traceback` is empty for a LauncherError, whose message says all that a person needs.
    """

    type: str
    message: str
    traceback: str
    exit_code: int
    time: float
    monotonic: float


def is_restarted(environ: Mapping[str, str]) -> bool:
    """Whether the supervisor has started this worker's job before, in the same command."""
    return environ.get(RESTARTED) == "1"


class Progress:
    """Tells the supervisor, in one small file, how far this worker is; without LAUNCHER_PROGRESS_FILE it tells nobody.

    A report costs the writing of a kilobyte to a local temporary file, so every turn of a host loop may make one.

        progress = Progress(os.environ)
        progress.report(phase="train", step=120)
    """

    def __init__(self, environ: Mapping[str, str]):
        self._path = environ.get(PROGRESS_FILE) or None
        self._step: int | None = None
        self._first_step: int | None = None
        self._count = 0
        self._phase = "startup"
        self._stopping = False
        self.straggler: int | None = None  # which worker it is, with the next report
        self._lock = threading.Lock()

    def stopping(self) -> None:
        """Says that this worker has been asked to stop; from any thread."""
        self._stopping = True
        self.report(phase=self._phase)

    def report(self, *, phase: str, step: int | None = None) -> None:
        """Says that this worker now begins `phase`, having done `step` steps (as last reported, when None)."""
        if self._path is None:
            return
        with self._lock:
            self._step = self._step if step is None else int(step)
            self._first_step = self._step if self._first_step is None else self._first_step
            self._count += 1
            self._phase = phase
            report = Report(
                step=self._step,
                phase=phase,
                count=self._count,
                time=time.time(),
                monotonic=time.monotonic(),
                first_step=self._first_step,
                drill_struck=drill.has_struck(),
                stopping=self._stopping,
                straggler=self.straggler,
            )
            _write(self._path, dataclasses.asdict(report), _REPORT_BYTES)


def files(folder: Path, rank: int) -> tuple[Path, Path]:
    """A worker's files for its reports and its error, the same ones in every attempt: they keep their room."""
    return folder / f"worker_{rank}.progress.json", folder / f"worker_{rank}.error.json"


def make_files(progress_file: Path, error_file: Path) -> None:
    """Makes the files of a worker that is about to be started, empty and as large as they will ever be.

    A file that is there already is emptied and keeps its room. Raises OSError where there is no room.
    """
    for path, size in ((progress_file, _REPORT_BYTES), (error_file, _ERROR_BYTES)):
        # Written, not merely reserved: some file systems need room to turn the one into the other.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb", buffering=0) as file:
            if file.write(b" " * size) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())


def install_stack_dump(environ: Mapping[str, str]) -> None:
    """Lets SIGUSR1 print the Python stacks of all threads to stderr, under a supervisor, and other warnings do nothing.

    A scheduler's warning may reach every process of a step, as Slurm's does without `B:`: the supervisor has it, too.

    The dump is made in the signal's C handler, so it also comes from a process whose main thread never returns to
    Python. To be called before the first report: the supervisor sends the signal only to those who reported.
    """
    if environ.get(PROGRESS_FILE) and hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)
        for number in (signal.SIGUSR2, signal.SIGXCPU, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def record_error(environ: Mapping[str, str], error: BaseException, exit_code: int) -> None:
    """Tells the supervisor why this worker is about to end with `exit_code`.

    Only the first error of a process is kept, and a preemption (42) is none.
    """
    path = environ.get(ERROR_FILE)
    if not path or exit_code in (EXIT_DONE, EXIT_PREEMPTED) or read_error(Path(path)) is not None:
        return
    trace = "" if isinstance(error, LauncherError) else "".join(traceback.format_exception(error))
    record = ErrorRecord(
        type=type(error).__name__,
        message=_shortened(str(error), _MESSAGE_LENGTH),
        traceback=_shortened(trace, _TRACEBACK_LENGTH),
        exit_code=exit_code,
        time=time.time(),
        monotonic=time.monotonic(),
    )
    _write(path, dataclasses.asdict(record), _ERROR_BYTES)


def read_report(path: Path) -> Report | None:
    """The newest report in a worker's progress file; None before the first."""
    record = _read(path)
    return None if record is None else Report(**record)


def read_error(path: Path) -> ErrorRecord | None:
    """The error that `record_error` wrote; None when it wrote nothing."""
    record = _read(path)
    return None if record is None else ErrorRecord(**record)


def _shortened(text: str, length: int) -> str:
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}\n[...]\n{text[-half:]}"


def _write(path: str, record: Mapping[str, Any], size: int) -> None:
    content = json.dumps(record).encode().ljust(size - _CHECKSUM_BYTES)
    # Being watched is a help, never a reason to fail: a disk that refuses must not end the training that it describes.
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)  # temporary folders are cleaned
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, b"%08x%b" % (zlib.crc32(content), content), 0)
        finally:
            os.close(descriptor)


def _read(path: Path) -> dict[str, Any] | None:
    """The record that a file holds; None where there is none, or one that is just being written."""
    try:
        with open(path, "rb", buffering=0) as file:
            record = file.read(_REPORT_BYTES)  # all of a report at once, which is seldom half of one then
            if not record.strip():
                return None
            record += file.read()
            checksum, content = record[:_CHECKSUM_BYTES], record[_CHECKSUM_BYTES:]
            return dict(json.loads(content)) if int(checksum, 16) == zlib.crc32(content) else None
    except (OSError, ValueError):
        return None

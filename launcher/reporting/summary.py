"""summary.json: how a run ended, for the program that started it, and where its seconds went."""

import contextlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_PREEMPTED, EXIT_RETRY, LauncherError
from launcher.reporting import strict_json
from launcher.reporting.strict_json import Record

FILE_NAME = "summary.json"
PHASES = ("startup", "compile", "train", "input_wait", "evaluate", "checkpoint")


class SummaryWriteError(LauncherError):
    """summary.json cannot be written. Exit 75: make room, run the same command again."""

    exit_code = EXIT_RETRY


def make_summary(
    *,
    exit_code: int,
    error: str | None,
    metrics: Mapping[str, Record],
    step: int,
    strategy: str | None = None,
    num_replicas: int | None = None,
    policy: str | None = None,
    loss_scale: float | None = None,
    seconds: Mapping[str, float],
    measured: Record | None = None,
) -> dict[str, Any]:
    """Returns the contents of summary.json; strategy, replicas and policy are None when the run ended before them.

    Args:
        exit_code: The code the process will end with; "status" follows from it: completed (0), preempted (42), failed.
        error: The message of what ended the run early, None after a completed one.
        metrics: The last measurements by split: {"train": {"loss": ...}, "eval": {"accuracy": ...}}.
        loss_scale: Last loss scale; None when the loss is not scaled.
        seconds: As `Stopwatch.seconds`, of the last attempt.
        measured: What else there is: attempts and goodput over all of them, as `attempts.reckon` returns, and more.
    """
    status = {EXIT_DONE: "completed", EXIT_PREEMPTED: "preempted"}.get(exit_code, "failed")
    return {
        "status": status,
        "exit_code": exit_code,
        "error": error,
        "metrics": {"train": {}, "eval": {}, **metrics},
        "step": step,
        "strategy": strategy,
        "num_replicas": num_replicas,
        "policy": policy,
        "loss_scale": loss_scale,
        "versions": versions(),
        "seconds": dict(seconds),
        **(measured or {}),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide what a run computes; imports none of them."""
    found = {"python": platform.python_version()}
    for name in ("launcher", "tensorflow", "keras", "numpy"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


def write_summary(model_dir: str, summary: Record) -> None:
    """Writes DIR/summary.json atomically; SummaryWriteError where that cannot be, and an older one is as it was."""
    path = Path(model_dir, FILE_NAME)
    try:
        strict_json.write(path, summary)
    except OSError as error:
        raise SummaryWriteError(
            f"Could not write {path}: {error.strerror or error}. Make room and run it again."
        ) from error


_began: list[float] = []


def note_beginning() -> None:
    """The process has begun its work: what passes until its `Stopwatch` is made, TensorFlow's import, is start-up."""
    _began[:] = [time.monotonic()]


def take_beginning() -> float | None:
    """Returns the monotonic seconds of the last `note_beginning`, to the first who asks; else None."""
    return _began.pop() if _began else None


class Stopwatch:
    """Splits a process's seconds into phases that never overlap: an inner phase stops the outer one.

    All is "startup" from the start to `end_startup`, but for the phases inside (a restore is "checkpoint"). After it,
    seconds in no phase are in "total" only. One thread uses it.

        watch = Stopwatch()
        with watch.phase("train"):
            with watch.phase("input_wait"):  # these seconds are not counted as "train"
                batch = next(batches)

    Args:
        clock: A monotonic clock in seconds.
        started: The clock's reading when the process began, if that was before now.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, started: float | None = None):
        self._clock = clock
        self._started = clock() if started is None else started
        self._since = self._started
        self._open: list[str | None] = ["startup"]
        self._seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the seconds inside the block as phase `name`, one of `PHASES`."""
        if name not in PHASES:
            raise ValueError(f"the phases are {PHASES}, got {name!r}")
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def end_startup(self) -> None:
        """Ends the phase "startup": from here on only what stands in a `phase` block is counted; again is no error."""
        self._settle()
        self._open[0] = None

    def move(self, seconds: float, *, source: str, to: str) -> None:
        """Counts `seconds` of phase `source` as phase `to`: for a wait that is only known once the loop returned."""
        self._settle()
        seconds = min(seconds, self._seconds[source])
        self._seconds[source] -= seconds
        self._seconds[to] += seconds

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of every phase so far, and "total" since the start."""
        self._settle()
        return {**self._seconds, "total": self._since - self._started}

    def trained(self) -> float:
        """Returns the seconds of steps so far, with their waits for input, without what compiled them."""
        self._settle()
        return self._seconds["train"] + self._seconds["input_wait"]

    def _settle(self) -> None:
        now = self._clock()
        phase = self._open[-1]
        if phase is not None:
            self._seconds[phase] += now - self._since
        self._since = now

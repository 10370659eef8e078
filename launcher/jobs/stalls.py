"""Stall detection: notices that a job makes no progress, and which worker holds it up."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from launcher.worker.progress import Report

# A program is being built or read, and nothing can be said of how long that takes.
_LONG_PHASES = ("startup", "compile")
# They take as long as the data and the disk want, unless somebody who knows has set a limit.
_SLOW_PHASES = ("evaluate", "checkpoint")
_LONG_SECONDS = 600.0
_SHORTEST_SECONDS = 60.0
_MEDIANS = 20.0
_FEWEST_INTERVALS = 3
_LONGEST_TURN_SECONDS = 1.0
_FROZEN_SECONDS = 5.0

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
# The standard library, and what stands between a graph and the function it calls.
_TRANSPARENT = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)|^<frozen|/tensorflow/python/autograph/")
_TENSORFLOW = "/tensorflow/python/"
_PYTHON_INSIDE_GRAPH = "/tensorflow/python/ops/script_ops.py"


class AwakeClock:
    """Seconds that the supervisor was awake: a suspended machine or a paused supervisor ages nobody's last report."""

    def __init__(self, now: float):
        self._last = now
        self.seconds = 0.0

    def advance(self, now: float) -> float:
        """Takes the time of a monotonic clock and returns the seconds so far."""
        self.seconds += min(_LONGEST_TURN_SECONDS, max(0.0, now - self._last))
        self._last = now
        return self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall:
    """No progress for too long; `silent` are the workers that have never reported, when that is the complaint."""

    seconds: float
    silent: tuple[int, ...] = ()


class StallDetector:
    """Watches the reports of one attempt.

    Workers train in step, so one that stops stops all; the job stalls when no worker has reported anything new for
    `timeout_seconds`, or if None 20 times the median between reports while training, and at least a minute. Until every
    worker's first report, and while they connect, `start_timeout_seconds` are the limit.
    """

    def __init__(self, *, timeout_seconds: float | None, start_timeout_seconds: float):
        self._timeout = timeout_seconds
        self._start_timeout = start_timeout_seconds
        self._reports: dict[int, Report] = {}
        self._changed_at = 0.0
        self._frozen_since: dict[int, float] = {}
        self._intervals: collections.deque[float] = collections.deque(maxlen=100)

    def observe(self, now: float, reports: Mapping[int, Report | None]) -> Stall | None:
        """Looks at the newest reports of workers that still run, by rank, at `now` seconds of an `AwakeClock`."""
        for rank, report in reports.items():
            before = self._reports.get(rank)
            if report is None or report == before:
                continue
            if before is not None and before.phase == report.phase == "train" and report.count > before.count:
                self._intervals.append((report.monotonic - before.monotonic) / (report.count - before.count))
            self._reports[rank] = report
            self._changed_at = now
        silent = tuple(rank for rank, report in reports.items() if report is None)
        if silent:
            return Stall(seconds=now, silent=silent) if now > self._start_timeout else None
        waited = now - self._changed_at
        limit = max((self.limit_seconds(report.phase) for report in reports.values() if report), default=float("inf"))
        return Stall(seconds=waited) if waited > limit else None

    def limit_seconds(self, phase: str) -> float:
        """The time that a phase may go without a report."""
        if phase == "connect":
            return self._start_timeout
        if self._timeout is not None:
            return max(_LONG_SECONDS, self._timeout) if phase in _LONG_PHASES else self._timeout
        if phase in (*_LONG_PHASES, *_SLOW_PHASES) or len(self._intervals) < _FEWEST_INTERVALS:
            return _LONG_SECONDS
        return max(_SHORTEST_SECONDS, _MEDIANS * statistics.median(self._intervals))

    def has_frozen(self, now: float, frozen: Collection[int]) -> bool:
        """Whether one of the workers that are stopped at `now` seconds of an `AwakeClock` has been so for too long, so
        that nobody lets it go on: its peers need longer to miss it.
        """
        self._frozen_since = {rank: self._frozen_since.get(rank, now) for rank in frozen}
        return any(now - since > _FROZEN_SECONDS for since in self._frozen_since.values())


def parse_stacks(lines: Iterable[str]) -> list[list[str]]:
    """The frames of each thread that faulthandler printed, "FILE:LINE in FUNCTION", innermost first; the main thread is
    the last.
    """
    threads: list[list[str]] = []
    inside = False
    for line in lines:
        frame = _FRAME.match(line)
        if _THREAD.match(line):
            threads.append([])
            inside = True
        elif inside and frame:
            threads[-1].append(f"{frame['file']}:{frame['line']} in {frame['function']}")
        else:
            inside = False
    return [thread for thread in threads if thread]


def place_outside_tensorflow(threads: Sequence[Sequence[str]]) -> str | None:
    """The place where Python code keeps a worker busy; None when it waits inside TensorFlow, as a stuck one's peers do.

    The main thread counts, and Python that a graph calls, such as a generator of input data. What matters is the
    innermost frame of somebody's own: a lock of the standard library says nothing of who waits.
    """
    of_graphs = [thread for thread in threads[:-1] if any(_PYTHON_INSIDE_GRAPH in frame for frame in thread)]
    for thread in (*of_graphs, *threads[-1:]):
        own = next((frame for frame in thread if not _TRANSPARENT.search(frame)), _TENSORFLOW)
        if _TENSORFLOW not in own:
            return own
    return None


def find_stuck(reports: Mapping[int, Report | None], stacks: Mapping[int, Sequence[Sequence[str]]]) -> tuple[int, str]:
    """Names the worker that holds the others up, of those that still run, and what speaks against it.

    One whose step is behind; among equals one that is in Python code, not waiting inside TensorFlow, as far as the
    stacks tell; among equals the one that has been silent longest.
    """
    steps = {rank: -1 if report is None or report.step is None else report.step for rank, report in reports.items()}
    furthest = max(steps.values())
    places = {rank: place_outside_tensorflow(stacks.get(rank, ())) for rank in reports}

    def order(rank: int) -> tuple[bool, bool, float]:
        report = reports[rank]
        return steps[rank] == furthest, places[rank] is None, report.monotonic if report else float("-inf")

    rank = min(reports, key=order)
    report, place = reports[rank], places[rank]
    reasons = [f"in phase {report.phase} at step {report.step}" if report else "without a report"]
    if steps[rank] < furthest:
        reasons.append(f"while others are at step {furthest}")
    if place:
        reasons.append(f"in {place}")
    return rank, ", ".join(reasons)

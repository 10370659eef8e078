"""attempts.jsonl: the attempts of a run, each with its steps, its end and its seconds, and the goodput over all.

The chief appends a line when it begins, at checkpoints, at log events and at its end; the supervisor appends what ended
an attempt that failed, when nothing of it runs any more. So there is one writer at a time, each line is one write, and
after kill -9 there is still what the attempt had reached. Lines that are not whole are passed over.

"Goodput" is the share of the time of a run in which it trained steps that it kept, as in Google Cloud, "Goodput metric
as measure of ML productivity" (2024).

Imports no TensorFlow: the supervisor writes here, too.
"""

import collections
import contextlib
import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_PREEMPTED
from launcher.reporting import strict_json
from launcher.reporting.strict_json import Record

FILE_NAME = "attempts.jsonl"
ATTEMPT = "LAUNCHER_ATTEMPT"
"""The supervisor names the attempt to its workers: what it and the chief write of it belongs together."""
GOODPUT = ("start-up", "compile", "train", "input_wait", "evaluate", "checkpoint", "lost", "down")

DONE, PREEMPTED, RUNNING = "done", "preempted", "running"
_UNKNOWN = "killed, or its machine failed: it left no word"
_AGAIN = "+"
_BEGIN, _AT, _END = KINDS = ("begin", "at", "end")
_SAVED = "saved"
# Between two lines of log events: a hundredth of the attempt so far, within these limits.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0
_TRAINING = ("train", "input_wait")


class Beginning:
    """When something began, and the seconds since then, whoever sets the clock meanwhile."""

    def __init__(self) -> None:
        self.time = time.time()
        self._monotonic = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._monotonic


class AttemptsFile:
    """The chief's side: appends to DIR/attempts.jsonl how far this attempt is. A disk that refuses a line is no error.

    A supervisor names the attempt in `environ`; `seconds` gives those of the attempt so far, as `Stopwatch.seconds`.
    """

    def __init__(self, model_dir: str, environ: Mapping[str, str], seconds: Callable[[], dict[str, float]]):
        self._path = Path(model_dir, FILE_NAME)
        self._name = environ.get(ATTEMPT) or uuid.uuid4().hex
        self._seconds = seconds
        self._written_at = 0.0
        self._started = time.time() - seconds()["total"]
        self._before: dict[str, float] = {}  # seconds of this process that belong to parts before a rewind

    def begin(self, step: int) -> None:
        """The attempt is about to train from `step`."""
        self._append(_BEGIN, step, {})

    def at(self, step: int, *, often: bool = False) -> None:
        """The attempt has done `step` steps; `often`: not every one of these calls needs a line."""
        between = min(_LONGEST_SECONDS, max(_SHORTEST_SECONDS, self._seconds()["total"] / 100))
        if not often or time.monotonic() - self._written_at >= between:
            self._append(_AT, step, {})

    def saved(self, step: int) -> None:
        """The checkpoint of `step` is on the disk."""
        with contextlib.suppress(OSError):
            saved = {"is": _SAVED, "attempt": self._name, "time": time.time(), "step": int(step)}
            strict_json.append(self._path, saved)

    def end(self, step: int, ended_by: str) -> None:
        """The attempt ends after `step` steps: "done", "preempted" or "failed: ..."."""
        self._append(_END, step, {"ended_by": ended_by})

    def begin_again(self, step: int) -> None:
        """After `end`: the run has gone back to `step` in the same process, and what follows is one attempt more."""
        self._name += _AGAIN
        self._before = self._seconds()
        self.begin(step)

    def _append(self, kind: str, step: int, more: Record) -> None:
        seconds = {name: value - self._before.get(name, 0.0) for name, value in self._seconds().items()}
        now = self._started + self._seconds()["total"]  # not the clock's, which somebody may have set
        total = seconds.pop("total")
        record = {"is": kind, "attempt": self._name, "time": now, "started": now - total, "step": int(step), **more}
        self._written_at = time.monotonic()
        with contextlib.suppress(OSError):
            strict_json.append(self._path, {**record, "seconds": seconds})


def add_end(model_dir: str, *, attempt: str, started: float, seconds: float, ended_by: str) -> None:
    """The supervisor's side: appends what ended an attempt of which nothing runs any more, "worker 1 was killed by
    SIGKILL".

    Args:
        attempt: The name that its workers found in LAUNCHER_ATTEMPT.
        started: Unix seconds at which the supervisor began it.
        seconds: How long it lasted.

    Raises:
        OSError: The line cannot be written.
    """
    record = {"is": _END, "attempt": attempt, "time": started + seconds, "started": started, "ended_by": ended_by}
    strict_json.append(Path(model_dir, FILE_NAME), record)


@dataclasses.dataclass
class _Attempt:
    """Lines of one attempt: the chief's, in their order, and the supervisor's."""

    started: float
    of_chief: list[Record] = dataclasses.field(default_factory=list)
    by_supervisor: Record = dataclasses.field(default_factory=dict)

    @property
    def first_step(self) -> int | None:
        return self.of_chief[0]["step"] if self.of_chief else None

    @property
    def ended_by(self) -> str | None:
        last = self.by_supervisor or (self.of_chief[-1] if self.of_chief else {})
        return last.get("ended_by")

    @property
    def ended(self) -> float:
        times = [record["time"] for record in (*self.of_chief[-1:], self.by_supervisor) if record]
        return max([self.started, *times])

    def training_seconds(self, step: int) -> dict[str, float]:
        """Seconds of train and input_wait until `step` was done; between two lines, as if all steps took the same."""
        import numpy as np  # late: the supervisor starts without it

        steps = [record["step"] for record in self.of_chief]
        columns = {name: [record["seconds"].get(name, 0.0) for record in self.of_chief] for name in _TRAINING}
        return {name: float(np.interp(step, steps, seconds)) for name, seconds in columns.items()}

    def seconds(self) -> dict[str, float]:
        """Seconds of all phases, "lost" and "down": what passed after the chief's last line has brought nothing."""
        if not self.of_chief:
            return {"startup": self.ended - self.started}
        first, last = self.of_chief[0], self.of_chief[-1]
        found = collections.defaultdict[str, float](float, last["seconds"])
        found["startup"] += max(0.0, first["started"] - self.started)
        if rest := max(0.0, self.ended - last["time"]):
            found[{_END: "down", _AT: "lost", _BEGIN: "compile"}[last["is"]]] += rest
        return found


def has_begun(model_dir: str) -> bool:
    """Whether an attempt of the run has come as far as training, with all its input there."""
    return any(record["is"] == _BEGIN for record in _lines(model_dir))


def last_saved(model_dir: str) -> int | None:
    """The last step of which a checkpoint is known to have been there; None where none is known."""
    found = [record for record in _lines(model_dir) if isinstance(record.get("step"), int)]
    # One that began after a first step had restored it.
    steps = [one["step"] for one in found if one["is"] == _SAVED or (one["is"] == _BEGIN and one["step"])]
    return steps[-1] if steps else None


def reckon(model_dir: str) -> dict[str, Any]:
    """Returns the attempts of a run and where all their seconds went, as summary.json has them.

    Seconds in no phase, such as those of writing reports, are in none of the sums. The time after an attempt that was
    "done" is not "down": nobody waited for the next one.

    Returns:
        "attempts": [{"number", "started", "ended" (Unix seconds), "ended_by", "from_step", "to_step", "seconds"}];
        "goodput": seconds by the names of `GOODPUT`; "goodput_share": those of "train" over all that passed, or None.
    """
    found = _attempts(model_dir)
    goodput = dict.fromkeys(GOODPUT, 0.0)
    wall = 0.0
    shown: list[dict[str, Any]] = []
    for number, attempt in enumerate(found, 1):
        seconds, later = attempt.seconds(), found[number:]
        restored = [other.first_step for other in later if other.first_step is not None]
        if restored and attempt.of_chief:
            for name, until in attempt.training_seconds(min(restored)).items():
                lost = max(0.0, seconds[name] - until)
                seconds[name] -= lost
                seconds["lost"] += lost
        for name, value in seconds.items():
            goodput["start-up" if name == "startup" else name] += value
        wall += attempt.ended - attempt.started
        if later and attempt.ended_by != DONE:
            down = max(0.0, later[0].started - attempt.ended)
            goodput["down"] += down
            wall += down
        # An attempt that ended before it had restored anything stood where the next one began.
        nowhere = restored[0] if restored else shown[-1]["to_step"] if shown else 0
        steps = [record["step"] for record in attempt.of_chief] or [nowhere]
        shown.append(
            {
                "number": number,
                "started": attempt.started,
                "ended": attempt.ended,
                "ended_by": attempt.ended_by or (_UNKNOWN if later else RUNNING),
                "from_step": steps[0],
                "to_step": steps[-1],
                "seconds": dict(seconds),
            }
        )
    return {"attempts": shown, "goodput": goodput, "goodput_share": goodput["train"] / wall if wall > 0 else None}


def wall_seconds(reckoned: Record) -> float | None:
    """The seconds of all attempts and between them, of what `reckon` returned; None where nothing was trained."""
    share = reckoned.get("goodput_share")
    return reckoned["goodput"]["train"] / share if share else None


def ended_by(exit_code: int, error: str | None) -> str:
    """End of an attempt, in the words of `AttemptsFile.end`."""
    told = {EXIT_DONE: DONE, EXIT_PREEMPTED: PREEMPTED}
    return told.get(exit_code) or f"failed: {(error or '').strip().partition(chr(10))[0]}"


def describe(reckoned: Record) -> str:
    """Words the goodput in one line: "goodput 83.1 %: train 40.0 s, start-up 5.1 s, ..."; "" when there is none."""
    if reckoned.get("goodput_share") is None:
        return ""
    spent = {name: value for name, value in reckoned["goodput"].items() if value >= 0.05}
    told = ", ".join(f"{name.replace('_', ' ')} {value:.1f} s" for name, value in spent.items())
    number = len(reckoned["attempts"])
    return f"goodput {reckoned['goodput_share']:.1%} over {number} attempt{'s' * (number > 1)}: {told}"


def _attempts(model_dir: str) -> list[_Attempt]:
    found: dict[str, _Attempt] = {}
    for record in filter(_is_whole, _lines(model_dir)):
        name, is_of_chief = record["attempt"], "step" in record
        while not is_of_chief and f"{name}{_AGAIN}" in found:  # the supervisor knows of no rewinds
            name += _AGAIN
        attempt = found.setdefault(name, _Attempt(started=record["started"]))
        if is_of_chief or _AGAIN not in name:
            attempt.started = min(attempt.started, record["started"])
        if is_of_chief:
            attempt.of_chief.append(record)
        else:
            attempt.by_supervisor = record
    return list(found.values())


def _lines(model_dir: str) -> list[dict[str, Any]]:
    """Objects in the lines that are whole and say what they are."""
    with contextlib.suppress(OSError):
        return [record for record in strict_json.read_lines(Path(model_dir, FILE_NAME)) if "is" in record]
    return []


def _is_whole(record: Any) -> bool:
    if record["is"] not in KINDS or not isinstance(record.get("attempt"), str):
        return False
    of_chief = isinstance(record.get("step"), int) and isinstance(record.get("seconds"), dict)
    of_supervisor = "step" not in record and isinstance(record.get("ended_by"), str)
    numbers = [record.get("time"), record.get("started"), *(record["seconds"].values() if of_chief else ())]
    return (of_chief or of_supervisor) and all(isinstance(number, int | float) for number in numbers)

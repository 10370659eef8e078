"""metrics.jsonl: one JSON object a log event, each step once, also after kills and resumes."""

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_RETRY, LauncherError
from launcher.reporting import strict_json
from launcher.reporting.strict_json import Record

FILE_NAME = "metrics.jsonl"
FIRST_FIELDS = ("step", "split", "loss")
LAST_FIELDS = (
    "learning_rate",
    "loss_scale",
    "skipped_steps",
    "gradient_norm",
    "examples_per_second",
    "input_wait_fraction",
    "slowest_worker",
    "slowest_worker_ratio",
    "flops_per_second",
    "mfu",
)

_MOST_WAITING = 10_000


class MetricsWriteError(LauncherError):
    """metrics.jsonl cannot be written. Exit 75: make room, run the same command; the file is cut to the checkpoint.

    The facts say what could not be written and why, in a whole sentence; the advice what to do, for a run that this
    ends.
    """

    exit_code = EXIT_RETRY

    def __init__(self, facts: str, advice: str):
        super().__init__(f"{facts} {advice}")
        self.facts = facts


class MetricsFile:
    """Appends log events to DIR/metrics.jsonl, each in one write.

    So a kill leaves at most half a last line, which readers pass over and `truncate_after` takes away. An event that
    cannot be written is an error and waits, with up to 10,000 others, for the next call to try again.

    Fields: step, split ("train", "eval", "precision" or "spike"), loss, the task's metrics, then learning_rate,
    loss_scale, skipped_steps, gradient_norm, examples_per_second, input_wait_fraction (those that the event has), and
    time (Unix seconds). A value that is NaN or infinite is null and its name stands in the list "non_finite". Events of
    the split "precision" have no loss; their fields are those of `launcher.run.actions.precision_watch.Sample`. Those
    of the split "spike" say what was seen ("what") and done ("action"); the "step" of a rewind is the one gone back to.

    Args:
        model_dir: Made, with the file, by the first event.
        clock: Gives the Unix time in seconds.
    """

    def __init__(self, model_dir: str, *, clock: Callable[[], float] = time.time):
        self._path = Path(model_dir, FILE_NAME)
        self._clock = clock
        self._waiting: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_WAITING)

    def truncate_after(self, step: int, *, evaluated: bool = True) -> int:
        """Drops events past `step` of an earlier attempt, that step's evaluation unless `evaluated`, and broken lines.

        Returns:
            How many lines were dropped.

        Raises:
            MetricsWriteError: The file cannot be rewritten; it is as it was.
        """
        if not self._path.exists():
            return 0
        with _refusals_told(self._path):
            content = self._path.read_bytes()
            lines = content.split(b"\n")
            last: dict[Any, int] = {} if evaluated else {"eval": step - 1}
            events = zip(lines, map(strict_json.parsed, lines), strict=True)
            whole = [(line, event) for line, event in events if event and _is_whole(event)]
            kept = [line for line, event in whole if event["step"] <= last.get(event.get("split"), step)]
            left = b"".join(line + b"\n" for line in kept)
            try:
                strict_json.replace_file(self._path, left.decode(errors="replace"))
            except OSError:
                if not content.startswith(left):
                    raise
                with open(self._path, "r+b") as file:  # needs no room on the disk
                    file.truncate(len(left))
                    os.fsync(file.fileno())
        return sum(line != b"" for line in lines) - len(kept)

    def flush(self) -> None:
        """Waits until the events are on the disk: before a checkpoint commits, so that none before it can be lost.

        MetricsWriteError where the disk refuses, and events that wait still do.
        """
        with _refusals_told(self._path):
            self._write_waiting()
            if self._path.exists():
                with self._path.open("rb") as file:
                    os.fsync(file.fileno())

    def append(self, split: str, event: Record) -> None:
        """Writes an event, and those that wait; MetricsWriteError where the disk refuses, and all of them wait."""
        self._waiting.append(_ordered(split, event, self._clock()))
        with _refusals_told(self._path):
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            strict_json.append(self._path, self._waiting[0])
            self._waiting.popleft()


def read_events(model_dir: str) -> list[dict[str, Any]]:
    """Returns the events of DIR/metrics.jsonl in the order of the file; [] when there is none.

    Lines that are not whole events (a kill leaves half a last line) are left out.
    """
    return [event for event in strict_json.read_lines(Path(model_dir, FILE_NAME)) if _is_whole(event)]


def _ordered(split: str, event: Record, now: float) -> dict[str, Any]:
    fields: dict[str, Any] = {"step": int(event["step"]), "split": split}
    own = [name for name in event if name not in (*FIRST_FIELDS, *LAST_FIELDS)]
    for name in ("loss", *own, *LAST_FIELDS):
        if name in event:
            value = event[name]
            is_text_or_table = split in ("precision", "spike") and isinstance(value, str | Mapping | list)
            fields[name] = value if is_text_or_table else strict_json.number(value)
    return {**fields, "time": now}


def _is_whole(event: Record) -> bool:
    return isinstance(event.get("step"), int) and isinstance(event.get("time", 0), int | float)


@contextlib.contextmanager
def _refusals_told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MetricsWriteError(
            f"Could not write {path}: {error.strerror or error}.",
            "Make room or allow writing there, then run the same command again: it goes on from the last checkpoint.",
        ) from error

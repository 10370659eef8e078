"""Gathers what the folder of a run holds: its record, summary, events, attempts and samples.

Reads files only, and any of them may be missing, old, half-written or of a newer version. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import time
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.config import gin_files
from launcher.config.bound_types import as_tuples
from launcher.errors import UsageError
from launcher.reporting import attempts, metrics_file, strict_json, summary
from launcher.reporting.strict_json import Record

RECORD = "run.json"
CONFIG = "config.gin"
SAMPLES = "samples.json"
RUNNING = "running"
UNFINISHED = "unfinished"

_TABLES = {"attempts": list, **dict.fromkeys(("seconds", "metrics", "versions", "goodput"), dict)}  # of summary.json
_ATTEMPT = {
    **dict.fromkeys(("number", "from_step", "to_step"), int),
    **dict.fromkeys(("started", "ended"), int | float),
    "ended_by": str,
}

LOW_IS_BEST = ("loss", "perplexity", "bits_per_byte")
"""Measurements of which the lowest value is the best."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A binding that the command line changed; `recipe` is None where the recipe does not bind it."""

    name: str
    recipe: str | None
    run: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of run.json: what is known of a run when it begins.

    Attributes:
      began: Unix seconds of the first attempt.
      started: Unix seconds of the process that wrote this.
      command: the command line, as it was typed.
      diff: what differs from the commit that the plan names.
      packages: that are installed, each with its version.
      recipe: the gin files.
      changes: what the command line changed of them.
      plan: what the run resolved to, by name.
      total_steps: the last step.
      steps_per_epoch: None where the data has no end.
      best_metric: of evaluations, by which the best is chosen; low or high is best.
      low_is_best: which of them.
    """

    began: int | float = 0.0
    started: int | float = 0.0
    command: str = ""
    diff: str = ""
    packages: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    plan: Mapping[str, str] = dataclasses.field(default_factory=dict)
    total_steps: int = 0
    steps_per_epoch: int | float | None = None
    best_metric: str = ""
    low_is_best: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFolder:
    """Contents of a run's folder, as far as a report tells of them.

    Attributes:
      record: as it began; None for a folder of an older version, or of a mode that does not train.
      summary: of the last attempt that could write one; empty without.
      status: completed, preempted, failed, running, or unfinished: begun, and neither ended nor known to run.
      attempts: in order, as `attempts.reckon` gives them; empty where only one is known of.
      config: the bindings of config.gin.
      samples: what the last evaluation wrote of examples.
    """

    path: Path
    record: RunRecord | None
    summary: Record
    status: str
    events: Sequence[Record]
    attempts: Sequence[Record]
    config: Mapping[str, str]
    samples: Record

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_run(self) -> bool:
        """Whether something was trained here, or tried to."""
        return bool(self.summary or self.events or self.record)

    @property
    def began(self) -> float | None:
        """Unix seconds of the first attempt, or of the first event where nothing else is known."""
        if self.record is not None:
            return self.record.began
        return self.events[0].get("time") if self.events else None

    @property
    def seconds(self) -> float | None:
        """Wall time over all attempts; not what passed until a run that was done was evaluated once more."""
        if (wall := attempts.wall_seconds(self.summary)) is not None:
            return wall
        ends = [attempt["ended"] for attempt in self.attempts]
        ends += [event["time"] for event in self.events[-1:] if "time" in event]
        own = self.summary.get("seconds", {}).get("total")
        if self.began is None or not ends:
            return own
        return max(max(ends) - self.began, own or 0.0)

    def of_split(self, split: str) -> list[Record]:
        return [event for event in self.events if event.get("split") == split]

    @property
    def best_metric(self) -> str | None:
        """The evaluation metric that chooses the best; None without an evaluation."""
        evaluations = self.of_split("eval")
        if not evaluations:
            return None
        wanted = (self.record.best_metric if self.record else "", "exact_match", "bleu", "accuracy", "loss")
        return next((name for name in wanted if name in evaluations[-1]), None)

    @property
    def low_is_best(self) -> bool:
        if self.record is not None and self.record.best_metric == self.best_metric:
            return self.record.low_is_best
        return self.best_metric in LOW_IS_BEST

    @property
    def best(self) -> Record | None:
        """The best evaluation by that metric, the first of equals."""
        name = self.best_metric
        found = [event for event in self.of_split("eval") if name and event.get(name) is not None]
        if not name or not found:
            return None
        return (min if self.low_is_best else max)(found, key=lambda event: event[name])


def read(model_dir: str | Path, *, running: bool = False) -> RunFolder:
    """Reads a folder, whose run is known to be `running` or not; what is missing or cannot be read is left out."""
    path = Path(model_dir).absolute()
    record = read_record(path)
    ended = strict_json.read_object(path / summary.FILE_NAME)
    ended = {name: value for name, value in ended.items() if isinstance(value, _TABLES.get(name, object))}
    if record is not None and not _is_newer(path / summary.FILE_NAME, record.started):
        ended = {name: value for name, value in ended.items() if name == "attempts"}
    if (path / attempts.FILE_NAME).exists():  # newer than the summary, while it runs or when it was killed
        ended = {**ended, **attempts.reckon(str(path))}
    status = str(ended.get("status") or UNFINISHED)
    return RunFolder(
        path=path,
        record=record,
        summary=ended,
        status=RUNNING if running else status,
        events=metrics_file.read_events(str(path)),
        attempts=[*filter(_is_attempt, ended.get("attempts", ()))],
        config={name: repr(value) for name, value in gin_files.values(path / CONFIG).items()},
        samples=strict_json.read_object(path / SAMPLES),
    )


def read_run(model_dir: str, asked: str) -> RunFolder:
    """Reads a folder that has to be a run's; UsageError, beginning with what `asked` for it, where it is none."""
    folder = read(model_dir)
    if not folder.is_run:
        what = "nothing of a run is in it" if folder.path.is_dir() else "there is no such folder"
        raise UsageError(f"{asked}: {what}; name the folder that a run wrote to")
    return folder


def read_record(path: Path) -> RunRecord | None:
    """The contents of run.json; None where there is none that can be read."""
    found = strict_json.read_object(path / RECORD)
    values = _known(RunRecord, found)
    if "began" not in values:
        return None
    changes = [_known(Change, one) for one in values.get("changes", ())]
    values["recipe"] = tuple(map(str, values.get("recipe", ())))
    values["changes"] = tuple(Change(**one) for one in changes if len(one) == len(dataclasses.fields(Change)))
    values["plan"] = {name: str(value) for name, value in values.get("plan", {}).items()}
    return RunRecord(**values)


def _known(record: type, found: Any) -> dict[str, Any]:
    """Values of an object that a record has fields for, of their kind; other versions may have written others."""
    values = as_tuples(list(found.items())) if isinstance(found, dict) else ()
    kinds = {name: _kind(hint) for name, hint in typing.get_type_hints(record).items()}
    return {name: value for name, value in values if isinstance(value, kinds.get(name, ()))}


def _kind(hint: Any) -> Any:
    """The classes of what a field's annotation admits, without those of its members."""
    return hint if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint


def write_record(path: Path, record: RunRecord) -> None:
    """Writes run.json; a run that goes on from an earlier one's events keeps the time at which that began."""
    before = read_record(path)
    now = record.started or time.time()
    goes_on = before is not None and bool(metrics_file.read_events(str(path)))
    began = before.began if before is not None and goes_on else now
    content = dataclasses.asdict(dataclasses.replace(record, began=began, started=now))
    strict_json.write(path / RECORD, content)


def _is_newer(path: Path, since: float) -> bool:
    try:
        # A copied folder keeps its times only to the second.
        return path.stat().st_mtime >= since - 1
    except OSError:
        return False


def _is_attempt(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in _ATTEMPT.items())

"""The curves of a run as data that the page's script draws: shared axes once, a panel a measurement."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from launcher.reporting import strict_json
from launcher.reporting.run_folder import RunFolder
from launcher.reporting.strict_json import Record

# What a screen can show; more would make the page slow and large.
MOST_POINTS = 1500

_NOT_DRAWN = ("step", "split", "time", "examples", "skipped_steps", "slowest_worker", strict_json.NON_FINITE)
_LAST = (
    "learning_rate",
    "gradient_norm",
    "loss_scale",
    "examples_per_second",
    "flops_per_second",
    "mfu",
    "input_wait_fraction",
    "slowest_worker_ratio",
)
_TITLES = {
    "bleu": "BLEU",
    "mfu": "MFU",
    "flops_per_second": "FLOP a second",
    "slowest_worker_ratio": "Slowest worker, times the median of the others",
}
_SPLITS = ("train", "eval", "precision")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charts:
    """Data that the page's script draws.

    Attributes:
      groups: x values by name and by axis, "step", "time" or "epoch".
      panels: by the place that shows them: a title and series, each a column of y over a group.
      marks: vertical lines in all panels.
      constant: measurements that have no panel, because they never change.
    """

    groups: Mapping[str, Record] = dataclasses.field(default_factory=dict)
    panels: Mapping[str, Sequence[Record]] = dataclasses.field(default_factory=dict)
    marks: Sequence[Record] = ()
    constant: Mapping[str, float] = dataclasses.field(default_factory=dict)


def of_run(folder: RunFolder) -> Charts:
    """The panels of one run: train as a line, evaluations as points, restarts and skipped steps as marks."""
    groups, found = _series([folder], [])
    panels: list[dict[str, Any]] = []
    constant: dict[str, float] = {}
    for name, series in found.items():
        skipped = skips(folder) if name == "loss_scale" else []
        level = _levels(series)
        has_gaps = any(name in event.get(strict_json.NON_FINITE, ()) for event in folder.events)
        if len(level) <= 1 and not skipped and not has_gaps:
            if level and (name, level) != ("loss_scale", {1.0}):  # of a loss that is not scaled
                constant[name] = level.pop()
            continue
        panel = _panel(name, series)
        if skipped:
            panel |= {"marks": skipped, "title": f"{panel['title']}, {skipped_steps(folder):g} skipped"}
        panels.append(panel)
    return Charts(groups=groups, panels={"curves": panels}, marks=restarts(folder), constant=constant)


def of_runs(folders: Sequence[RunFolder], labels: Sequence[str]) -> Charts:
    """The panels of several runs, a colour each: train as lines, evaluations as points."""
    groups, found = _series(folders, labels)
    panels = [_panel(name, series) for name, series in found.items() if len(_levels(series)) > 1]
    return Charts(groups=groups, panels={"curves": panels})


def _series(folders: Sequence[RunFolder], labels: Sequence[str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Axes, and the series of each measurement, in the order of the page; without `labels` a colour a split."""
    groups: dict[str, Any] = {}
    found: dict[str, list[Any]] = {}
    for index, folder in enumerate(folders):
        for place, split in enumerate(_SPLITS):
            events = thinned(folder.of_split(split))
            if not events:
                continue
            group = f"{split} {index}" if labels else split
            label = f"{labels[index]}{', evaluation' if split == 'eval' else ''}" if labels else split
            looks = {"kind": "points" if split == "eval" else "line", "color": index if labels else place}
            groups[group] = axes(folder, events)
            for name in dict.fromkeys(name for event in events for name in event):
                if column := values(events, name):
                    found.setdefault(name, []).append({"label": label, "group": group, "y": column, **looks})
    metric = next((folder.best_metric for folder in folders if folder.best_metric), None)
    return groups, {name: found[name] for name in ordered(found, metric)}


def _panel(name: str, series: Sequence[Any]) -> dict[str, Any]:
    steps = {"log": 2, "steps": True} if name == "loss_scale" else {}
    return {"title": title(name), "series": series, **steps}


def _levels(series: Sequence[Any]) -> set[float]:
    """The values that there are."""
    return {value for one in series for value in one["y"] if value is not None}


def title(name: str) -> str:
    return _TITLES.get(name) or name.replace("_", " ").capitalize()


def ordered(names: Iterable[str], best_metric: str | None) -> list[str]:
    """Measurements in the order of the page: what chooses the best, the loss, the task's own, the machine's."""
    found = dict.fromkeys(name for name in names if name not in _NOT_DRAWN)
    first = [name for name in (best_metric, "loss") if name in found]
    last = [name for name in _LAST if name in found]
    return list(dict.fromkeys([*first, *(name for name in found if name not in last), *last]))


def axes(folder: RunFolder, events: Sequence[Record]) -> dict[str, list[float]]:
    """Steps, seconds since the beginning, and epochs where they are known."""
    places = [_place(folder, event["step"], event.get("time")) for event in events]
    known = [name for name in places[0] if all(name in place for place in places)]
    return {name: [place[name] for place in places] for name in known}


def values(events: Sequence[Record], name: str) -> list[float | None]:
    """A column, None where it was not finite; [] where nothing of it is a number."""
    column = [_number(event.get(name)) for event in events]
    return column if any(value is not None for value in column) else []


def thinned(events: Sequence[Record], most: int = MOST_POINTS) -> list[Record]:
    """At most so many events: of each stretch those with the lowest and the highest loss, so that spikes stay."""
    if len(events) <= most:
        return list(events)
    size = math.ceil(2 * len(events) / most)
    kept: list[Record] = []
    for start in range(0, len(events), size):
        part = range(start, min(start + size, len(events)))
        losses = {index: loss for index in part if (loss := _number(events[index].get("loss"))) is not None}
        ends = {min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)} if losses else {start}
        kept += [events[index] for index in sorted(ends)]
    return kept


def skipped_steps(folder: RunFolder) -> float:
    """Number of steps that were skipped because gradients were not finite."""
    counts = [count for event in folder.events if (count := _number(event.get("skipped_steps"))) is not None]
    return counts[-1] if counts else 0


def skips(folder: RunFolder) -> list[dict[str, Any]]:
    """A tick at each log event in which the count of skipped steps rose."""
    ticks, before = [], 0
    for event in folder.of_split("train"):
        count = event.get("skipped_steps") or 0
        if count > before:
            ticks.append({**_place(folder, event["step"], event.get("time")), "color": "bad", "tick": True})
        before = count
    return ticks


def restarts(folder: RunFolder) -> list[dict[str, Any]]:
    """A mark for each attempt after the first: at the step it went on from, at the time the one before it ended."""
    return [
        {**_place(folder, attempt["from_step"], before["ended"]), "label": f"attempt {attempt['number']}"}
        for before, attempt in itertools.pairwise(folder.attempts)
    ]


def _place(folder: RunFolder, step: int, at: float | None) -> dict[str, Any]:
    place: dict[str, Any] = {"step": step}
    if at is not None and folder.began is not None:
        place["time"] = round(at - folder.began, 1)
    if folder.record and folder.record.steps_per_epoch:
        place["epoch"] = round(step / folder.record.steps_per_epoch, 3)
    return place


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")

"""Words of the console: the plan in groups, how far and how good a run is at a log event, and how it ended."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from launcher.reporting import attempts, strict_json
from launcher.reporting.metrics_file import LAST_FIELDS
from launcher.reporting.strict_json import Record
from launcher.reporting.units import clock

_WHERE = (
    "cluster",
    "strategy",
    "shown for",
    "preflight",
    "batch",
    "policy",
    "layer policies",
    "attention",
    "loss scale",
    "reduction",
)
OF_RECIPES = ("task", "seed", "cluster", "loss scale", "reduction")
"""Lines of a plan that a run which is told by its epochs has in its report alone."""
_NOT_THE_TASKS = ("step", "loss", *LAST_FIELDS)

Rows = list[tuple[str, str]]


def plan_groups(plan: Mapping[str, str]) -> list[Rows]:
    """The lines of a plan in groups: what is trained, where and how, where results go, and notes."""
    groups: list[Rows] = [[], [], [], []]
    for name, value in plan.items():
        number = 3 if name.startswith("note") else 2 if name == "results" else 1 if name in _WHERE else 0
        groups[number].append((name, value))
    return [group for group in groups if group]


class Epochs(NamedTuple):
    """Epochs that a run is told by, where Keras's fit would tell of them.

    Attributes:
      steps: of an epoch.
      first: the number of the first one, counted from 0.
      verbose: as of Keras's fit; 2 for a line an epoch and no more.
    """

    steps: int
    first: int
    verbose: int

    def of(self, step: int) -> int:
        """The number, counted from 1, of the epoch whose step this is."""
        return self.first - (-step // self.steps)


class ProgressText:
    """Words a training event: step, loss, metrics, speed, loss scale when it is not 1, time to go by a clock."""

    def __init__(self, total_steps: int, clock: Callable[[], float], epochs: Epochs | None = None):
        self.total_steps = total_steps
        self._clock, self.epochs = clock, epochs
        self._first: tuple[int, float] | None = None

    def text(self, event: Record, width: int | None = None) -> str:
        """Returns the words; within `width` characters, those of speed and time to go rather than measurements."""
        step = int(event["step"])
        place, measured, pace, scale = [f"step {step}/{self.total_steps}"], _measurements(event), [], []
        if self.epochs is not None:
            place.insert(0, f"epoch {self.epochs.of(step)}/{self.epochs.of(self.total_steps)}")
        if "examples_per_second" in event:
            pace = [f"{strict_json.number(event['examples_per_second']):,.0f} examples/s"]
        if strict_json.number(event.get("loss_scale", 1)) != 1:
            scale = [f"loss scale {strict_json.number(event['loss_scale']):g}"]
        seconds = self.seconds_to_go(step)
        to_go = [] if seconds is None else [f"ETA {clock(seconds)}"]

        def text() -> str:
            return "  ".join([*place, *measured, *pace, *scale, *to_go])

        while width is not None and len(text()) > width and (scale or measured):
            (scale or measured).pop()
        return text()

    def seconds_to_go(self, step: int) -> float | None:
        """By the pace since the first event, of a clock that counts what trains."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, since = self._first
        if not first_step < step < self.total_steps:
            return None
        return (now - since) / (step - first_step) * (self.total_steps - step)


def evaluation_text(event: Record) -> str:
    """Words an evaluation: step, loss, the task's metrics."""
    return "  ".join([f"evaluation at step {int(event['step'])}", *_measurements(event)])


def _measurements(event: Record) -> list[str]:
    names = [name for name in ("loss", *event) if name in event]
    shown = dict.fromkeys(name for name in names if name == "loss" or name not in _NOT_THE_TASKS)
    return [f"{name} {strict_json.number(event[name]):.4g}" for name in shown]


def closing_rows(summary: Record, *, total_steps: int, best: tuple[str, float, int] | None, report: str | None) -> Rows:
    """End of a run, as `make_summary` has it; `best` is metric, value and step, `report` the path of its page."""
    seconds, took = summary["seconds"], ""
    if (number := len(summary.get("attempts", ()))) > 1 and summary.get("goodput_share"):
        seconds = {**summary["goodput"], "total": attempts.wall_seconds(summary)}
        took = f" over {number} attempts"
    rows = [(summary["status"], f"step {summary['step']:,} of {total_steps:,} in {clock(seconds['total'])}{took}")]
    if why := summary.get("ended_early"):
        rows.append(("ended", why))
    if rewinds := summary.get("spikes", {}).get("rewinds"):
        rows.append(("spikes", f"went back {len(rewinds)} time{'s' * (len(rewinds) > 1)}, see the report"))
    if best is not None:
        metric, value, step = best
        rows.append(("best", f"{metric} {value:.4g} at step {step:,}"))
    elif final := summary["metrics"]["eval"] or summary["metrics"]["train"]:
        rows.append(("loss", f"{strict_json.number(final['loss']):.4g}"))
    if shares := _shares(seconds):
        rows.append(("time", shares))
    return [*rows, ("report", report)] if report else rows


def _shares(seconds: Record) -> str:
    """Shares of the time, the largest first; what is below a percent and what is in no phase is the rest."""
    total = seconds["total"]
    if total <= 0:
        return ""
    parts = {name: 100 * spent / total for name, spent in seconds.items() if name != "total"}
    shown = {name: share for name, share in sorted(parts.items(), key=lambda part: -part[1]) if share >= 1}
    rest = 100 - sum(map(round, shown.values()))
    words = [f"{name.replace('_', ' ')} {share:.0f}%" for name, share in shown.items()]
    return ", ".join([*words, f"rest {rest}%"] if rest >= 1 else words)


def command_lines(commands: Mapping[str, str]) -> Sequence[str]:
    """Commands as lines, each whole so that it can be pasted, under what it is for."""
    return [line for purpose, command in commands.items() for line in (f"{purpose}:", f"  {command}")]

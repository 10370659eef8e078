"""What the panels at a run's start and end say: the plan in groups, and how the run ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.reporting import attempts, strict_json
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
    "wire",
)
_RESULTS = ("results",)

Rows = list[tuple[str, str]]


def plan_groups(plan: Mapping[str, str]) -> list[Rows]:
    """The lines of a plan in groups: what is trained, where and how, where results go, and notes."""
    groups: list[Rows] = [[], [], [], []]
    for name, value in plan.items():
        number = 3 if name.startswith("note") else 2 if name in _RESULTS else 1 if name in _WHERE else 0
        groups[number].append((name, value))
    return [group for group in groups if group]


def closing_rows(
    summary: Mapping[str, Any], *, total_steps: int, best: tuple[str, float, int] | None, report: str | None
) -> Rows:
    """How a run ended.

    Args:
      summary: as `make_summary` returns.
      total_steps: the training's last step.
      best: metric, value and step of the best evaluation.
      report: path of the page.
    """
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


def _shares(seconds: Mapping[str, Any]) -> str:
    """Where the time went, the largest part first; what is below a percent and what is in no phase is the rest."""
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

"""report.html: one self-contained page on a run, to be opened from a folder or sent by mail."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.reporting import page, strict_json
from launcher.reporting.metrics_file import read_events

FILE_NAME = "report.html"
_NOT_PLOTTED = ("step", "split", "time", "input_wait_fraction", strict_json.NON_FINITE)
Curve = tuple[list[float], list[float]]  # Steps and values.


def write_report(model_dir: str, *, plan: Mapping[str, str], summary: Mapping[str, Any]) -> None:
    """Writes DIR/report.html from the run's metrics.jsonl, plan and summary; atomically.

    Args:
        model_dir: The run's directory.
        plan: What the run resolved to, by name.
        summary: As `make_summary` returns.

    Raises:
        OSError: The page cannot be written.
    """
    folder = Path(model_dir)
    folder.mkdir(parents=True, exist_ok=True)
    strict_json.replace_file(folder / FILE_NAME, _page(folder.absolute().name, read_events(model_dir), plan, summary))


def _page(name: str, events: Sequence[Mapping[str, Any]], plan: Mapping[str, str], summary: Mapping[str, Any]) -> str:
    status = html.escape(str(summary.get("status")))
    error = summary.get("error")
    metrics = summary.get("metrics", {})
    numbers = {f"{split} {key}": value for split in metrics for key, value in metrics[split].items()}
    skipped = [event["skipped_steps"] for event in events if event.get("skipped_steps") is not None]
    sections = [
        f'<h1>{html.escape(name)}</h1><p class="{status}">{status} at step {html.escape(str(summary.get("step")))}</p>',
        f"<pre>{html.escape(str(error))}</pre>" if error else "",
        page.table("Results", numbers),
        f"<h2>Curves</h2>{_plots(_curves(events))}",
        f"<p>Steps skipped because gradients were not finite: {skipped[-1]:g}.</p>" if skipped else "",
        page.table("Plan", plan),
        page.table("Seconds", {key: f"{value:.1f}" for key, value in summary.get("seconds", {}).items()}),
        page.table("Versions", summary.get("versions", {})),
    ]
    return page.page(name, sections)


def _curves(events: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Curve]]:
    """Curves by measurement, then by split."""
    curves: dict[str, dict[str, Curve]] = {}
    for event in events:
        for name, value in event.items():
            if name in _NOT_PLOTTED or isinstance(value, str | Mapping):
                continue
            steps, values = curves.setdefault(name, {}).setdefault(event["split"], ([], []))
            steps.append(event["step"])
            values.append(math.nan if value is None else value)
    return curves


def _plots(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    if not curves:
        return "<p>Nothing was measured.</p>"
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"<p>{page.NO_PLOTS}</p>"
    rows = math.ceil(len(curves) / 2)
    figure = Figure(figsize=(11, 3 * rows), layout="constrained")
    for index, (name, by_split) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, 2, index + 1)
        for split, (steps, values) in by_split.items():
            axes.plot(steps, values, label=split, marker="o" if split == "eval" else None, markersize=4)
        axes.set_title(name.replace("_", " "))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if name == "loss_scale":
            axes.set_yscale("log", base=2)
        if len(by_split) > 1:
            axes.legend()
    return page.image(figure, "Curves by step")

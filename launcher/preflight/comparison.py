"""A comparison of several slices or batch sizes: one table and one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UsageError
from launcher.machine import installation
from launcher.preflight.case_report import verdict
from launcher.preflight.slice_finding import SliceFinding
from launcher.reporting.units import GIB, bytes_text, milliseconds

PLOT_NAME = "preflight.png"

_HEADING = (
    "slice", "batch", "a replica", "verdict", "HBM needed", "of it", "step at least", "bound by", "MFU", "examples/s",
    "hours",
)  # fmt: skip


def rows(findings: Sequence[SliceFinding], not_applicable: Sequence[tuple[str, str]]) -> list[list[str]]:
    """The table, its heading first.

    Args:
      findings: one a row.
      not_applicable: (name of the case, why there is no finding).
    """
    table = [list(_HEADING)]
    for finding in findings:
        recipe, hbm, bounds = finding.plan.recipe, finding.hbm, finding.roofline
        table.append(
            [
                finding.case.where.accelerator_type,
                str(recipe.global_batch_size),
                str(finding.plan.per_replica_batch_size)
                + (f" in {recipe.microbatches}" if recipe.microbatches > 1 else ""),
                verdict(finding),
                bytes_text(hbm.needed) if hbm else "",
                f"{hbm.needed / hbm.available:.0%}" if hbm else "",
                *(
                    (
                        milliseconds(bounds.step_seconds),
                        bounds.bound_by,
                        f"{bounds.mfu:.1%}",
                        f"{bounds.examples_per_second:,.0f}",
                        f"{bounds.hours:,.2f}",
                    )
                    if bounds
                    else ("",) * 5
                ),
            ]
        )
    for name, why in not_applicable:
        table.append([name, "", "", f"not applicable: {why}", *[""] * 7])
    return table


def require_matplotlib() -> None:
    """Raises UsageError where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "a comparison of several slices or batch sizes is drawn with matplotlib, which is not installed: "
            f"{installation.command('report')}, or leave out --model_dir for the table alone"
        ) from None


def plot(findings: Sequence[SliceFinding], path: Path) -> None:
    """Draws memory, bounds of the step's time and throughput of each finding that compiled; atomically.

    Raises:
      OSError: the picture cannot be written.
    """
    from matplotlib.figure import Figure

    shown = [finding for finding in findings if finding.hbm is not None]
    labels = [_label(finding) for finding in shown]
    places = range(len(shown))
    figure = Figure(figsize=(max(9.0, 1.3 * len(shown) + 3), 10), layout="constrained")
    memory, times, rates = figure.subplots(3, 1, sharex=True)
    memory.bar(
        places,
        [finding.hbm.needed / GIB for finding in shown if finding.hbm],
        color=["tab:blue" if finding.fits else "tab:red" for finding in shown],
    )
    for place, finding in enumerate(shown):
        assert finding.hbm is not None
        available = finding.hbm.available / GIB
        memory.hlines(available, place - 0.45, place + 0.45, color="black", label="available" if not place else None)
    memory.set_ylabel("HBM needed a device, GiB")
    memory.legend()
    for offset, (name, color) in enumerate((("compute", "tab:green"), ("hbm", "tab:orange"), ("ici", "tab:purple"))):
        seconds = [1000 * getattr(one.roofline, f"{name}_seconds") if one.roofline else 0 for one in shown]
        times.bar([place + 0.27 * (offset - 1) for place in places], seconds, 0.27, label=name.upper(), color=color)
    times.set_ylabel("step at least, ms")
    times.legend()
    rates.bar(places, [one.roofline.examples_per_second if one.roofline else 0 for one in shown], color="tab:gray")
    rates.set_ylabel("examples/s at most")
    rates.set_xticks(list(places), labels)
    for axes in (memory, times, rates):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png", dpi=110)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _label(finding: SliceFinding) -> str:
    label = f"{finding.case.where.accelerator_type}\nbatch {finding.plan.recipe.global_batch_size}"
    microbatches = finding.plan.recipe.microbatches
    label += f"\n{microbatches} microbatches" if microbatches > 1 else ""
    return label if finding.fits else f"{label}\ndoes not fit"

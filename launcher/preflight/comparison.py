"""A comparison of several targets or batch sizes in one table."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.preflight.case_report import verdict
from launcher.preflight.slice_finding import SliceFinding
from launcher.reporting.units import bytes_text, step_text

_HEADING = (
    "where", "batch", "a replica", "verdict", "memory needed", "of it", "step", "bound by", "MFU",
    "examples/s", "hours",
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
                finding.case.where.name,
                str(recipe.global_batch_size),
                str(finding.plan.per_replica_batch_size)
                + (f" in {finding.plan.microbatches}" if finding.plan.microbatches > 1 else ""),
                verdict(finding),
                bytes_text(hbm.needed) if hbm else "",
                f"{hbm.needed / hbm.available:.0%}" if hbm else "",
                *(
                    (
                        step_text(bounds.step_seconds, bounds.estimated_seconds),
                        bounds.most_for,
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

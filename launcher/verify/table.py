"""Table of a verification's results: for a terminal, for a log, for a program."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TextIO

from launcher.reporting.console import Console, show_table
from launcher.verify.compare import EXACT, QUANTITIES, Deviation, tolerance_of
from launcher.verify.control import FACTOR, Control
from launcher.verify.processes import Died, Refused
from launcher.verify.settings import Tolerances, Topology

# What the table, which fits into 80 characters, has room for.
_SHORT = {"amplified rounding": "rounding"}
_STYLES = {
    "result": "bold", "within": "bold green", "rounding": "bold green", "not applicable": "yellow",
    "EXCEEDED": "bold red", "failed": "bold red",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one topology.

    Attributes:
      deviations: its distance from one replica; empty when it could not be had.
      failure: why it could not.
      control: what rounding alone does to this training, where that had to be asked.
    """

    topology: Topology
    seconds: float
    deviations: tuple[Deviation, ...] = ()
    failure: Refused | Died | None = None
    control: Control | None = None

    @property
    def within(self) -> bool:
        """Whether every deviation is within its tolerance."""
        return not isinstance(self.failure, Died) and all(deviation.within for deviation in self.deviations)

    @property
    def is_rounding(self) -> bool:
        """Whether what exceeds its tolerance does so in the control, too."""
        return not self.within and self.control is not None and self.control.explains(self.deviations)

    @property
    def verified(self) -> bool:
        """Whether nothing speaks against the topology."""
        return self.within or self.is_rounding

    @property
    def outcome(self) -> str:
        """In a word or two."""
        if self.failure is not None:
            return self.failure.outcome
        if self.is_rounding:
            return "amplified rounding"
        return "within" if self.within else "EXCEEDED"

    @property
    def remarks(self) -> list[str]:
        """Lines on what the table has no room for."""
        if self.failure is not None:
            return [f"{self.topology.name}: {self.outcome}: {self.failure}"]
        prefix = "amplified rounding: " if self.is_rounding else ""
        own = {one.quantity: one.text for one in self.control.deviations} if self.control is not None else {}
        lines = []
        for one in self.deviations:
            if not one.within:
                beside = f"; the control is off by {own[one.quantity]}" if one.quantity in own else ""
                lines.append(f"{self.topology.name}: {prefix}{one.sentence}{beside}")
        return lines


def show(results: Sequence[Result], tolerances: Tolerances, console: Console, stream: TextIO | None = None) -> None:
    """Prints the table and the remarks; a table with lines on a terminal, columns of plain text elsewhere.

    A row for each quantity and a column for each topology, which fits into 80 characters.
    """
    outcomes = [_SHORT.get(result.outcome, result.outcome) for result in results]
    show_table(
        _rows(results, tolerances), console, stream, totals=["result", "", *outcomes],
        style=lambda cell: "red" if cell.endswith("!") else _STYLES.get(cell, ""),
    )  # fmt: skip
    for result in results:
        for remark in result.remarks:
            console.note(remark)


def _rows(results: Sequence[Result], tolerances: Tolerances) -> list[list[str]]:
    found = [{one.quantity: _text(result, one) for one in result.deviations} for result in results]
    rows = [["deviation", "tolerance", *(result.topology.name for result in results)]]
    for name in QUANTITIES:
        limit = "equal" if name in EXACT else f"{tolerance_of(name, tolerances):.1e}"
        rows.append([name, limit, *(texts.get(name, "") for texts in found)])
    return rows


def _text(result: Result, deviation: Deviation) -> str:
    if deviation.within:
        return deviation.text
    return f"{deviation.text} ~" if result.is_rounding else f"{deviation.text} !"


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The same for a program, a mapping for each topology."""
    return [
        {
            "topology": result.topology.name,
            **dataclasses.asdict(result.topology),
            "verdict": result.outcome.lower(),
            "reason": result.failure and str(result.failure),
            "seconds": round(result.seconds, 1),
            "deviations": _deviations_as_json(result.deviations),
        }
        for result in results
    ]


def control_as_json(control: Control | None) -> dict[str, Any] | None:
    """The same of the control; None where there was none."""
    if control is None:
        return None
    return {"factor": FACTOR, "void": control.void, "deviations": _deviations_as_json(control.deviations)}


def _deviations_as_json(deviations: Sequence[Deviation]) -> dict[str, Any]:
    fields = ("value", "tolerance", "within", "where", "first_step")
    return {one.quantity.replace(" ", "_"): {name: getattr(one, name) for name in fields} for one in deviations}

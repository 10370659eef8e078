"""compare.html: several runs, their curves overlaid, and what differs in configuration and result."""

from __future__ import annotations

import dataclasses
import html
import math
import os
import re
from collections.abc import Mapping, Sequence

import launcher
from launcher.reporting import curves, page
from launcher.reporting.page import Section
from launcher.reporting.run_folder import RunFolder
from launcher.reporting.strict_json import Record

FILE_NAME = "compare.html"
_ABSENT = "-"
Cells = dict[str, list[str]]  # by name, a cell for each run
_FACTS = ("data", "cluster", "strategy", "policy", "parameters", "seed")
_OTHER_MODES = ("verify", "precision_report")
_WIDTH, _NAME, _MOST = 80, 24, 5  # characters of a terminal's line, of its first column; runs on it
_PORT = re.compile(r"(?<=[\w\]]):\d+\b")  # another in each attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRuns:
    """Runs with names that tell them apart."""

    folders: Sequence[RunFolder]
    labels: Sequence[str]

    @classmethod
    def of(cls, folders: Sequence[RunFolder]) -> ComparedRuns:
        return cls(folders=folders, labels=_labels(folders))

    def results(self) -> Cells:
        """Results by name: a cell for each run."""
        rows = _by_name([_results(folder) for folder in self.folders])
        return {name: cells for name, cells in rows.items() if any(cell not in (_ABSENT, "") for cell in cells)}

    def differences(self) -> Cells:
        """Facts of the plan, bindings and versions that are not the same in all runs."""
        versions = [folder.summary.get("versions") or {} for folder in self.folders]
        facts = _different([_facts(folder) for folder in self.folders])
        facts = {name: cells for name, cells in facts.items() if len({*cells} - {_ABSENT}) > 1}
        return {**facts, **self._bindings(), **_different(versions)}

    def _bindings(self) -> Cells:
        """Bindings that differ, without those of other modes, which no training reads."""
        found = _different([folder.config for folder in self.folders])
        return {name: cells for name, cells in found.items() if name.partition(".")[0] not in _OTHER_MODES}

    def rows(self) -> list[list[str]]:
        """The table for a terminal, its heading first: results, then what differs; of the first runs."""
        table = {"": self.labels, **self.results(), **self.differences()}
        size = (_WIDTH - _NAME) // min(len(self.labels), _MOST) - 2
        return [
            [_shortened(name, _NAME), *(_shortened(cell, size) for cell in cells[:_MOST])]
            for name, cells in table.items()
        ]

    def trials(self) -> list[Sequence[str]]:
        """A row for each run, the heading first: bindings that all have and that differ, and the results."""
        bindings = {name: cells for name, cells in self._bindings().items() if _ABSENT not in cells}
        columns, best = {**bindings, **self.results()}, min(self.folders, key=score)
        of_best = [one is best and one.best is not None for one in self.folders]
        names = [label + " (best)" * marked for label, marked in zip(self.labels, of_best, strict=True)]
        return [["run", *columns], *zip(names, *columns.values(), strict=True)]

    def page(self) -> str:
        """Contents of compare.html."""
        charts = curves.of_runs(self.folders, self.labels)
        differences = self.differences()
        told = page.grid([["", *self.labels], *([name, *cells] for name, cells in differences.items())])
        told = told if differences else page.paragraph("Nothing in configuration or versions.")
        folders = {label: str(one.path) for label, one in zip(self.labels, self.folders, strict=True)}
        sections = [
            Section("Results", page.grid(self.trials())),
            Section("Curves", page.chart_tools(charts) + page.panels("curves"), charts),
            Section("What differs", told),
            Section("Folders", page.facts(folders)),
        ]
        return page.page(
            " and ".join(self.labels),
            header=f"<h1>Comparison: {html.escape(', '.join(self.labels))}</h1>",
            sections=sections,
            footer=f"Launcher {html.escape(launcher.__version__)}",
        )


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """The ends of the paths that tell the folders apart."""
    paths = [folder.path.parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        labels = [os.path.join(*parts[-length:]) for parts in paths]
        if len(set(labels)) == len(set(paths)):
            break
    seen: dict[str, int] = {}
    for index, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:  # the same folder twice
            labels[index] = f"{label} ({seen[label]})"
    return labels


def _results(folder: RunFolder) -> dict[str, str]:
    last: Record = train[-1] if (train := folder.of_split("train")) else {}
    best = folder.best
    of_best = {}
    if best is not None:
        value = page.show(best[str(folder.best_metric)])
        of_best[f"best {folder.best_metric}"] = f"{value} at step {page.show(best['step'])}"
        if folder.began is not None and "time" in best:
            of_best["seconds to best"] = f"{best['time'] - folder.began:,.0f}"
    return {
        "status": folder.status,
        **of_best,
        "training loss": page.show(last.get("loss")),
        "steps": page.show(last.get("step")),
        "wall time": page.duration(folder.seconds),
        "skipped steps": page.show(last.get("skipped_steps")),
        "attempts": str(max(1, len(folder.attempts))),
    }


def _facts(folder: RunFolder) -> Mapping[str, str]:
    """Facts that the bindings do not say: where it ran, on what data."""
    if folder.record is None:
        return {name: str(value) for name in _FACTS if (value := folder.summary.get(name)) is not None}
    plan = {name: _PORT.sub("", folder.record.plan[name]) for name in _FACTS if name in folder.record.plan}
    return {"recipe": ", ".join(folder.record.recipe), **plan}


def _by_name(tables: Sequence[Mapping[str, str]]) -> Cells:
    """A row for each name in any of the tables, with a cell for each table."""
    return {name: [table.get(name, _ABSENT) for table in tables] for table in tables for name in table}


def _different(tables: Sequence[Mapping[str, str]]) -> Cells:
    """Rows that are not the same in all tables; a table that is empty is not known and says nothing."""
    return {
        name: cells
        for name, cells in _by_name(tables).items()
        if len({cell for cell, table in zip(cells, tables, strict=True) if table}) > 1
    }


def score(folder: RunFolder) -> float:
    """Score of the best evaluation, lower is better; infinite where there is none."""
    return folder.best[str(folder.best_metric)] * (1 if folder.low_is_best else -1) if folder.best else math.inf


def _shortened(cell: str, size: int) -> str:
    return cell if len(cell) <= size else f"{cell[: size - 2]}.."

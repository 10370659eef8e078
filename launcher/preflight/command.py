"""`--mode=preflight`: a recipe's step compiled for TPU slices that nobody has rented yet."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import EXIT_DONE, LauncherError, UsageError
from launcher.model_dir import check_model_dir
from launcher.preflight import comparison, report, versions
from launcher.preflight import slices as topologies
from launcher.preflight import suggestions as knobs
from launcher.preflight.compiler import Compiler
from launcher.preflight.examine import Case, Examiner
from launcher.preflight.report import Entry, Tried
from launcher.reporting import strict_json
from launcher.reporting.console import Console, make_console
from launcher.reporting.progress_line import ProgressLine
from launcher.reporting.summary import versions as run_versions
from launcher.reporting.tables import show_table
from launcher.reporting.units import bytes_text

FILE_NAME = "preflight.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be compiled, and for what.

    Attributes:
      gin_files, gin_params, seed, deterministic: the recipe.
      tpu_types: accelerator types.
      batch_sizes: global batch sizes to compare; empty for the recipe's own.
      search: measure every knob instead of estimating what it does.
      model_dir: where preflight.json goes; None for nowhere.
      cache_dir, timeout_seconds: of the compiler.
    """

    gin_files: tuple[str, ...]
    gin_params: tuple[str, ...]
    seed: int | None
    deterministic: bool
    tpu_types: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    search: bool
    model_dir: str | None
    cache_dir: str
    timeout_seconds: float

    def cases(self) -> list[Case]:
        """Every slice with every batch size.

        Raises:
          UsageError: a type is unknown or not listed.
        """
        slices = [topologies.find(name) for name in self.tpu_types]
        changes: list[tuple[str, ...]] = [(f"train.global_batch_size = {size}",) for size in self.batch_sizes] or [()]
        return [Case(where=where, changes=change) for where in slices for change in changes]


def run(request: Request, *, dry_run: bool = False) -> int:
    """Examines the cases, prints what was found and writes it down.

    Returns:
      The exit code of a step that fits; of several, of one that fits at least.

    Raises:
      UsageError: the request or the recipe is wrong, or the step compiles or fits nowhere.
    """
    return Preflight(request).run(dry_run=dry_run)


class Preflight:
    """One request, about to be examined; see `run`."""

    def __init__(self, request: Request):
        self._request = request
        self._console: Console = make_console(total_steps=1)
        self._line = ProgressLine(self._console)
        self._cases = request.cases()
        if request.model_dir is not None:
            check_model_dir(request.model_dir)
            if len(self._cases) > 1:
                comparison.require_matplotlib()
        self._examiner = Examiner(
            gin_files=request.gin_files,
            gin_params=request.gin_params,
            seed=request.seed,
            deterministic=request.deterministic,
            compiler=Compiler(
                cache_dir=request.cache_dir, timeout_seconds=request.timeout_seconds, tick=self._line.tick
            ),
            on_phase=lambda case, phase: self._line.start(f"{case.name}: {phase}"),
        )

    def run(self, *, dry_run: bool) -> int:
        possible, not_applicable = self._checked()
        if dry_run:
            for case in possible:
                self._console.plan({"slice": case.where.describe(), **self._examiner.resolve(case).describe()})
            return EXIT_DONE
        entries: list[Entry] = []
        for case in possible:
            try:
                entries.append(self._entry(case))
            except LauncherError as error:
                if len(self._cases) == 1:
                    raise
                not_applicable.append((case.name, str(error)))
            finally:
                self._line.close()
            if entries and entries[-1].finding.case == case:
                report.show(entries[-1], self._console)
                self._console.note("")
        findings = [entry.finding for entry in entries]
        if len(self._cases) > 1:
            show_table(comparison.rows(findings, not_applicable), self._console)
        report.show_constants(findings, self._console)
        self._write(entries, not_applicable)
        return self._judge(entries, not_applicable)

    def _checked(self) -> tuple[list[Case], list[tuple[str, str]]]:
        """The cases that can be resolved, before the first of them is compiled; and why the others cannot."""
        possible: list[Case] = []
        refused: list[tuple[str, str]] = []
        for case in self._cases:
            try:
                self._examiner.resolve(case)
            except UsageError as error:
                if len(self._cases) == 1:
                    raise
                refused.append((case.name, str(error)))
            else:
                possible.append(case)
        if not possible:
            raise UsageError("no case can be compiled: " + "; ".join(f"{name}: {why}" for name, why in refused))
        return possible, refused

    def _entry(self, case: Case) -> Entry:
        finding = self._examiner.examine(case)
        if finding.fits and not self._request.search:
            return Entry(finding=finding)
        suggestions = knobs.suggest(finding)
        if not self._request.search:
            return Entry(finding=finding, tried=tuple(Tried(suggestion=one) for one in suggestions))
        tried = []
        for suggestion in suggestions:
            try:
                tried.append(Tried(suggestion=suggestion, finding=self._examiner.examine(suggestion.case)))
            except LauncherError as error:  # what has been found so far is worth more than the error
                tried.append(Tried(suggestion=suggestion, refused=str(error)))
        return Entry(finding=finding, tried=tuple(tried))

    def _write(self, entries: Sequence[Entry], not_applicable: Sequence[tuple[str, str]]) -> None:
        model_dir = self._request.model_dir
        if model_dir is None:
            return
        content = {
            "recipe": list(self._request.gin_files),
            "gin_params": list(self._request.gin_params),
            "cases": [report.as_json(entry) for entry in entries],
            "not_applicable": [{"case": name, "why": why} for name, why in not_applicable],
            "versions": {**run_versions(), **versions.require()},
        }
        try:
            folder = Path(model_dir)
            folder.mkdir(parents=True, exist_ok=True)
            strict_json.replace_file(folder / FILE_NAME, f"{strict_json.dumps(content, indent=2)}\n")
            written = [FILE_NAME]
            if len(self._cases) > 1 and any(entry.finding.memory for entry in entries):
                comparison.plot([entry.finding for entry in entries], folder / comparison.PLOT_NAME)
                written.append(comparison.PLOT_NAME)
        except OSError as error:
            raise UsageError(
                f"{FILE_NAME} cannot be written to --model_dir={model_dir}: {error.strerror or error}"
            ) from None
        self._console.note("")
        self._console.note(f"written: {', '.join(os.path.join(model_dir, name) for name in written)}")

    def _judge(self, entries: Sequence[Entry], not_applicable: Sequence[tuple[str, str]]) -> int:
        fitting = [entry.finding for entry in entries if entry.finding.fits]
        if fitting:
            names = ", ".join(finding.case.name for finding in fitting)
            self._console.note(f"preflight: the step compiles and fits: {names}")
            return EXIT_DONE
        if len(self._cases) > 1:
            raise UsageError(f"the step fits none of {len(self._cases)} cases; see the table and the advice")
        raise UsageError(_refusal(entries[0]))


def _refusal(entry: Entry) -> str:
    finding = entry.finding
    if finding.memory is None:
        return f"on {finding.case.name}, {finding.refusal}"
    memory, plan = finding.memory, finding.plan
    best = _best(entry)
    hint = f". Try {best}" if best else ""
    return (
        f"train.global_batch_size = {plan.recipe.global_batch_size} does not fit on {finding.case.name}: "
        f"{plan.per_replica_batch_size} examples a replica in {plan.recipe.microbatches} microbatches need "
        f"{bytes_text(memory.needed)} of HBM, {bytes_text(memory.available)} are there, "
        f"{bytes_text(memory.excess)} are missing (the compiler's own figures){hint}"
    )


def _best(entry: Entry) -> str | None:
    measured = [one for one in entry.tried if one.finding is not None and one.finding.fits]
    if measured:
        return f"{measured[0].suggestion.flag}, which was compiled and fits"
    untried: list[Tried] = [one for one in entry.tried if one.finding is None and one.refused is None]
    return untried[0].suggestion.text if untried else None

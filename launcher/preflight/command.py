"""`--mode=preflight`: a recipe's step compiled for TPUs and GPUs that nobody has rented yet."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, LauncherError, UsageError
from launcher.model_dir import check_model_dir
from launcher.modes import PreflightRequest
from launcher.preflight import case_report, gpus, searches, slices
from launcher.preflight.case_report import CaseReport
from launcher.preflight.compiler import Compiler, default_cache_dir, require_versions
from launcher.preflight.slice_finding import Case, Examiner, SliceFinding
from launcher.reporting import report, strict_json
from launcher.reporting.console import Console, make_console, show_table
from launcher.reporting.summary import versions as run_versions
from launcher.reporting.units import bytes_text

_Made = TypeVar("_Made")


def run(request: PreflightRequest) -> int:
    """Compiles for every target and batch size that the flags name; see `Preflight`."""
    tpu_types, gpu_types = _names(request.tpu_type), _names(request.gpu_type)
    if not tpu_types and not gpu_types:
        raise UsageError("--mode=preflight: add what to compile for, as --tpu_type=v5litepod-256 or --gpu_type=h100:8")
    if not request.preflight_timeout > 0:
        raise UsageError(f"--preflight_timeout={request.preflight_timeout:g}: must be more than 0 seconds")
    if request.largest_batch and (request.preflight_batch_sizes or request.preflight_search):
        other = "--preflight_batch_sizes" if request.preflight_batch_sizes else "--preflight_search"
        raise UsageError(f"--largest_batch looks for a batch size by itself: leave it or {other} out")
    sizes = dict.fromkeys(map(_batch_size, request.preflight_batch_sizes))
    changes: list[tuple[str, ...]] = [(f"train.global_batch_size = {size}",) for size in sizes] or [()]
    targets = [*map(slices.find, tpu_types), *(gpus.find(name, request.runtime) for name in gpu_types)]
    cases = [Case(where=where, changes=change) for where in targets for change in changes]
    folder, console = request.preflight_cache or default_cache_dir(os.environ), make_console(total_steps=1)
    compiler = Compiler(cache_dir=folder, timeout_seconds=request.preflight_timeout)
    examiner = Examiner(request=request, compiler=compiler, console=console)
    with gin_bindings.usage_errors():
        return Preflight(request=request, cases=cases, examiner=examiner, console=console).run()


def _names(given: Sequence[str]) -> tuple[str, ...]:
    names = [name.strip() for text in given for name in text.split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _batch_size(text: str) -> int:
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise UsageError(f"--preflight_batch_sizes: {text!r} is no whole number above 0; write such as 2048,4096")
    return size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preflight:
    """A preflight of a recipe, its `cases` one after another."""

    request: PreflightRequest
    cases: Sequence[Case]
    examiner: Examiner
    console: Console
    not_applicable: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Names of cases, and why nothing can be told of them."""

    def run(self) -> int:
        """Examines the cases, prints what was found and writes it down.

        Returns:
          The exit code of a step that fits; of several, of one that fits at least.

        Raises:
          UsageError: a compiler is missing, the folder is another run's, the recipe is wrong, or the step compiles or
            fits nowhere.
        """
        versions: dict[str, str] = {}
        for accelerator in dict.fromkeys(case.where.accelerator for case in self.cases):
            versions |= require_versions(accelerator)
        if self.request.model_dir is not None:
            check_model_dir(self.request.model_dir)
        possible = list(self._each(self.cases, self.examiner.resolve))
        if not possible:
            raise UsageError(_no_case(self.not_applicable))
        if self.request.dry_run:
            for case, plan in possible:
                self.console.plan({"where": case.where.describe(), **plan.describe()})
            return EXIT_DONE
        reports: list[CaseReport] = []
        for _, reported in self._each([case for case, _ in possible], self._report):
            reports.append(reported)
            case_report.show(reported, self.console)
            self.console.note("")
        findings = [reported.finding for reported in reports]
        if len(self.cases) > 1:
            show_table(case_report.comparison(findings, self.not_applicable), self.console)
        case_report.show_constants(findings, self.console)
        self._write(reports, versions)
        return self._conclude(reports)

    def _each(self, cases: Sequence[Case], do: Callable[[Case], _Made]) -> Iterator[tuple[Case, _Made]]:
        """Results of `do` on each case; of several, why it cannot is noted, and the others go on."""
        for case in cases:
            try:
                made = do(case)
            except LauncherError as error:
                if len(self.cases) == 1:
                    raise
                self.not_applicable.append((case.name, str(error)))
                continue
            yield case, made

    def _report(self, case: Case) -> CaseReport:
        if self.request.largest_batch:
            largest = searches.largest_batch(self.examiner, case, on_try=self._tell_try)
            return CaseReport(finding=largest.fits or largest.tried[-1], largest=largest)
        finding = searches.examine_auto(self.examiner, case)
        return CaseReport(finding=finding, tried=tuple(self._tried(finding)))

    def _tell_try(self, finding: SliceFinding) -> None:
        assert finding.hbm is not None
        batch, needed = searches.batch_size(finding), bytes_text(finding.hbm.needed)
        self.console.note(f"a global batch of {batch:,} {case_report.result(finding)}: {needed} needed")

    def _tried(self, finding: SliceFinding) -> Iterator[searches.Suggestion]:
        """Compiles suggestions: each knob's until the step fits.

        Without --preflight_search, only for a single step that does not fit, only until the first that does, and none
        is begun after --preflight_timeout seconds.
        """
        if not self.request.preflight_search and (finding.fits or len(self.cases) > 1):
            return
        started = time.monotonic()
        for knob in searches.knobs(finding):
            for suggestion in knob:
                if not self.request.preflight_search and time.monotonic() - started > self.request.preflight_timeout:
                    return
                try:
                    one = dataclasses.replace(suggestion, finding=self.examiner.examine(suggestion.case))
                except LauncherError as error:  # what has been found so far is worth more than the error
                    one = dataclasses.replace(suggestion, refused=str(error))
                yield one
                if one.fits:
                    break
            else:
                continue
            if not self.request.preflight_search:
                return

    def _write(self, reports: Sequence[CaseReport], versions: Mapping[str, str]) -> None:
        if self.request.model_dir is None:
            return
        content = {
            "recipe": list(self.request.gin_file),
            "gin_params": list(self.request.gin_param),
            "cases": [case_report.as_json(reported) for reported in reports],
            "not_applicable": [{"case": name, "why": why} for name, why in self.not_applicable],
            "versions": {**run_versions(), **versions},
        }
        text = strict_json.dumps(content, indent=2)
        written = report.write_result(self.request.model_dir, "preflight.json", text)
        self.console.note("")
        self.console.note(f"written: {written}")

    def _conclude(self, reports: Sequence[CaseReport]) -> int:
        for reported in reports:
            if reported.largest:
                of = reported.finding.case.where.name
                self.console.note(f"preflight: {of}: {case_report.largest_text(reported.largest)}")
        findings = [reported.finding for reported in reports]
        if fitting := [finding.case.name for finding in findings if finding.fits]:
            self.console.note(f"preflight: the step compiles and fits: {', '.join(fitting)}")
            return EXIT_DONE
        if len(self.cases) == 1:
            raise UsageError(_refusal(reports[0]))
        refused = [*self.not_applicable, *((one.case.name, one.refusal or "") for one in findings if one.hbm is None)]
        if len(refused) == len(self.cases):
            raise UsageError(_no_case(refused))
        but = f", and cannot be compiled for {len(refused)} others" if refused else ""
        hint = "" if self.request.preflight_search else ", or let --preflight_search look for what makes it fit"
        fitted = len(self.cases) - len(refused)
        raise UsageError(f"the step fits none of {fitted} cases{but}; see the table and the advice{hint}")


def _no_case(refused: Sequence[tuple[str, str]]) -> str:
    """Reasons why nothing was compiled; one that several cases share stands once."""
    names: dict[str, list[str]] = {}
    for name, why in refused:
        names.setdefault(why, []).append(name)
    return "no case can be compiled: " + "; ".join(f"{', '.join(cases)}: {why}" for why, cases in names.items())


def _refusal(reported: CaseReport) -> str:
    finding = reported.finding
    if finding.hbm is None:
        return f"on {finding.case.name}, {finding.refusal}"
    hbm, plan = finding.hbm, finding.plan
    best = next((one.flag for one in reported.tried if one.fits), None)
    allowed = sum(one.value for one in hbm.reserved.values())
    beside = f", and {bytes_text(allowed)} allowed for {', '.join(hbm.reserved)}" if hbm.reserved else ""
    hint = f". Try {best}, which was compiled and fits" if best else ""
    return (
        f"train.global_batch_size = {plan.recipe.global_batch_size} does not fit on {finding.case.name}: "
        f"{plan.per_replica_batch_size} examples a replica in {plan.microbatches} microbatches need "
        f"{bytes_text(hbm.needed)} of {finding.case.where.memory_name}, {bytes_text(hbm.available)} are there, "
        f"{bytes_text(hbm.excess)} are missing (the compiler's own figures{beside}){hint}"
    )

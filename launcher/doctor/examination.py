"""`--mode=doctor`: whether this machine and its peers are fit: the checks, quick ones first, their run, the report.

Imports no TensorFlow, which may be missing.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from launcher.doctor import collective, host, packages, peer_exchange, tensorflow_checks
from launcher.doctor.check import FAIL, OK, WARN, Check, Context, Finding, Skip, exit_code, fail, worst
from launcher.errors import EXIT_DONE, EXIT_FAILED, UsageError, advice
from launcher.modes import DoctorRequest
from launcher.reporting import strict_json
from launcher.reporting.console import columns

SCHEMA_VERSION = 1

_NARROWEST, _WIDEST = 60, 160
_COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[1;31m"}
_PLAIN = "\033[0m"
_PATIENCE_SECONDS = 1.0

CHECKS = (
    packages.python,
    packages.tensorflow_package,
    packages.packages,
    packages.variables,
    host.cores,
    host.memory,
    host.open_files,
    host.shared_memory,
    host.driver,
    peer_exchange.cluster,
    host.model_dir,
    peer_exchange.peers,
    peer_exchange.agreement,
    tensorflow_checks.tensorflow,
    tensorflow_checks.devices,
    tensorflow_checks.gpus,
    tensorflow_checks.recipe,
    tensorflow_checks.data,
    tensorflow_checks.model,
    collective.collective,
)


def run(request: DoctorRequest) -> int:
    """Examines this machine; returns 0, or the exit code of the worst failure."""
    checks = chosen(request.doctor_checks)
    if request.doctor_wait <= 0:
        raise UsageError(f"--doctor_wait={request.doctor_wait:g}: must be more than 0 seconds")
    if request.dry_run:
        _write(*columns([(check.name, check.looks_at) for check in checks]))
        return EXIT_DONE
    context, in_json = Context(environ=os.environ, request=request), request.json
    findings, skipped = examine(checks, context, None if in_json else show)
    code = exit_code(findings)
    if in_json:
        _write(strict_json.dumps(as_json(findings, skipped, code), indent=2))
    else:
        show_end(findings, skipped, code)
    return code


def chosen(names: Sequence[str]) -> tuple[Check, ...]:
    """Returns the checks of these names, in the order of `CHECKS`; all for no name, UsageError for one that is none."""
    known = [check.name for check in CHECKS]
    for name in names:
        if name not in known:
            raise UsageError(f"--doctor_checks={','.join(names)}: no check {name!r}{advice(name, known)}")
    return tuple(check for check in CHECKS if not names or check.name in names)


def examine(
    checks: Iterable[Check], context: Context, show: Callable[[Finding], None] | None = None
) -> tuple[list[Finding], list[dict[str, str]]]:
    """Runs checks in order; one that breaks does not stop the others. Each finding is given to `show`, too.

    Returns:
      The findings; and of checks that had nothing to look at, "check" and "why".
    """
    findings: list[Finding] = []
    skipped: list[dict[str, str]] = []
    for check in checks:
        told: list[Finding] = []
        try:
            with _announced(check):
                told.extend(check.run(context))  # keeps what came before an error
        except Skip as skip:
            skipped.append({"check": check.name, "why": str(skip)})
        except Exception as error:
            told.append(_broken(error))
        for finding in told:
            findings.append(dataclasses.replace(finding, check=check.name))
            if show is not None:
                show(findings[-1])
    return findings, skipped


@contextlib.contextmanager
def _announced(check: Check) -> Iterator[None]:
    """Says on standard error what a check waits for, once it takes a while."""
    words = f"... {check.name}: {check.waits_for or check.looks_at}\n"
    timer = threading.Timer(_PATIENCE_SECONDS, sys.stderr.write, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _broken(error: Exception) -> Finding:
    seen = f"this check itself broke: {type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("launcher"):
        return fail(seen, f"pip install {error.name}")
    return fail(seen, "please report it with this line; the other checks went on", exit_code=EXIT_FAILED)


def show(finding: Finding) -> None:
    """Prints a finding: a line, and what is too long for it below."""
    colour = _COLOURS[finding.status] if sys.stdout.isatty() else ""
    status = f"{colour}{finding.status:<4}{_PLAIN if colour else ''}"
    first, *rest = _wrapped(finding.seen)
    rest += _wrapped(f"fix: {finding.fix}") if finding.fix else []
    _write(f"{status}  {finding.check:<18}  {first}", *(f"{'':26}{line}" for line in rest))


def _wrapped(text: str) -> list[str]:
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns)) - 26
    wrapped = [textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()]
    return [line for lines in wrapped for line in lines] or [""]


def show_end(findings: Sequence[Finding], skipped: Sequence[Mapping[str, str]], code: int) -> None:
    """Prints what was not checked and why, and how many findings there are of each kind."""
    for why in dict.fromkeys(skip["why"] for skip in skipped):
        _write(f"not checked: {', '.join(skip['check'] for skip in skipped if skip['why'] == why)} ({why})")
    counts = [f"{sum(finding.status == status for finding in findings)} {status}" for status in (OK, WARN, FAIL)]
    _write(f"{', '.join(counts)}; exit code {code}")


def as_json(findings: Sequence[Finding], skipped: Sequence[Mapping[str, str]], code: int) -> dict[str, object]:
    """The object that --json prints; `schema_version` changes when a key is removed or changes its meaning."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": worst(findings),
        "exit_code": code,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "not_checked": list(skipped),
    }


def _write(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()

"""Reports of findings: text for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

from launcher.doctor.check import FAIL, OK, WARN, Finding, worst
from launcher.reporting.console import columns

SCHEMA_VERSION = 1

_NARROWEST, _WIDEST = 60, 160
_COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[1;31m"}
_PLAIN = "\033[0m"


def plan(checks: Mapping[str, str]) -> None:
    """Prints the list of checks."""
    _write(*columns(list(checks.items())))


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


def show_end(findings: Sequence[Finding], skipped: Sequence[Mapping[str, str]], exit_code: int) -> None:
    """Prints what was not checked and why, and how many findings there are of each kind."""
    for why in dict.fromkeys(one["why"] for one in skipped):
        _write(f"not checked: {', '.join(one['check'] for one in skipped if one['why'] == why)} ({why})")
    counts = [f"{sum(one.status == status for one in findings)} {status}" for status in (OK, WARN, FAIL)]
    _write(f"{', '.join(counts)}; exit code {exit_code}")


def as_json(findings: Sequence[Finding], skipped: Sequence[Mapping[str, str]], exit_code: int) -> dict[str, object]:
    """The object that --json prints; `schema_version` changes when a key is removed or changes its meaning."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": worst(findings),
        "exit_code": exit_code,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "not_checked": list(skipped),
    }


def _write(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()

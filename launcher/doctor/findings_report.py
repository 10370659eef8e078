"""Reports of findings: text for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Protocol

from launcher.doctor.check import FAIL, OK, WARN, Finding, worst
from launcher.reporting import strict_json
from launcher.reporting.console import columns

SCHEMA_VERSION = 1

_NARROWEST, _WIDEST = 60, 160
_COLOURS = {OK: "\033[32m", WARN: "\033[33m", FAIL: "\033[1;31m"}
_PLAIN = "\033[0m"


class DoctorReport(Protocol):
    """A report of the doctor, which is told what happens in order."""

    def wait(self, check: str, what: str) -> None: ...
    def finding(self, finding: Finding) -> None: ...
    def skip(self, check: str, why: str) -> None: ...
    def end(self, findings: Sequence[Finding], exit_code: int) -> None: ...


def plan(checks: Mapping[str, str]) -> None:
    """Prints the list of checks."""
    for line in columns(list(checks.items())):
        _write(line)


class TextReport:
    """A report of one line a finding on standard output, and of progress on standard error."""

    def __init__(self) -> None:
        self._width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((120, 24)).columns))
        self._colours = _COLOURS if sys.stdout.isatty() else {}
        self._skipped: dict[str, list[str]] = {}

    def wait(self, check: str, what: str) -> None:
        _say(f"... {check}: {what}")

    def finding(self, finding: Finding) -> None:
        colour = self._colours.get(finding.status, "")
        status = f"{colour}{finding.status:<4}{_PLAIN if colour else ''}"
        first, *rest = self._wrapped(finding.seen)
        _write(f"{status}  {finding.check:<18}  {first}")
        for line in rest:
            _write(f"{'':26}{line}")
        for line in self._wrapped(f"fix: {finding.fix}") if finding.fix else ():
            _write(f"{'':26}{line}")

    def _wrapped(self, text: str) -> list[str]:
        lines = []
        for line in text.splitlines():
            lines += textwrap.wrap(line, self._width - 26, break_long_words=False, break_on_hyphens=False)
        return lines or [""]

    def skip(self, check: str, why: str) -> None:
        self._skipped.setdefault(why, []).append(check)

    def end(self, findings: Sequence[Finding], exit_code: int) -> None:
        for why, checks in self._skipped.items():
            _write(f"not checked: {', '.join(checks)} ({why})")
        counts = [f"{sum(one.status == status for one in findings)} {status}" for status in (OK, WARN, FAIL)]
        _write(f"{', '.join(counts)}; exit code {exit_code}")


class JsonReport:
    """A report of one JSON object on standard output at the end, and of progress on standard error."""

    def __init__(self) -> None:
        self._skipped: list[dict[str, str]] = []

    def wait(self, check: str, what: str) -> None:
        _say(f"... {check}: {what}")

    def finding(self, finding: Finding) -> None:
        pass

    def skip(self, check: str, why: str) -> None:
        self._skipped.append({"check": check, "why": why})

    def end(self, findings: Sequence[Finding], exit_code: int) -> None:
        _write(strict_json.dumps(as_json(findings, self._skipped, exit_code), indent=2))


def as_json(findings: Sequence[Finding], skipped: Sequence[Mapping[str, str]], exit_code: int) -> dict[str, object]:
    """The object that --json prints; `schema_version` changes when a key is removed or changes its meaning."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": worst(findings),
        "exit_code": exit_code,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "not_checked": list(skipped),
    }


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

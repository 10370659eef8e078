"""What a check has to say, and what all of them together mean for the exit code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRY, EXIT_USAGE

OK = "ok"
WARN = "warn"
FAIL = "fail"

# What nobody needs to run again before it is mended comes first, what may pass by itself last.
_WORST_FIRST = (EXIT_USAGE, EXIT_FAILED, EXIT_RETRY)


class Skip(Exception):
    """A check has nothing to look at; the text says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report.

    Attributes:
      check: the check that says so.
      status: "ok", "warn" (it will train, worse than it could) or "fail" (it will not train).
      seen: what was seen, with the values.
      fix: what to do; empty where nothing has to be done.
      exit_code: of a failure, as `launcher.errors` has them; 0 for the others.
    """

    check: str
    status: str
    seen: str
    fix: str = ""
    exit_code: int = EXIT_DONE


def ok(check: str, seen: str) -> Finding:
    return Finding(check=check, status=OK, seen=seen)


def warn(check: str, seen: str, fix: str) -> Finding:
    return Finding(check=check, status=WARN, seen=seen, fix=fix)


def fail(check: str, seen: str, fix: str, *, exit_code: int = EXIT_USAGE) -> Finding:
    """A failure that somebody has to mend (64), unless it is ours (70) or may pass by itself (75)."""
    return Finding(check=check, status=FAIL, seen=seen, fix=fix, exit_code=exit_code)


def worst(findings: Iterable[Finding]) -> str:
    """The worst status there is."""
    found = {finding.status for finding in findings}
    return next((status for status in (FAIL, WARN) if status in found), OK)


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without a failure; else 64 if anything has to be mended, 70 if a check broke, 75 if all of it may pass."""
    found = {finding.exit_code for finding in findings if finding.status == FAIL}
    return next((code for code in _WORST_FIRST if code in found), EXIT_DONE)

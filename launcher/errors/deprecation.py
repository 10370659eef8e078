"""Deprecation: a name that is read for a while after it has got another one, and the version in which it goes."""

import sys

GOES_IN = "2.0"
"""The version in which names go that 1.x reads: a new one may take any away that 1.0 has told of."""

_told: set[str] = set()


def tell(old: str, now: str) -> None:
    """Says so on standard error, once in a process."""
    if old not in _told:
        _told.add(old)
        sys.stderr.write(f"note: {old} is {now} now; its old name goes in Launcher {GOES_IN}\n")

"""The nearest name: what a message offers to someone who mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_SHOWN = 12


def nearest(name: str, choices: Collection[str]) -> str | None:
    """The choice that `name` was most likely meant to be; None if none is near."""
    spelled = {choice.lower(): choice for choice in sorted(choices)}
    found = difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.6)
    return spelled[found[0]] if found else None


def advice(name: str, choices: Collection[str]) -> str:
    """The end of a message about an unknown name: "; did you mean 'x'?", else the choices there are, else nothing."""
    close = nearest(name, choices)
    if close:
        return f"; did you mean {close!r}?"
    return f"; known: {listed(choices)}" if choices else ""


def listed(choices: Collection[str]) -> str:
    """The choices in alphabetical order, the first of them if there are many."""
    shown = sorted(choices)[:_SHOWN]
    more = f" and {len(choices) - len(shown)} more" if len(choices) > len(shown) else ""
    return f"{', '.join(shown)}{more}"

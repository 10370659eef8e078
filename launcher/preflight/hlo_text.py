"""Statements of HLO's text: what belongs together, whatever line breaks its strings, braces and comments have."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator

QUOTED = r'"(?:[^"\\]|\\.)*"'
"""A string, in which nothing else is looked for."""

_SKIPPED = rf"{QUOTED}|/\*.*?\*/"
_TOKEN = re.compile(rf"{_SKIPPED}|[{{}}()\[\]\n]", re.DOTALL)
_ROUND = re.compile(rf"{_SKIPPED}|[()]", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_OPENS = re.compile(r"\s*(ENTRY\s+)?%?[\w.\-]+\s*(\(.*)?\{\s*", re.DOTALL)
_STEPS = {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}


class Kind(enum.Enum):
    """What a statement is.

    Attributes:
      OPENS, CLOSES: the head of a computation, and the brace that ends it.
      INSIDE, OUTSIDE: anything else, in a computation or not.
      CUT_OFF: the text ends before the statement, or the computation that it is in, does.
    """

    OPENS = enum.auto()
    CLOSES = enum.auto()
    INSIDE = enum.auto()
    OUTSIDE = enum.auto()
    CUT_OFF = enum.auto()


def statements(text: str) -> Iterator[tuple[Kind, str]]:
    """Every statement of a module with its kind, in order; blank lines left out."""
    start = depth = 0
    inside = False
    for token in _TOKEN.finditer(text if text.endswith("\n") else f"{text}\n"):
        if token[0] != "\n":
            depth += _STEPS.get(token[0], 0)
            continue
        statement = text[start : token.start()]
        if not inside and depth == 1 and _OPENS.fullmatch(statement):
            kind, inside = Kind.OPENS, True
        elif inside and depth == -1 and statement.lstrip().startswith("}"):
            kind, inside = Kind.CLOSES, False
        elif depth > 0 or statement.rstrip().endswith((",", "=")):
            continue
        else:
            kind = Kind.INSIDE if inside else Kind.OUTSIDE
        start, depth = token.end(), 0
        if statement.strip():
            yield kind, statement
    if text[start:].strip() or inside:
        yield Kind.CUT_OFF, text[start:]


def closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`; -1 without it."""
    depth = 0
    for token in _ROUND.finditer(text, start):
        depth += _STEPS.get(token[0], 0)
        if depth == 0:
            return token.start()
    return -1


def without_comments(text: str) -> str:
    return _COMMENT.sub("", text) if "/*" in text else text

"""Figures that pages quote from benchmarks/, and what the code says that it assumes of others.

A page quotes a figure between two comments; what stands between them is written by `quoted`, for scripts/reference.py:

    a restart takes <!-- result: starts/runs/0/job/launcher/training again/seconds/median .1f -->4.9<!-- --> s

After `result:` stand the keys that lead to the figure, and after the last space how Python formats it. A table of a
page under benchmarks/, here the second below a heading, is quoted in the same way:

    <!-- table: benchmarks/RESULTS.md#on-a-card 2 -->
    …
    <!-- -->

An assumption stands in the code, above what leans on it:

    # Leans on Keras: a layer reads `dtype_policy` at every call. Noticed by tests/step/test_layer_policies.py. Then:
    # set it before the layer is built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
QUOTING = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_QUOTE = re.compile(r"<!-- result: ([^>]+/[^>]+) ([^\s>]+) -->.*?<!-- -->")
_TABLE = re.compile(r"<!-- table: (benchmarks/[\w/.]+)#([\w-]+) (\d+) -->.*?<!-- -->", re.DOTALL)
_MARKER = "# Leans on "
_ASSUMPTION = re.compile(r"([\w ,-]+): (.*?)\.? Noticed by (.*?)\. Then: (.*)", re.DOTALL)
_TEST = re.compile(r"tests/[\w/]+\.py")


class Assumption(NamedTuple):
    """Something that nobody promised.

    Attributes:
      place: the file that leans on it.
      on: whose it is.
      what: it is.
      tests: the files that notice when it is no longer so.
      then: what to do.
    """

    place: str
    on: str
    what: str
    tests: tuple[str, ...]
    then: str


class Malformed(Exception):
    """A comment or a quotation that this program does not understand."""


def quoted(page: str) -> str:
    """The page with its figures as they are in results.json, and its tables as they are in their pages."""
    figures = json.loads((ROOT / "benchmarks/results.json").read_text("utf-8"))

    def current(found: re.Match[str]) -> str:
        value = figures
        for key in found[1].split("/"):
            try:
                value = value[int(key) if isinstance(value, list) else key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise Malformed(f"{found[1]}: benchmarks/results.json has no {key!r} there") from None
        return f"<!-- result: {found[1]} {found[2]} -->{value:{found[2]}}<!-- -->"

    return _TABLE.sub(_current_table, _QUOTE.sub(current, page))


def _current_table(found: re.Match[str]) -> str:
    number = int(found[3])
    for section in re.split(r"^#+ ", (ROOT / found[1]).read_text("utf-8"), flags=re.MULTILINE)[1:]:
        heading = re.sub(r"[^\w\- ]", "", section.partition("\n")[0].lower()).replace(" ", "-")
        tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
        if heading == found[2] and len(tables) >= number:
            # Links of that page lead from its own folder.
            table = re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", tables[number - 1])
            return f"<!-- table: {found[1]}#{found[2]} {number} -->\n\n{table}\n<!-- -->"
    raise Malformed(f"{found[1]} has no table {number} under #{found[2]}")


def found_assumptions() -> Iterator[Assumption]:
    """Of launcher/ and models/, in the order of files and lines."""
    for path in sorted(path for folder in ("launcher", "models") for path in (ROOT / folder).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        for comment in _comments(path.read_text("utf-8")):
            yield assumption(place, comment)


def assumption(place: str, comment: str) -> Assumption:
    """What a comment in a file says, without its marker."""
    found = _ASSUMPTION.fullmatch(comment)
    if not found or not _TEST.search(found[3]):
        raise Malformed(f"{place}: expected 'Leans on WHOM: WHAT. Noticed by tests/….py. Then: …', not {comment!r}")
    return Assumption(place, found[1], found[2], tuple(_TEST.findall(found[3])), found[4])


def _comments(source: str) -> Iterator[str]:
    """What follows the marker, over all lines of its comment."""
    lines = iter(map(str.strip, source.splitlines()))
    for line in lines:
        while line.startswith(_MARKER):
            text = [line.removeprefix(_MARKER)]
            line = next(lines, "")
            while line.startswith("# ") and not line.startswith(_MARKER):
                text.append(line.removeprefix("# "))
                line = next(lines, "")
            yield " ".join(text)

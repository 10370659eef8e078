"""Paragraphs of LibreOffice's HTML help.

What is known of the format, and used here:

- Paragraphs are `p` and `h1` to `h6` with an id that begins with "par_" or "hd_"; the id is the same in all languages.
- A `span` of class "switchinline" or "switch" holds a `span hidden` for each platform or application, with a class such
  as "MAC" or "WRITER"; one whose id begins with "default" is shown where no other fits. All are hidden until a script
  chooses. Here the default is chosen, and a paragraph that offers none is left out: it would have a hole.
- Code is in `pre`, or in paragraphs and blocks whose class ends with "code" or begins with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser

_BLOCKS = {"p", "h1", "h2", "h3", "h4", "h5", "h6"}
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_SWITCHES = {"switch", "switchinline"}
_CODE = re.compile(r"(code\w*|(bas|py|smath)code)")
_ID = re.compile(r"(par|hd)_")

Attributes = list[tuple[str, str | None]]


def paragraphs(page: str) -> Iterator[tuple[str, str]]:
    """(id, text) of each paragraph that is no code, in the order of the page; white space is made single spaces.

    The text is "" for a paragraph without any, or with a hole.
    """
    reader = _Reader()
    reader.feed(page)
    reader.close()
    yield from reader.found


class _Element:
    """An open element."""

    def __init__(self, tag: str, *, skipped: bool, switch: bool):
        self.tag = tag
        self.skipped = skipped  # neither it nor what is in it counts
        self.switch = switch
        self.chosen = False  # of a switch: one of its choices is the default


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, str]] = []
        self._open: list[_Element] = []
        self._name: str | None = None
        self._depth = 0
        self._text: list[str] = []
        self._hole = False

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        if tag == "br":
            self._text.append(" ")
        if tag in _VOID:
            return
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        name = values.get("id") or ""
        skipped = self._skipping or tag in ("pre", "script", "style") or any(map(_CODE.fullmatch, classes))
        if "hidden" in values:
            if name.startswith("default"):
                self._choose()
            else:
                skipped = True
        self._open.append(_Element(tag, skipped=skipped, switch=not _SWITCHES.isdisjoint(classes)))
        if tag in _BLOCKS and _ID.match(name) and not skipped:
            self._name, self._depth, self._text, self._hole = name, len(self._open), [], False

    def handle_endtag(self, tag: str) -> None:
        if not any(element.tag == tag for element in self._open):
            return
        while self._open:
            element = self._open[-1]
            if self._name is not None and len(self._open) == self._depth:
                text = "" if self._hole else " ".join("".join(self._text).split())
                self.found.append((self._name, text))
                self._name = None
            self._open.pop()
            if element.switch and not element.chosen and not element.skipped:
                self._hole = True
            if element.tag == tag:
                return

    def handle_data(self, data: str) -> None:
        if self._name is not None and not self._skipping:
            self._text.append(data)

    @property
    def _skipping(self) -> bool:
        return bool(self._open) and self._open[-1].skipped

    def _choose(self) -> None:
        for element in reversed(self._open):
            if element.switch:
                element.chosen = True
                return

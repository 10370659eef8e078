"""A report as its readers see it: the words, the data of its charts, and whatever it would fetch."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

_VOID = ("meta", "input", "br", "img")


class Page(HTMLParser):
    """A page, read; fails on tags that do not match.

    Attributes:
      text: as it is in the file.
      words: its text, without scripts and styles.
      data: what its charts show.
      links: what it refers to outside of itself.
    """

    def __init__(self, text: str):
        super().__init__()
        self.text = text
        self.words = ""
        self.data: dict[str, Any] = {}
        self.links: list[str] = []
        self._open: list[str] = []
        self._sections: dict[str, str] = {}
        self._section = ""
        self._in_data = False
        self.feed(text)
        assert self._open == []
        self.links += re.findall(r"https?://[^\s\"'<>)]*", text)

    @classmethod
    def of(cls, model_dir: Path, name: str = "report.html") -> Page:
        return cls((model_dir / name).read_text("utf-8"))

    def section(self, title: str) -> str:
        """The text of a section; "" where there is none."""
        return self._sections.get(re.sub(r"\W+", "-", title.lower()), "")

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        for name in ("src", "href"):
            if name in found and not (found[name] or "").startswith(("#", "data:")):
                self.links.append(found[name] or "")
        if tag == "section":
            self._section = found["id"] or ""
        self._in_data = found.get("id") == "data"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, text: str) -> None:
        if self._in_data:
            self.data = json.loads(text)
            self._in_data = False
        if self._open and self._open[-1] in ("script", "style"):
            return
        said = re.sub(r"\s+", " ", text)
        self.words += said + " "
        if self._section:
            self._sections[self._section] = f"{self._sections.get(self._section, '')}{said} "

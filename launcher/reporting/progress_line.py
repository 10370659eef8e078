"""A progress line: one that moves on a terminal, a plain line a minute anywhere else."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from launcher.reporting.console import Console, is_terminal, live_line, rich_console
from launcher.reporting.units import clock

_QUIET_SECONDS = 60.0


class ProgressLine:
    """What is being done, and for how long.

    Args:
      console: takes plain lines.
      stream: where the console writes; standard output when None.
    """

    def __init__(self, console: Console, stream: TextIO | None = None):
        self._console = console
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = is_terminal(self._stream)
        self._text = ""
        self._next = 0.0
        self._live: Any = None

    def start(self, text: str) -> None:
        """Begins something new."""
        self._text, self._next = text, _QUIET_SECONDS
        if self._is_terminal:
            self._show(text)
        else:
            self._console.note(f"{text} …")

    def tick(self, seconds: float) -> None:
        """Says that it has taken so many seconds."""
        if self._is_terminal:
            self._show(f"{self._text} {clock(seconds)}")
        elif seconds >= self._next:
            self._next += _QUIET_SECONDS
            self._console.note(f"{self._text}: {clock(seconds)}")

    def close(self) -> None:
        """Takes the moving line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, text: str) -> None:
        from rich.text import Text

        if self._live is None:
            self._live = live_line(rich_console(self._stream), transient=True)
        self._live.update(Text(text), refresh=True)

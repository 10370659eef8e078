"""Tables for people: with lines on a terminal, columns of plain text anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from launcher.reporting.console import Console


def show_table(rows: Sequence[Sequence[str]], console: Console, stream: TextIO | None = None) -> None:
    """Prints a table whose first row is its heading.

    Args:
      rows: cells, as many in each.
      console: takes the lines of a plain table.
      stream: where the console writes; standard output when None.
    """
    stream = sys.stdout if stream is None else stream
    if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        _show_rich(rows, stream)
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        console.note("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _show_rich(rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    heading, *body = rows
    table = Table()
    for name in heading:
        table.add_column(name)
    for row in body:
        table.add_row(*(Text(cell) for cell in row))
    RichConsole(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False).print(table)

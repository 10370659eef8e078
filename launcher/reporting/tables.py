"""Tables for people: with lines on a terminal, columns of plain text anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from launcher.reporting.console import Console, columns, is_terminal, rich_console


def show_table(
    rows: Sequence[Sequence[str]],
    console: Console,
    stream: TextIO | None = None,
    *,
    totals: Sequence[str] | None = None,
    style: Callable[[str], str] = lambda cell: "",
) -> None:
    """Prints a table whose first row is its heading.

    Args:
      rows: cells, as many in each.
      console: takes the lines of a plain table.
      stream: where the console writes; standard output when None.
      totals: a last row, which a line sets off.
      style: of a cell on a terminal, in the words of `rich.style.Style`.
    """
    stream = sys.stdout if stream is None else stream
    if not is_terminal(stream):
        for line in columns(rows if totals is None else [*rows, totals]):
            console.note(line)
        return
    from rich.table import Table
    from rich.text import Text

    heading, *body = rows
    table = Table()
    for name in heading:
        table.add_column(name)
    for row in body:
        table.add_row(*(Text(cell, style=style(cell)) for cell in row))
    if totals is not None:
        table.add_section()
        table.add_row(*(Text(cell, style=style(cell)) for cell in totals))
    rich_console(stream).print(table)

"""The console that people see while a run goes: a live line on a terminal and in a notebook, else a line a log event.

Tables, too, have lines on a terminal, and are columns of plain text anywhere else.
"""

import contextlib
import html
import io
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import launcher
from launcher.errors import notebook
from launcher.reporting import panels
from launcher.reporting.strict_json import Record
from launcher.reporting.units import clock

# Between two ticks of a clock on a terminal, and between two moves of the line that follow no log event.
_TICK_SECONDS, _MOVE_SECONDS = 1.0, 0.2
_PATIENCE_SECONDS = 5.0  # Until a log is told that something takes long.
_AGAIN_SECONDS = 30.0  # Until it is told how far that is.
_BAR = 20


class Silence(io.TextIOBase, TextIO):
    """A stream for what nobody wants to see."""

    def write(self, text: str) -> int:
        return len(text)


def make_console(
    *,
    total_steps: int,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    epochs: panels.Epochs | None = None,
) -> "Console":
    """Returns the console that fits the stream, by default standard output: live on a terminal, else plain lines.

    In a notebook's kernel, standard output is that of a cell. Where a run is told by its epochs, plain lines between
    them come where one takes long, or never.
    """
    in_notebook = stream is None and notebook.shell() is not None
    stream = sys.stdout if stream is None else stream
    make = NotebookConsole if in_notebook else LiveConsole if is_terminal(stream) else Console
    if epochs is not None and epochs.verbose > 1:
        make = Console
    return make(stream, panels.ProgressText(total_steps, clock, epochs))


def is_terminal(stream: TextIO) -> bool:
    """Returns whether colours and cursor movements are understood there."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows as lines of plain text, every cell as wide as the widest of its column; rows may end early."""
    widths = [max(map(len, column)) for column in itertools.zip_longest(*rows, fillvalue="")]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def rich_console(stream: TextIO) -> Any:
    """Returns the `rich.console.Console` for a terminal, which shows text as it is."""
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False)


def live_line(console: Any, *, transient: bool = False) -> Any:
    """A started `rich.live.Live` on a `rich_console` that moves only when updated; `transient`: goes when stopped."""
    from rich.live import Live

    line = Live(console=console, auto_refresh=False, transient=transient)
    line.start()
    console.show_cursor(True)  # A killed run must not leave the terminal without its cursor.
    return line


@contextlib.contextmanager
def _ticking(tick: Callable[[float], None], every: float) -> Iterator[None]:
    """Calls `tick` with the seconds since the start, again and again from a thread, while the block is open."""
    started, ended = time.monotonic(), threading.Event()

    def run() -> None:
        while not ended.wait(every):
            tick(time.monotonic() - started)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Console:
    """Shows a run to a person: one line an event, without colours or cursor movements, for logs, pipes and files."""

    def __init__(self, stream: TextIO, progress: panels.ProgressText):
        self._stream = stream
        self._progress = progress
        self._said_at = time.monotonic()

    def plan(self, lines: Mapping[str, str]) -> None:
        self._rows(panels.plan_groups(lines), f"launcher {launcher.__version__}")

    @contextlib.contextmanager
    def waiting(self, text: object) -> Iterator[None]:
        """Says so at the start, now and then, and at the end, where it takes more than a few seconds."""
        seconds = said = 0.0

        def tick(since: float) -> None:
            nonlocal seconds, said
            if not seconds or since - said > _AGAIN_SECONDS:
                said = since
                self._print(f"{text} …{f' {clock(since)}' if since > _AGAIN_SECONDS else ''}")
            seconds = since

        started = time.monotonic()
        with _ticking(tick, _PATIENCE_SECONDS):
            yield
        if seconds:
            self._print(f"{text}: took {clock(time.monotonic() - started)}")

    def progress(self, step: int) -> None:
        pass

    def train(self, event: Record) -> None:
        text, epochs = self._progress.text(event), self._progress.epochs
        is_due = time.monotonic() - self._said_at > _AGAIN_SECONDS
        if epochs is None or (epochs.verbose == 1 and is_due):
            self.note(text)

    def epoch(self, event: Record) -> None:
        self.note(self._progress.text(event), "bold")

    def evaluation(self, event: Record) -> None:
        self._print(panels.evaluation_text(event), "bold")

    def note(self, text: str, style: str = "yellow") -> None:
        self._said_at = time.monotonic()
        self._print(text, style)

    def close(self) -> None:
        pass

    def closing(self, rows: panels.Rows, commands: Mapping[str, str]) -> None:
        self._rows([rows], "done" if rows[0][0] == "completed" else rows[0][0])
        for line in panels.command_lines(commands):
            self._print(line, "" if line.startswith(" ") else "bold")

    def _print(self, text: str, style: str = "") -> None:
        encoding = self._stream.encoding or "utf-8"  # A character the terminal lacks must not end a training.
        line = text.encode(encoding, "replace").decode(encoding)
        _on_stream(self._stream, lambda: print(line, file=self._stream, flush=True))

    def _rows(self, groups: Sequence[panels.Rows], title: str) -> None:
        self._print("\n".join(columns([row for group in groups for row in group])))


class CellLine:
    """One line below a cell of a notebook that is changed in place, so that the saved notebook has its last words."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0
        self._waits: dict[str, str] | None = None

    def show(self, text: str, done: float | None = None) -> None:
        """Shows a text, beside a bar of which a share is `done`; several times a second at most, the last for sure."""
        bar = "" if done is None else f'<progress value="{done:.4f}" style="vertical-align: middle"></progress> '
        self._waits = {"text/plain": text, "text/html": f"{bar}<code>{html.escape(text)}</code>"}
        if time.monotonic() - self._shown_at >= _MOVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Shows what was held back."""
        if self._waits is None:
            return
        if self._handle is None:
            from IPython.display import DisplayHandle  # there in a kernel

            self._handle = DisplayHandle()
            self._handle.display(self._waits, raw=True)
        else:
            self._handle.update(self._waits, raw=True)
        self._shown_at, self._waits = time.monotonic(), None


class NotebookConsole(Console):
    """In the output of a notebook's cell: one progress line, which is changed in place, and plain lines around it."""

    def __init__(self, stream: TextIO, progress: panels.ProgressText):
        super().__init__(stream, progress)
        self._line = CellLine()
        self._event: Record = {}

    @contextlib.contextmanager
    def waiting(self, text: object) -> Iterator[None]:
        """Shows it in the place of the progress line."""
        if not self._event:  # evaluations are too short and too many
            self._line.show(f"{text} …")
        yield

    def progress(self, step: int) -> None:
        self.train({**self._event, "step": step})

    def train(self, event: Record) -> None:
        self._event = event
        self._line.show(self._progress.text(event), int(event["step"]) / self._progress.total_steps)

    def close(self) -> None:
        """Leaves the last progress line, and nothing of a wait that came to no step."""
        if not self._event:
            self._line.show("")
        self._line.flush()


class LiveConsole(Console):
    """One progress line that stays at the bottom of the terminal; notes and evaluations scroll above it.

    The line moves with the steps. A thread of its own moves it only while there is something to wait for.
    """

    def __init__(self, stream: TextIO, progress: panels.ProgressText):
        super().__init__(stream, progress)
        self._console = rich_console(stream)
        self._live: Any = None
        self._event: Record = {}
        self._moved_at = 0.0

    @contextlib.contextmanager
    def waiting(self, text: object) -> Iterator[None]:
        """Shows it, with the time that it takes, in the place of the progress line."""
        from rich.text import Text

        def tick(since: float) -> None:
            _on_stream(self._stream, lambda: line.update(Text(f"{text} {clock(since)}", style="dim"), refresh=True))

        line = self._live or live_line(self._console, transient=True)
        tick(0)
        try:
            with _ticking(tick, _TICK_SECONDS):
                yield
        finally:
            if line is self._live:
                self._draw()
            else:
                _on_stream(self._stream, line.stop)

    def progress(self, step: int) -> None:
        if time.monotonic() - self._moved_at >= _MOVE_SECONDS:
            self.train({**self._event, "step": step})

    def train(self, event: Record) -> None:
        self._event, self._moved_at = event, time.monotonic()
        if self._live is None:
            self._live = live_line(self._console)
        self._draw()

    def _draw(self) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        width = self._console.width
        text = self._progress.text(self._event, width)
        row = Table.grid(padding=(0, 1))
        cells: list[Any] = [Text(text, no_wrap=True, overflow="ellipsis")]
        if len(text) + 1 + _BAR <= width:
            row.add_column(width=_BAR, no_wrap=True)
            done = int(self._event["step"])
            cells.insert(0, ProgressBar(total=self._progress.total_steps, completed=done, width=_BAR))
        row.add_column(no_wrap=True, overflow="ellipsis")
        row.add_row(*cells)
        _on_stream(self._stream, lambda: self._live.update(row, refresh=True))

    def close(self) -> None:
        """Leaves the last progress line on the screen and gives the terminal back."""
        if self._live is not None:
            _on_stream(self._stream, self._live.stop)
            self._live = None

    def _print(self, text: str, style: str = "") -> None:
        from rich.text import Text

        # As one line each, for people to copy.
        _on_stream(self._stream, lambda: self._console.print(Text(text, style=style), soft_wrap=True))

    def _rows(self, groups: Sequence[panels.Rows], title: str) -> None:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in [row for group in groups for row in (*group, ("", ""))][:-1]:
            table.add_row(Text(name, style="bold"), Text(value))
        panel = Panel(table, title=Text(title, style="bold"), title_align="left", expand=False)
        _on_stream(self._stream, lambda: self._console.print(panel))


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
      rows: cells; what is missing at a row's end is empty.
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


def _on_stream(stream: TextIO, write: Callable[[], object]) -> None:
    """Writes; when the reader is gone (`| head`, a closed terminal), training goes on and the words go nowhere."""
    try:
        write()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

"""The console that people see while a run goes: a live line on a terminal, one plain line a log event anywhere else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from launcher.reporting import strict_json
from launcher.reporting.metrics_file import LAST_FIELDS

_NOT_THE_TASKS = ("step", "loss", *LAST_FIELDS)


class Console(Protocol):
    """Shows a run to a person."""

    def plan(self, lines: Mapping[str, str]) -> None: ...
    def train(self, event: Mapping[str, Any]) -> None: ...
    def evaluation(self, event: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_console(
    *,
    total_steps: int,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Console:
    """Returns the console that fits the stream: live on a terminal, plain lines otherwise.

    Args:
        total_steps: The training's last step.
        stream: Where to write; standard output when None.
        clock: A monotonic clock in seconds, for the time to go.
    """
    stream = sys.stdout if stream is None else stream
    if is_terminal(stream):
        return LiveConsole(stream, ProgressText(total_steps, clock))
    return PlainConsole(stream, ProgressText(total_steps, clock))


def is_terminal(stream: TextIO) -> bool:
    """Returns whether colours and cursor movements are understood there."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns rows of as many cells each as lines of plain text, every cell as wide as the widest of its column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def rich_console(stream: TextIO) -> Any:
    """Returns the `rich.console.Console` for a terminal, which shows text as it is."""
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, force_terminal=True, markup=False, highlight=False, emoji=False)


def live_line(console: Any, *, transient: bool = False) -> Any:
    """Returns a started `rich.live.Live` on a rich console, whose line moves only when it is updated.

    Args:
        console: As `rich_console`.
        transient: Whether the line goes away when it is stopped.
    """
    from rich.live import Live

    line = Live(console=console, auto_refresh=False, transient=transient)
    line.start()
    console.show_cursor(True)  # A killed run must not leave the terminal without its cursor.
    return line


class ProgressText:
    """Words a training event: step, loss, the task's metrics, speed, loss scale when it is not 1, time to go.

    Args:
        total_steps: The training's last step.
        clock: A monotonic clock in seconds.
    """

    def __init__(self, total_steps: int, clock: Callable[[], float]):
        self.total_steps = total_steps
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def text(self, event: Mapping[str, Any]) -> str:
        step = int(event["step"])
        parts = [f"step {step}/{self.total_steps}", *_measurements(event)]
        if "examples_per_second" in event:
            parts.append(f"{strict_json.number(event['examples_per_second']):,.0f} examples/s")
        if strict_json.number(event.get("loss_scale", 1)) != 1:
            parts.append(f"loss scale {strict_json.number(event['loss_scale']):g}")
        return "  ".join([*parts, *self._time_to_go(step)])

    def _time_to_go(self, step: int) -> list[str]:
        """The pace since the first event, so without the compilation before it, and with evaluations and saves."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        first_step, since = self._first
        if not first_step < step < self.total_steps:
            return []
        seconds = round((now - since) / (step - first_step) * (self.total_steps - step))
        hours, minutes = divmod(seconds // 60, 60)
        return [f"ETA {hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"ETA {minutes}:{seconds % 60:02d}"]


class PlainConsole:
    """One line an event, without colours or cursor movements: for logs, pipes and files."""

    def __init__(self, stream: TextIO, progress: ProgressText):
        self._stream = stream
        self._progress = progress

    def plan(self, lines: Mapping[str, str]) -> None:
        for line in columns(list(lines.items())):
            _print(self._stream, line)

    def train(self, event: Mapping[str, Any]) -> None:
        _print(self._stream, self._progress.text(event))

    def evaluation(self, event: Mapping[str, Any]) -> None:
        _print(self._stream, evaluation_text(event))

    def note(self, text: str) -> None:
        _print(self._stream, text)

    def close(self) -> None:
        pass


class LiveConsole:
    """One progress line that stays at the bottom of the terminal; notes and evaluations scroll above it.

    The line moves with the log events and has no thread of its own.
    """

    def __init__(self, stream: TextIO, progress: ProgressText):
        self._stream = stream
        self._console = rich_console(stream)
        self._progress = progress
        self._live: Any = None

    def plan(self, lines: Mapping[str, str]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        for name, value in lines.items():
            table.add_row(Text(name, style="bold"), Text(value))
        _on_stream(self._stream, lambda: self._console.print(table))

    def train(self, event: Mapping[str, Any]) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        row.add_column(width=20, no_wrap=True)
        row.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=self._progress.total_steps, completed=int(event["step"]), width=20)
        row.add_row(bar, Text(self._progress.text(event)))
        _on_stream(self._stream, lambda: self._show(row))

    def evaluation(self, event: Mapping[str, Any]) -> None:
        from rich.text import Text

        _on_stream(self._stream, lambda: self._console.print(Text(evaluation_text(event), style="bold")))

    def note(self, text: str) -> None:
        from rich.text import Text

        _on_stream(self._stream, lambda: self._console.print(Text(text, style="yellow")))

    def close(self) -> None:
        """Leaves the last progress line on the screen and gives the terminal back."""
        if self._live is not None:
            _on_stream(self._stream, self._live.stop)
            self._live = None

    def _show(self, row: Any) -> None:
        if self._live is None:
            self._live = live_line(self._console)
        self._live.update(row, refresh=True)


def evaluation_text(event: Mapping[str, Any]) -> str:
    """Words an evaluation: step, loss, the task's metrics."""
    return "  ".join([f"evaluation at step {int(event['step'])}", *_measurements(event)])


def _measurements(event: Mapping[str, Any]) -> list[str]:
    names = [name for name in ("loss", *event) if name in event]
    shown = dict.fromkeys(name for name in names if name == "loss" or name not in _NOT_THE_TASKS)
    return [f"{name} {strict_json.number(event[name]):.4g}" for name in shown]


def _print(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"  # A character the terminal lacks must not end a training.
    line = text.encode(encoding, "replace").decode(encoding)

    def write() -> None:
        stream.write(f"{line}\n")
        stream.flush()

    _on_stream(stream, write)


def _on_stream(stream: TextIO, write: Callable[[], object]) -> None:
    """Writes; when the reader is gone (`| head`, a closed terminal), training goes on and the words go nowhere."""
    try:
        write()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

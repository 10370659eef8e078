"""What workers print, to two places: the supervisor's own output, with a prefix, and a log of each worker's own."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
from pathlib import Path
from typing import Protocol

_KEPT_LINES = 5000
_LONGEST_LINE = 65536


class Console:
    """The supervisor's standard output and error. A reader that goes away ends the output, not the job."""

    def __init__(self) -> None:
        self._open = True

    def write(self, prefix: str, line: bytes) -> None:
        """One line of a worker's output."""
        self._write(1, prefix.encode() + line + b"\n")

    def note(self, text: str) -> None:
        """A line of the supervisor's own."""
        for line in text.splitlines():
            self._write(1, f"[launcher] {line}\n".encode())

    def error(self, text: str) -> None:
        """What a person is to read last."""
        self._write(2, f"{text}\n".encode())

    def _write(self, descriptor: int, content: bytes) -> None:
        if not self._open and descriptor == 1:
            return
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            if descriptor == 1:
                self._open = False


class Log(Protocol):
    """Where every byte of a worker's output goes."""

    def write(self, content: bytes) -> None:
        """Takes what the worker has printed next; never fails."""

    def close(self) -> None:
        """Takes no more."""


class LogFile:
    """A log in a file, made with its folders at the first output.

    Args:
      path: the file.
      console: where it says that the disk refuses more.
    """

    def __init__(self, path: Path, console: Console):
        self._path = path
        self._console = console
        self._descriptor: int | None = None
        self._open = True

    def write(self, content: bytes) -> None:
        """Appends to the file."""
        if not self._open:
            return
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError as error:
            # A full disk: the worker must not notice, and its last words still reach the console.
            self._open = False
            self._console.note(f"no more is logged to {self._path}: {error.strerror or error}")

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._open = False


class Tee:
    """One worker's output: whole lines to the console, every byte to its log, the last lines in memory.

    Args:
      console: where lines go; None for nowhere.
      prefix: what each line starts with there.
      log: where every byte goes.
    """

    def __init__(self, console: Console | None, prefix: str, log: Log):
        self._console = console
        self._prefix = prefix
        self._log = log
        self._partial = b""
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.num_lines = 0

    def feed(self, content: bytes) -> None:
        """Takes what the worker has printed next."""
        self._log.write(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST_LINE:
            self._flush_partial()

    def tail(self, count: int) -> list[str]:
        """The last lines, at most `count`."""
        return list(self._lines)[-count:] if count else []

    def since(self, num_lines: int) -> list[str]:
        """The lines after the first `num_lines`, as far as they are remembered."""
        return self.tail(self.num_lines - num_lines)

    def close(self) -> None:
        """Passes on a last line that did not end, and closes the log."""
        self._flush_partial()
        self._log.close()

    def _flush_partial(self) -> None:
        if self._partial:
            self._line(self._partial)
            self._partial = b""

    def _line(self, line: bytes) -> None:
        if self._console is not None:
            self._console.write(self._prefix, line)
        self._lines.append(line.decode(errors="replace").rstrip("\r"))
        self.num_lines += 1


def flush_standard_streams() -> None:
    """Puts what `print` has buffered in front of what a `Console` will write."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()

"""Workers' output, to two places: the supervisor's own output, with a prefix, and a log of each worker's own.

Nothing here waits for a disk, a terminal or the reader of a pipe: processes write (`launcher.jobs.writer`), and what
they do not take is kept up to a limit, then dropped, counted and said.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher.jobs import protocol
from launcher.machine import child_process

_KEPT_LINES = 5000
_LONGEST_LINE = 65536
_LARGEST_BACKLOG_BYTES = 4 << 20
_MOVING_SECONDS = 1.0  # a reader that has taken nothing for so long is not slow but away
# What writers have at the end to take the rest: in all, and without taking anything.
_FAREWELL_SECONDS = 30.0
_PATIENCE_SECONDS = 5.0
_TURN_SECONDS = 0.01
_STDOUT, _STDERR, _FILES = 1, 2, None
_GAP = b"\n[launcher] %d bytes are missing here, because nobody took them in time\n"


class Writer:
    """A process that writes for this one: to the descriptor `stream`, or to files if it is None.

    What it does not take in time is counted, where it would have stood; `note` is told of a file that refuses more.

    Attributes:
      missing_bytes: what there was no room for since there last was, by the path of a file.
      lost_bytes: what there was no room for, and at the end what had not been taken.
    """

    def __init__(self, stream: int | None, note: Callable[[str], None]):
        self.missing_bytes: collections.Counter[bytes] = collections.Counter()
        self.lost_bytes = 0
        self._note = note
        self._is_full = False
        self._moved_at = time.monotonic()
        self._process = child_process.start(
            child_process.helper("launcher.jobs.writer"),
            stdout=subprocess.PIPE if stream is None else stream,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        self._outgoing = protocol.LineWriter(self._process.stdin.fileno())
        self._reports = protocol.LineReader(self._process.stdout.fileno()) if self._process.stdout else None

    @property
    def is_behind(self) -> bool:
        """Whether it has a lot to write and gets on with it."""
        is_moving = time.monotonic() - self._moved_at < _MOVING_SECONDS
        return is_moving and self._outgoing.backlog_bytes > _LARGEST_BACKLOG_BYTES // 2

    def send(self, content: bytes, path: bytes = b"") -> bool:
        """Has it write `content`, or close the file if there is none; False when there is no room, for some time."""
        backlog = self._outgoing.backlog_bytes
        self._is_full = backlog > _LARGEST_BACKLOG_BYTES // (2 if self._is_full else 1)
        if self._is_full:
            self.lost_bytes += len(content)
            self.missing_bytes[path] += len(content)
            return False
        missing = self.missing_bytes.pop(path, 0)
        for part in (_GAP % missing, content) if missing else (content,):
            self._outgoing.write(b"%d %d\n%b%b" % (len(path), len(part), path, part))
        return True

    def turn(self) -> None:
        """Passes on what is waiting, as far as it is taken."""
        before = self._outgoing.backlog_bytes
        self._outgoing.flush()
        if self._outgoing.backlog_bytes < before or not before:
            self._moved_at = time.monotonic()
        self._tell_refusals()

    def drain(self) -> None:
        """Waits until all is on its way, for as long as it gets on, within a limit."""
        deadline, self._moved_at = time.monotonic() + _FAREWELL_SECONDS, time.monotonic()
        while self._outgoing.backlog_bytes:
            self.turn()
            if time.monotonic() > min(deadline, self._moved_at + _PATIENCE_SECONDS):
                return
            time.sleep(_TURN_SECONDS)

    def close(self) -> bool:
        """Lets it write what it has, and ends it; whether all was taken."""
        assert self._process.stdin is not None
        self.drain()
        self.lost_bytes += self._outgoing.backlog_bytes
        self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and not waited for: what waits for a disk is beyond killing
        self._tell_refusals()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return not self.lost_bytes and self._process.returncode is not None

    def _tell_refusals(self) -> None:
        for line in self._reports.receive() if self._reports else ():
            path, _, why = line.partition(b"\0")
            # A full disk: the worker must not notice, and its last words still reach the console.
            self._note(f"no more is logged to {os.fsdecode(path)}: {why.decode(errors='replace')}")


class JobConsole:
    """The output of a supervisor: its standard output and error, and logs.

    A reader that goes away ends the output, not the job; one that does not read loses what there is no room for.
    """

    def __init__(self) -> None:
        self._writers: dict[int | None, Writer] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._writers)

    @property
    def is_behind(self) -> bool:
        """Whether more is better not read now, because there is a lot to write that is being taken."""
        return any(writer.is_behind for writer in self._writers.values())

    def write(self, prefix: str, line: bytes) -> None:
        self._say(prefix.encode() + line + b"\n")

    def note(self, text: str) -> None:
        """A line of the supervisor's own."""
        for line in text.splitlines():
            self._say(f"[launcher] {line}\n".encode())

    def error(self, text: str) -> None:
        """Lines that a person is to read last."""
        if _STDOUT in self._writers:
            self._writers[_STDOUT].drain()
        content = f"{text}\n".encode()
        try:
            self._writer(_STDERR).send(content)
        except OSError:  # the interpreter is gone, perhaps, and that is what there is to say
            with contextlib.suppress(OSError):
                os.write(_STDERR, content)

    def log(self, path: Path, content: bytes) -> None:
        """Appends to a log, made with its folders at the first output, or closes it if there is no content.

        Says when the disk takes no more for now; what it does not take in time is counted there.
        """
        if not content and _FILES not in self._writers:
            return
        files, name = self._writer(_FILES), os.fsencode(path)
        is_said = name in files.missing_bytes
        if not files.send(content, name) and not is_said:
            self.note(f"the disk takes no more of {path} for now; what does not fit is left out")

    def tee(self, rank: int, log: Path, *, is_quiet: bool = False) -> Tee:
        """The output of a worker, to its log and, unless it is quiet, to the console."""
        return Tee(None if is_quiet else self, f"[worker {rank}] ", functools.partial(self.log, log))

    def turn(self) -> None:
        """Passes on what is waiting, as far as it is taken; to be called again and again."""
        for writer in list(self._writers.values()):
            writer.turn()

    def finish_logs(self) -> None:
        """Waits until the logs are written, within a limit, and says what is missing."""
        files = self._writers.pop(_FILES, None)
        if files is None:
            return
        if not files.close():
            self.note(f"the logs are not complete: the disk did not take {_amount(files)}")

    def close(self) -> None:
        """Waits for all that is to be written, within a limit, and says what is missing."""
        self.finish_logs()
        out = self._writers.pop(_STDOUT, None)
        if out is not None and not out.close():
            self.error(f"[launcher] nobody read {_amount(out)} of the output; the logs have what workers print")
        if _STDERR in self._writers:
            self._writers.pop(_STDERR).close()

    def _say(self, content: bytes) -> None:
        self._writer(_STDOUT).send(content)

    def _writer(self, stream: int | None) -> Writer:
        if stream not in self._writers:
            self._writers[stream] = Writer(stream, self.note)
        return self._writers[stream]


def _amount(writer: Writer) -> str:
    return f"{writer.lost_bytes:,} bytes or more" if writer.lost_bytes else "the last of it"


class Tee:
    """One worker's output: lines to the console, if any, with a prefix; all bytes to its log; last lines in memory.

    `log` takes what the worker has printed next, and no bytes at the end.
    """

    def __init__(self, console: JobConsole | None, prefix: str, log: Callable[[bytes], None]):
        self._console = console
        self._prefix = prefix
        self._log = log
        self._partial = b""
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.num_lines = 0

    def feed(self, content: bytes) -> None:
        """Takes what the worker has printed next."""
        self._log(content)
        *lines, self._partial = (self._partial + content).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._partial) > _LONGEST_LINE:
            self._flush_partial()

    def tail(self, count: int) -> list[str]:
        return list(self._lines)[-count:] if count else []

    def since(self, num_lines: int) -> list[str]:
        """The lines after the first `num_lines`, as far as they are remembered."""
        return self.tail(self.num_lines - num_lines)

    def close(self) -> None:
        """Passes on a last line that did not end, and closes the log."""
        self._flush_partial()
        self._log(b"")

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
    """Puts what `print` has buffered in front of what a `JobConsole` will write."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()

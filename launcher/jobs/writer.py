"""The writer: a process that writes what it is sent, so that the supervisor never waits for a disk or a reader.

A process and not a thread: what waits for a dead disk cannot be killed, and a process with such a thread cannot end.

Its standard input takes messages: a line with two numbers, the bytes of a path and of the content, then both. Without a
path the content goes to its standard output. No content closes the file. What a file refuses is answered once, by a
line with the path and the reason, and no more is written to it. A file that has grown large becomes PATH.1, in the
place of an earlier one.

A `child_process.helper`, so that it starts in milliseconds.
"""

import contextlib
import os
import select
import signal
import sys

from launcher.machine import child_process

_LAST_SECONDS = 2
_LARGEST_FILE_BYTES = 256 << 20


def write_all(descriptor: int, content: bytes) -> None:
    """Writes all of it, also where the descriptor does not wait."""
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def main() -> None:
    """Writes until the input ends."""
    # What a terminal or a scheduler sends to all is for the supervisor, whose last words are to be written.
    child_process.ignore_signals()
    # Killed, it cannot end its writers: a little time for what it had said, also to one that waits for a reader.
    signal.signal(signal.SIGUSR1, lambda *_: signal.alarm(_LAST_SECONDS))
    child_process.signal_at_parents_end(signal.SIGUSR1)
    with contextlib.suppress(OSError):  # the reader of the standard output has gone
        _write_what_comes()


def _write_what_comes() -> None:
    files: dict[bytes, int | None] = {}  # None: it refuses
    source = sys.stdin.buffer
    while header := source.readline():
        path_bytes, size = map(int, header.split())
        path, content = source.read(path_bytes), source.read(size)
        if not path:
            write_all(1, content)
        elif content:
            _append(files, path, content)
        elif (descriptor := files.pop(path, None)) is not None:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _append(files: dict[bytes, int | None], path: bytes, content: bytes) -> None:
    try:
        descriptor = files.get(path)
        if descriptor is not None and os.fstat(descriptor).st_size > _LARGEST_FILE_BYTES:
            os.close(descriptor)
            del files[path]
            os.rename(path, path + b".1")
        if path not in files:
            os.makedirs(os.path.dirname(path) or b".", exist_ok=True)
            files[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if (descriptor := files[path]) is not None:
            write_all(descriptor, content)
    except OSError as error:
        files[path] = None
        write_all(1, b"%s\0%s\n" % (path, (error.strerror or str(error)).encode()))

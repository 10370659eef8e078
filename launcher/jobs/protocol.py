"""The protocol between the head of a job and its agents on other hosts: one JSON object a line, over any pipe.

Head to agent, by "do": hello, start, signal, clear, ping, close. Agent to head, by "is": hello, refused, output, state,
not_started, cleared, alive. `launcher.jobs.agent` and `launcher.jobs.remote_host` say what is in them. Times travel as
ages in seconds, because the clocks of two hosts differ.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

VERSION = 2

# A sign of life goes each way every second. Without one, either end takes the other for gone; the agent a little later,
# so that workers do not end because of a head that is about to be heard again.
BEAT_SECONDS = 1.0
HEAD_PATIENCE_SECONDS = 8.0
AGENT_PATIENCE_SECONDS = 10.0

_CHUNK_BYTES = 65536


def decode(line: bytes) -> dict[str, Any] | None:
    """The message on a line; None where there is none."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and ("do" in message or "is" in message) else None


def to_text(content: bytes) -> str:
    """Bytes of any kind as text that `to_bytes` turns back, also when a character is cut in two."""
    return content.decode("utf-8", "surrogateescape")


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class LineReader:
    """Reads lines from a descriptor without ever waiting."""

    def __init__(self, source: int):
        self._source = source
        self._partial = b""
        self.is_closed = False
        os.set_blocking(source, False)

    def receive(self) -> list[bytes]:
        """The lines that have come since the last call; `is_closed` after the last there will be."""
        lines: list[bytes] = []
        try:
            while not self.is_closed:
                content = os.read(self._source, _CHUNK_BYTES)
                self.is_closed = not content
                *whole, self._partial = (self._partial + content).split(b"\n")
                lines += whole
                if len(content) < _CHUNK_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        return lines


class LineWriter:
    """Writes messages to a descriptor without ever waiting."""

    def __init__(self, target: int):
        self._target = target
        self._outgoing = bytearray()
        os.set_blocking(target, False)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that could not be written yet."""
        return len(self._outgoing)

    def send(self, message: Mapping[str, Any]) -> None:
        """Writes a message, as far as it can be written now."""
        self.write(json.dumps(message).encode() + b"\n")

    def write(self, content: bytes) -> None:
        """Writes any bytes, as far as they can be written now."""
        self._outgoing += content
        self.flush()

    def flush(self) -> None:
        """Writes what could not be written before."""
        try:
            while self._outgoing:
                del self._outgoing[: os.write(self._target, self._outgoing[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            # The other end has gone. What it had said before can still be read, and ends with the end of the file.
            self._outgoing.clear()

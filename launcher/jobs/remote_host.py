"""A host of a job: the process of this host that connects it with its agent, and what the agent said by it."""

import collections
import contextlib
import dataclasses
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import launcher
from launcher.errors import UsageError
from launcher.jobs import protocol
from launcher.jobs.transports import Host, Refusal, last_words
from launcher.machine import child_process

_KEPT_LINES = 50
_LONGEST_LINE = 500
_EXIT_SECONDS = 1.0


class RemoteHost:
    """One host over the life of a job: connected, lost and connected again.

    Attributes:
      host: as the person named it, the `number`th of all.
      first_rank: of its workers, when all hosts are there.
      place: the host with the name and the address that the agent has for it, if it has.
      facts: what the agent said of itself; None before it did.
      ports: on it, one for each of its workers, that were free when the agent said hello or had ended others.
      lost: why nothing more comes, such as "the connection to a ended (…)"; "" while something may.
      exit_code: of the process that connected it, once `lost`.
      stderr: its last lines, and those on its standard output that are no messages.
      is_tried: whether a connection was begun, and its end is still to be seen.
      refusal: why the one before it came to nothing; another is not begun before `retry_at`.
      failures: in a row, of the job, that were of its workers.
      marks: of its agents so far, each unlike any other's.
    """

    def __init__(self, number: int, host: Host, first_rank: int):
        self.number = number
        self.host = self.place = host
        self.first_rank = first_rank
        self.facts: dict[str, Any] | None = None
        self.ports: list[int] = []
        self.lost = "not connected yet"
        self.exit_code: int | None = None
        self.stderr: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self.is_tried = self.is_left_out = False
        self.refusal: Refusal | None = None
        self.retry_at = 0.0
        self.failures = 0
        self.marks: list[str] = []

    def connect(self, argv: Sequence[str], hello: Mapping[str, Any]) -> None:
        """Starts the process that runs the agent there, with its streams here; `hello` is what it is told first."""
        try:
            self._process = child_process.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise UsageError(f"{argv[0]} cannot be started: {error.strerror or error}; is it installed?") from None
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._errors = protocol.LineReader(self._process.stderr.fileno())
        self._incoming = protocol.LineReader(self._process.stdout.fileno())
        self._outgoing = protocol.LineWriter(self._process.stdin.fileno())
        self._heard_at = 0.0
        self.place, self.facts, self.lost, self.exit_code = self.host, None, "", None
        self.stderr.clear()
        self.is_tried = True
        self.send({"do": "hello", **hello})

    @property
    def is_ready(self) -> bool:
        return self.facts is not None and not self.lost and not self.mistake

    @property
    def mistake(self) -> str:
        """Why this agent will never serve, though it answers; "" where nothing is wrong."""
        facts = self.facts
        if facts is None:
            return ""
        if facts["is"] == "refused":
            return f"{self.place.name}: {facts['message']}"
        if (facts["protocol"], facts["launcher"]) != (protocol.VERSION, launcher.__version__):
            return f"{self.place.name} has launcher {facts['launcher']}; install {launcher.__version__}, as here"
        return ""

    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that there may be something to read from."""
        if self.lost:
            return ()
        assert self._process.stdout and self._process.stderr
        return self._process.stdout.fileno(), self._process.stderr.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Tells the agent something, if it is still there."""
        if not self.lost:
            self._outgoing.send(message)

    def receive(self, patience_seconds: float = protocol.HEAD_PATIENCE_SECONDS) -> list[dict[str, Any]]:
        """The messages that have come; finds out whether the agent is gone.

        Once it has said hello, it may say nothing for `patience_seconds`.
        """
        if self.lost:
            return []
        now = time.monotonic()
        self._note_errors()
        messages = []
        for line in self._incoming.receive():
            message = protocol.decode(line)
            if message is not None and "is" in message:  # else a terminal has sent our own back
                self._heard_at = now
                messages.append(message)
            elif self.facts is None:
                self._note(line)  # of a login shell that greets everybody
            else:
                self.drop(f"{self.place.name} sent {line[:80]!r}, which no agent says")
        for message in messages:
            if message["is"] in ("hello", "refused"):
                self.facts = message
                self.place = dataclasses.replace(self.place, **message.get("place", {}))
            self.ports = message.get("ports", self.ports)
        if self._incoming.is_closed and not self.lost:
            self._end_process()
            said = last_words(self.stderr) if any(self.stderr) else f"exit code {self.exit_code}"
            self.drop(f"the connection to {self.place.name} ended ({said})")
        elif self.is_ready and now - self._heard_at > patience_seconds:
            self.drop(f"nothing was heard from {self.place.name} for {patience_seconds:g} s")
        elif not self.lost:
            self._outgoing.flush()
        return messages

    def drop(self, why: str) -> None:
        """Gives the agent up, unless it is lost; it ends its workers when it notices."""
        if self.lost:
            return
        self.lost = why
        if self.exit_code is None:
            self._kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def give_up(self, why: str) -> None:
        """Drops the connection, if there is one, for good: nobody is to ask what has become of it."""
        self.drop(why)
        self.is_tried = False

    def close(self, seconds: float) -> None:
        """Waits until an agent that was told to end has done so, for `seconds` at most."""
        deadline = time.monotonic() + seconds
        while self.is_ready and time.monotonic() < deadline:
            self.receive()
            time.sleep(0.01)
        self.drop("closed")

    def _note_errors(self) -> None:
        for line in self._errors.receive():
            self._note(line)

    def _note(self, line: bytes) -> None:
        self.stderr.append(line.decode(errors="replace").rstrip()[:_LONGEST_LINE])

    def _end_process(self) -> None:
        """Reaps the process, whose output has ended."""
        try:
            self.exit_code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        self._note_errors()

    def _kill(self) -> None:
        child_process.kill_group(self._process.pid)
        self.exit_code = self._process.wait()

"""The agent of a job on one host: starts the workers that the head names, and tells it of them.

The head starts `python -m launcher.jobs.agent` over ssh or the like and speaks `launcher.jobs.protocol` with it by
standard input and output. When the input closes, or nothing is heard for ten seconds, the workers end, and the agent.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import launcher
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_RETRY, LauncherError
from launcher.jobs import guard, protocol
from launcher.jobs.job import Command, Job, NotReady, Worker
from launcher.jobs.local import LocalBackend
from launcher.jobs.output import JobConsole, Tee
from launcher.jobs.transports import AGENT, NO_INPUT, PLACE
from launcher.machine.ports import free_ports
from launcher.worker import preemption

_TURN_SECONDS = 0.05
# Workers wait when their output cannot be passed on, as they would for a slow terminal.
_LARGEST_BACKLOG_BYTES = 1 << 20
_FAREWELL_SECONDS = 5.0


class _Over(Exception):
    """The end of an agent: its exit code, and why, where nobody has asked for it."""

    def __init__(self, exit_code: int, why: str = ""):
        super().__init__(why)
        self.exit_code = exit_code


class Agent:
    """One agent, which the head tells what to do; workers inherit `environ` beside what the head passes on."""

    def __init__(self, incoming: protocol.LineReader, outgoing: protocol.LineWriter, environ: Mapping[str, str]):
        self._incoming = incoming
        self._outgoing = outgoing
        self._environ = dict(environ)
        self._mark = ""
        self._backend: LocalBackend | None = None
        self._workers: list[Worker] = []
        self._processors: list[tuple[int, ...]] = []
        self._told: dict[int, dict[str, Any]] = {}
        self._heard_at = time.monotonic()
        self._beat_at = 0.0

    def run(self) -> int:
        """Serves the head until it says that it is over, or falls silent; returns the exit code."""
        try:
            while True:
                self._turn()
        except _Over as over:
            exit_code = over.exit_code
            if str(over):
                with contextlib.suppress(OSError):
                    os.write(2, f"launcher's agent on {socket.gethostname()}: {over}; its workers end\n".encode())
        finally:
            if self._backend is not None:
                self._backend.close()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._outgoing.backlog_bytes and time.monotonic() < deadline:  # the head may still listen
            self._outgoing.flush()
            time.sleep(_TURN_SECONDS)
        return exit_code

    def _turn(self) -> None:
        """Does what the head has said, and passes on what the workers print and how they are."""
        for line in self._incoming.receive():
            self._heard_at = time.monotonic()
            message = protocol.decode(line)
            if message is None or (self._backend is None and message.get("do") not in ("hello", "ping", "close")):
                raise _Over(EXIT_FAILED, f"a line of {len(line)} bytes is not understood")
            self._obey(message)
        if self._incoming.is_closed:
            raise _Over(EXIT_RETRY, NO_INPUT)
        if time.monotonic() - self._heard_at > protocol.AGENT_PATIENCE_SECONDS:
            raise _Over(EXIT_RETRY, f"nothing was heard for {protocol.AGENT_PATIENCE_SECONDS:g} s")
        if self._backend is not None and self._outgoing.backlog_bytes < _LARGEST_BACKLOG_BYTES:
            self._backend.pump(_TURN_SECONDS)
        else:
            time.sleep(_TURN_SECONDS)
        for worker in self._workers:
            self._tell_of(worker)
        self._beat()

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= protocol.BEAT_SECONDS:
            self._beat_at = time.monotonic()
            self._outgoing.send({"is": "alive"})
        self._outgoing.flush()

    def warned(self, number: int, frame: FrameType | None) -> None:
        """Has the workers save and end, by a signal of a scheduler's to every task."""
        os.write(2, f"launcher's agent: {preemption.name(number)}, passed on to its workers\n".encode())
        for worker in self._workers:
            worker.send(signal.SIGTERM)

    def _obey(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "hello":
                self._greet(message)
            case "start":
                self._start(message)
            case "signal":
                for worker in self._workers:
                    if worker.command.rank == message["rank"]:
                        worker.send(message["number"])
            case "clear":
                self._the_backend.clear()
                for worker in self._workers:
                    self._tell_of(worker)
                self._workers, self._told = [], {}
                self._outgoing.send({"is": "cleared", "ports": free_ports(len(self._processors))})
            case "close":
                raise _Over(EXIT_DONE)
            case "ping":
                pass
            case other:
                raise _Over(EXIT_FAILED, f"{other!r} is nothing that it can do")

    def _greet(self, message: Mapping[str, Any]) -> None:
        """Makes ready for workers; what an agent before this one has left on the host ends first."""
        self._environ.update(message["environ"])
        self._mark = message["mark"]
        for mark in message["earlier"]:
            guard.kill_marked(mark, AGENT)
            shutil.rmtree(self._scratch_of(mark), ignore_errors=True)
        slots, scratch = message["slots"], self._scratch_of(self._mark)
        job = Job(identity=self._mark, workers=slots, module="", arguments=(), model_dir="", scratch=scratch)
        try:
            self._backend = LocalBackend(job, JobConsole(), self._environ, self._make_tee, self._beat)
        except LauncherError as error:
            self._outgoing.send({"is": "refused", "message": str(error)})
            raise _Over(error.exit_code) from None
        self._processors = divide_processors(slots, self._environ)
        self._outgoing.send(
            {
                "is": "hello",
                "protocol": protocol.VERSION,
                "launcher": launcher.__version__,
                "place": json.loads(self._environ.get(PLACE, "{}")),
                "ports": free_ports(slots),
            }
        )

    @property
    def _the_backend(self) -> LocalBackend:
        assert self._backend is not None  # nothing but hello is obeyed without
        return self._backend

    def _start(self, message: Mapping[str, Any]) -> None:
        commands = tuple(map(self._command, message["workers"]))
        try:
            self._workers = self._the_backend.start(commands)
        except NotReady as error:
            self._outgoing.send({"is": "not_started", "why": str(error)})

    def _command(self, wanted: Mapping[str, Any]) -> Command:
        environ = {**self._the_backend.gpus_of(wanted["slot"]), **wanted["environ"], guard.JOB: self._mark}
        log = Path(os.devnull)  # the head keeps it
        processors = self._processors[wanted["slot"]]
        argv = tuple(wanted["argv"])
        command = Command(rank=wanted["rank"], argv=argv, environ=environ, log=log, processors=processors)
        return command.reporting_in(self._scratch_of(self._mark))

    def _make_tee(self, command: Command) -> Tee:
        def send(content: bytes) -> None:
            if content:  # the head closes the log
                text = protocol.to_text(content)
                self._outgoing.send({"is": "output", "rank": command.rank, "text": text})

        return Tee(None, "", send)

    def _tell_of(self, worker: Worker) -> None:
        now, report, error = time.monotonic(), worker.report, worker.error
        state = {
            "exit_code": worker.exit_code,
            "frozen": worker.is_frozen,
            "unkillable": worker.trouble.what if worker.trouble else "",
            "report": report and dataclasses.asdict(report),
            "error": error and dataclasses.asdict(error),
        }
        rank = worker.command.rank
        if state == self._told.get(rank):
            return
        self._told[rank] = state
        ages = {name: now - told.monotonic for name, told in (("report", report), ("error", error)) if told}
        ages["alive"] = now - worker.last_alive
        self._outgoing.send({"is": "state", "rank": rank, **state, "ages": ages})

    def _scratch_of(self, mark: str) -> Path:
        return Path(self._environ.get("TMPDIR") or tempfile.gettempdir(), f"launcher-{mark}")


def divide_processors(slots: int, environ: Mapping[str, str]) -> list[tuple[int, ...]]:
    """The processors of every worker, neighbours in cores and sockets; () where a person divides them, or nothing can.

    Each worker starts a thread for every processor that it has: TensorFlow, its input and BLAS count them.
    """
    is_known = hasattr(os, "sched_getaffinity") and "TF_NUM_INTRAOP_THREADS" not in environ
    there = tuple(sorted(os.sched_getaffinity(0), key=_place)) if is_known and slots > 1 else ()
    count = len(there) if len(there) >= slots else 0
    return [there[count * slot // slots : count * (slot + 1) // slots] for slot in range(slots)]


def _place(processor: int) -> tuple[int, int]:
    folder = Path(f"/sys/devices/system/cpu/cpu{processor}/topology")
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, processor


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which workers would inherit."""


def main() -> int:
    """Serves the head on this process's standard input and output."""
    # A signal to a whole host, or to a whole step, reaches the workers as it is; the agent stays to tell of them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _ignore)
    # Nothing but messages may get into the connection.
    source, target = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.write(target, b"\n")  # ends a line that the login shell may have begun
    environ = {name: value for name, value in os.environ.items() if name != guard.JOB}
    agent = Agent(protocol.LineReader(source), protocol.LineWriter(target), environ)
    for number in preemption.notices - {signal.SIGHUP}:
        signal.signal(number, agent.warned)
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())

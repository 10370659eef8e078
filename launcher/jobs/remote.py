"""The remote backend: workers on other hosts, started by an agent on each."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import UsageError
from launcher.jobs import protocol
from launcher.jobs.connection import Connection
from launcher.jobs.job import Command, Job, NotReady, Worker, outcomes
from launcher.jobs.output import JobConsole, Tee
from launcher.jobs.policy import Outcome, Trouble, WorkerState, find_cause
from launcher.jobs.remote_hosts import RemoteHost, RemoteHosts
from launcher.machine.cluster import FULL_WORKERS, tf_config
from launcher.worker.progress import ErrorRecord, Report

_TURN_SECONDS = 0.05
# When workers fail as they do when another is gone, a host that is silent for this long is the likely cause. Shorter
# than the supervisor waits for the failure behind such a symptom.
_SUSPECT_SECONDS = 2.5
_ANSWER_SECONDS = 60.0  # longer than an agent waits for workers that do not die
_CLOSE_SECONDS = 10.0
_LOOK_SECONDS = 5.0  # between attempts to reach the hosts that a running job has no worker on
_MOST_FAILURES = 3


@dataclasses.dataclass(kw_only=True)
class RemoteBackend:
    """Runs workers by agents; a host whose agent is lost is connected again before the next attempt.

    Attributes:
      hidden: what is shown in the place of some of the variables that workers get from this host.
      min_workers: go on with so many, when hosts are not there.
      connect_timeout_seconds: how long to try to reach a host before an attempt.
    """

    job: Job
    console: JobConsole
    remotes: RemoteHosts
    hidden: Mapping[str, str]
    min_workers: int
    connect_timeout_seconds: float
    _seats: list[_Seat] = dataclasses.field(init=False, default_factory=list)
    _workers: dict[int, RemoteWorker] = dataclasses.field(init=False, default_factory=dict)
    _cleared: set[Connection] = dataclasses.field(init=False, default_factory=set)
    _is_first: bool = dataclasses.field(init=False, default=True)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Connects to the hosts that are not connected, and decides which of them take part."""
        if self.remotes.transport.missing:
            raise UsageError(self.remotes.transport.missing)
        refusals = self.remotes.connect(
            self.connect_timeout_seconds, wanted=self.job.workers, is_first=self._is_first, stop=stop
        )
        if stop():
            return
        number = min(self.job.workers, self.remotes.slots_there)
        if number < self.min_workers:
            (remote, refusal), *others = refusals.items()
            also = ", ".join(other.host.name for other, _ in others)
            message = refusal.message + (f" (the same goes for {also})" if also else "")
            advice = "bring it up, name other hosts, or allow for fewer by --min_workers"
            raise NotReady(f"{message}; {advice}", remote.first_rank)
        self._is_first = False
        for refusal in refusals.values():
            self.console.note(f"going on without a host: {refusal.message}")
        if number < self.job.workers:
            self.console.note(f"{number} of {self.job.workers} workers, with the same global batch")
        self._seats = _seats(self.remotes.there)[:number]

    def commands(self, attempt: int) -> tuple[Command, ...]:
        """The commands of an attempt on the hosts that `prepare` has found."""
        return self._commands(attempt, self._seats)

    def plan(self, attempt: int) -> str:
        """The commands that start the agents from here, and those that these would run."""
        lines = ["# To this the agent adds where to report, and a worker's share of the host's GPUs and processors.\n"]
        seats = _seats(self.remotes.all)[: self.job.workers]
        if self.remotes.transport.missing:
            lines.append(f"# note: {self.remotes.transport.missing}\n")
        for remote in self.remotes.all:
            agent = self.remotes.agent.words(f"{self.job.identity}-{remote.number}-0")
            argv = self.remotes.transport.argv(remote.host, agent)
            lines.append(f"# agent on {remote.host.name}, {remote.host.slots} worker(s)\n{shlex.join(argv)}\n")
        for command, seat in zip(self._commands(attempt, seats), seats, strict=True):
            shown = command.given(self.hidden)
            lines.append(f"# worker {command.rank} on {seat.remote.host.name}, log: {command.log}\n{shown}\n")
        return "".join(lines)

    def start(self, commands: tuple[Command, ...]) -> list[Worker]:
        self._workers = {}
        orders: dict[Connection, list[dict[str, Any]]] = {}
        for command, seat in zip(commands, self._seats, strict=True):
            connection = seat.remote.agent
            tee = self.console.tee(command.rank, command.log, is_quiet=command.is_quiet)
            self._workers[command.rank] = RemoteWorker(command, tee, connection)
            told = {"rank": command.rank, "slot": seat.slot, "argv": command.argv, "environ": command.environ}
            orders.setdefault(connection, []).append(told)
        for connection, workers in orders.items():
            connection.send({"do": "start", "workers": workers})
        return list(self._workers.values())

    def pump(self, timeout_seconds: float) -> None:
        if self.console.is_behind:
            time.sleep(timeout_seconds)
            return
        self.remotes.wait(timeout_seconds)
        cause = find_cause(outcomes(self._workers.values()))
        patience = _SUSPECT_SECONDS if cause and cause.state is WorkerState.VICTIM else protocol.HEAD_PATIENCE_SECONDS
        if len(self._seats) < self.job.workers:
            self.remotes.look_for_missing(_LOOK_SECONDS)
        for remote in self.remotes.all:
            if remote.connection is None:
                continue
            for message in remote.connection.receive(patience):
                self._take(remote.connection, message)

    def can_grow(self) -> bool:
        return len(self._seats) < min(self.job.workers, self.remotes.slots_there)

    def leave_out(self, rank: int, why: str) -> str:
        host = self._seats[rank].remote
        if self.remotes.slots_there - host.host.slots * host.is_ready < self.min_workers:
            return host.host.name
        host.is_left_out = True
        self.console.note(f"{host.host.name} is left out: {why}")
        return ""

    def clear(self, cause: Outcome | None = None) -> None:
        """Makes sure that nothing of the attempt still runs where the agents can tell; leaves out a host for good whose
        workers were the cause of several failures in a row, where there are others.
        """
        is_known = cause is not None and cause.state is not WorkerState.VICTIM and cause.rank < len(self._seats)
        if cause and is_known and self.remotes.count_failure(self._seats[cause.rank].remote) >= _MOST_FAILURES:
            self.leave_out(cause.rank, f"{_MOST_FAILURES} failures in a row were its workers")
        self._cleared = set()
        connections = {worker.connection for worker in self._workers.values()}
        for connection in connections:
            connection.send({"do": "clear"})
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing := [connection for connection in connections - self._cleared if not connection.lost]:
            if time.monotonic() > deadline:
                for connection in missing:
                    connection.drop(f"{connection.host.name} did not answer for {_ANSWER_SECONDS:g} s")
            self.pump(_TURN_SECONDS)
        for worker in self._workers.values():
            worker.tee.close()
        self._workers = {}

    def close(self) -> None:
        self.clear()
        self.remotes.close(_CLOSE_SECONDS)

    def _take(self, connection: Connection, message: Mapping[str, Any]) -> None:
        worker = self._workers.get(message.get("rank", -1))
        if message["is"] == "output" and worker is not None:
            worker.tee.feed(protocol.to_bytes(message["text"]))
        elif message["is"] == "state" and worker is not None:
            worker.take(message)
        elif message["is"] == "not_started":
            for worker in self._workers.values():
                if worker.connection is connection:
                    what = f"could not be started on {connection.host.name}: {message['why']}"
                    worker.trouble = Trouble(state=WorkerState.NOT_STARTED, what=what, is_outage=True)
        elif message["is"] == "cleared":
            self._cleared.add(connection)

    def _commands(self, attempt: int, seats: Sequence[_Seat]) -> tuple[Command, ...]:
        addresses = [seat.address for seat in seats]
        common = {"PYTHONUNBUFFERED": "1"}
        if len(seats) < self.job.workers:
            common[FULL_WORKERS] = str(self.job.workers)
        return tuple(
            self.job.command(
                attempt,
                rank,
                python=self.remotes.agent.python,
                environ={**self.remotes.environ, **tf_config.of_worker(addresses, rank), **common},
            )
            for rank in range(len(seats))
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seat:
    """A worker's place: its host, and the how many-th of that host it is."""

    remote: RemoteHost
    slot: int

    @property
    def address(self) -> str:
        """The address it listens at, on a port that was free when nothing ran there; in a plan, of an absent host."""
        connection = self.remote.connection
        if connection is None:
            return f"{self.remote.host.address}:<free port>"
        return f"{connection.host.address}:{connection.ports[self.slot]}"


def _seats(remotes: Sequence[RemoteHost]) -> list[_Seat]:
    return [_Seat(remote=remote, slot=slot) for remote in remotes for slot in range(remote.host.slots)]


@dataclasses.dataclass
class RemoteWorker:
    """A worker of an agent; see `launcher.jobs.job.Worker`. `pump` brings what is new."""

    command: Command
    tee: Tee
    connection: Connection
    exit_code: int | None = None
    report: Report | None = None
    error: ErrorRecord | None = None
    last_alive: float = dataclasses.field(default_factory=time.monotonic)
    trouble: Trouble | None = None
    _frozen: bool = False

    def take(self, state: Mapping[str, Any]) -> None:
        """Takes what the agent has seen anew; its ages become times of this host's clock."""
        now, ages = time.monotonic(), state["ages"]
        self.last_alive = now - ages["alive"]
        self.exit_code, self._frozen = state["exit_code"], state["frozen"]
        if state["unkillable"]:
            self.trouble = Trouble(state=WorkerState.UNKILLABLE, what=state["unkillable"])
        if state["report"]:
            self.report = Report(**{**state["report"], "monotonic": now - ages["report"]})
        if state["error"]:
            self.error = ErrorRecord(**{**state["error"], "monotonic": now - ages["error"]})

    def refresh(self) -> None:
        if self.connection.lost and self.exit_code is None and not self.trouble:
            self.trouble = Trouble(state=WorkerState.LOST, what=f"was lost: {self.connection.lost}")

    def is_frozen(self) -> bool:
        return self.exit_code is None and self._frozen

    def send(self, number: int) -> None:
        if self.exit_code is None:
            self.connection.send({"do": "signal", "rank": self.command.rank, "number": int(number)})

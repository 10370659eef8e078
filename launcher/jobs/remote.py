"""The remote backend: workers on other hosts, started by an agent on each."""

from __future__ import annotations

import dataclasses
import functools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.errors import UsageError
from launcher.jobs import protocol
from launcher.jobs.job import Command, Job, NotReady, Worker, outcomes
from launcher.jobs.output import JobConsole
from launcher.jobs.policy import Outcome, Trouble, WorkerState, find_cause
from launcher.jobs.remote_host import RemoteHost
from launcher.jobs.remote_hosts import RemoteHosts
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
    _workers: dict[int, Worker] = dataclasses.field(init=False, default_factory=dict)
    _cleared: set[RemoteHost] = dataclasses.field(init=False, default_factory=set)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Connects to the hosts that are not connected, and decides which of them take part."""
        if self.remotes.transport.missing:
            raise UsageError(self.remotes.transport.missing)
        refusals = self.remotes.connect(self.connect_timeout_seconds, wanted=self.job.workers, stop=stop)
        if stop():
            return
        number = min(self.job.workers, self.remotes.slots_there)
        if number < self.min_workers:
            (remote, refusal), *others = refusals.items()
            also = ", ".join(other.host.name for other, _ in others)
            message = refusal.message + (f" (the same goes for {also})" if also else "")
            advice = "bring it up, name other hosts, or allow for fewer by --min_workers"
            raise NotReady(f"{message}; {advice}", remote.first_rank)
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
        orders: dict[RemoteHost, list[dict[str, Any]]] = {}
        for command, seat in zip(commands, self._seats, strict=True):
            tee = self.console.tee(command.rank, command.log, is_quiet=command.is_quiet)
            send = functools.partial(self._send, command.rank)
            self._workers[command.rank] = Worker(command, tee, send)
            told = {"rank": command.rank, "slot": seat.slot, "argv": command.argv, "environ": command.environ}
            orders.setdefault(seat.remote, []).append(told)
        for remote, workers in orders.items():
            remote.send({"do": "start", "workers": workers})
        return list(self._workers.values())

    def pump(self, timeout_seconds: float) -> None:
        self.remotes.beat()
        if self.console.is_behind:
            time.sleep(timeout_seconds)
            return
        self.remotes.wait(timeout_seconds)
        cause = find_cause(outcomes(self._workers.values()))
        patience = _SUSPECT_SECONDS if cause and cause.state is WorkerState.VICTIM else protocol.HEAD_PATIENCE_SECONDS
        if len(self._seats) < self.job.workers:
            self.remotes.look_for_missing(_LOOK_SECONDS)
        for remote in self.remotes.all:
            for message in remote.receive(patience):
                self._take(remote, message)
        for rank, worker in self._workers.items():
            lost = self._seats[rank].remote.lost
            if lost and worker.exit_code is None and not worker.trouble:
                worker.trouble = Trouble(state=WorkerState.LOST, what=f"was lost: {lost}")

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
        hosts = {self._seats[rank].remote for rank in self._workers}
        for remote in hosts:
            remote.send({"do": "clear"})
        deadline = time.monotonic() + _ANSWER_SECONDS
        while missing := [remote for remote in hosts - self._cleared if not remote.lost]:
            if time.monotonic() > deadline:
                for remote in missing:
                    remote.drop(f"{remote.place.name} did not answer for {_ANSWER_SECONDS:g} s")
            self.pump(_TURN_SECONDS)
        for worker in self._workers.values():
            worker.tee.close()
        self._workers = {}

    def close(self) -> None:
        self.clear()
        self.remotes.close(_CLOSE_SECONDS)

    def _take(self, remote: RemoteHost, message: Mapping[str, Any]) -> None:
        worker = self._workers.get(message.get("rank", -1))
        if message["is"] == "output" and worker is not None:
            worker.tee.feed(protocol.to_bytes(message["text"]))
        elif message["is"] == "state" and worker is not None:
            _take_state(worker, message)
        elif message["is"] == "not_started":
            for rank, worker in self._workers.items():
                if self._seats[rank].remote is remote:
                    what = f"could not be started on {remote.place.name}: {message['why']}"
                    worker.trouble = Trouble(state=WorkerState.NOT_STARTED, what=what, is_outage=True)
        elif message["is"] == "cleared":
            self._cleared.add(remote)

    def _send(self, rank: int, number: int) -> None:
        if self._workers[rank].exit_code is None:
            self._seats[rank].remote.send({"do": "signal", "rank": rank, "number": int(number)})

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
        ports = self.remote.ports
        return f"{self.remote.place.address}:{ports[self.slot] if ports else '<free port>'}"


def _seats(remotes: Sequence[RemoteHost]) -> list[_Seat]:
    return [_Seat(remote=remote, slot=slot) for remote in remotes for slot in range(remote.host.slots)]


def _take_state(worker: Worker, state: Mapping[str, Any]) -> None:
    """Takes what the agent has seen anew; its ages become times of this host's clock."""
    now, ages = time.monotonic(), state["ages"]
    worker.last_alive = now - ages["alive"]
    worker.exit_code, worker.is_frozen = state["exit_code"], state["frozen"]
    if state["unkillable"]:
        worker.trouble = Trouble(state=WorkerState.UNKILLABLE, what=state["unkillable"])
    if state["report"]:
        worker.report = Report(**{**state["report"], "monotonic": now - ages["report"]})
    if state["error"]:
        worker.error = ErrorRecord(**{**state["error"], "monotonic": now - ages["error"]})

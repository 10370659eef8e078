"""The hosts of a job over its life: each connected, lost and connected again."""

import dataclasses
import select
import threading
import time
from collections.abc import Callable, Mapping

from launcher.errors import UsageError
from launcher.jobs import protocol
from launcher.jobs.connection import Connection
from launcher.jobs.output import JobConsole
from launcher.jobs.transports import AgentCommand, Host, Refusal, Transport

_TURN_SECONDS = 0.05
_RETRY_SECONDS = 1.0
# What a handshake may take beyond the time for trying: longer than OpenSSH's own limit, which has the better message.
_HANDSHAKE_SECONDS = 15.0


@dataclasses.dataclass(eq=False)
class RemoteHost:
    """One host, with the rank of its first worker when all are there; `connection` is None while there is none."""

    number: int
    host: Host
    first_rank: int
    connection: Connection | None = None
    refusal: Refusal | None = None
    retry_at: float = 0.0
    failures: int = 0  # in a row, of the job, that were of its workers
    is_left_out: bool = False
    marks: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return self.connection is not None and self.connection.is_ready

    @property
    def agent(self) -> Connection:
        """The connection, of a host that is or was there."""
        assert self.connection is not None
        return self.connection


@dataclasses.dataclass
class RemoteHosts:
    """All hosts of a job, what runs on each, and the variables that its workers get from this host."""

    identity: str
    console: JobConsole
    transport: Transport
    agent: AgentCommand
    environ: Mapping[str, str]
    _over: threading.Event = dataclasses.field(init=False, default_factory=threading.Event)
    _beats: threading.Thread | None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        slots = [host.slots for host in self.transport.hosts]
        self.all = [RemoteHost(number, host, sum(slots[:number])) for number, host in enumerate(self.transport.hosts)]

    @property
    def there(self) -> list[RemoteHost]:
        """Hosts that workers can be started on."""
        return [remote for remote in self.all if remote.is_ready and not remote.is_left_out]

    @property
    def slots_there(self) -> int:
        return sum(remote.host.slots for remote in self.there)

    def count_failure(self, of: RemoteHost) -> int:
        """The number of failures in a row that were of a host's workers, with one more."""
        for remote in self.all:
            remote.failures = remote.failures + 1 if remote is of else 0
        return of.failures

    def connect(
        self, timeout_seconds: float, *, wanted: int, is_first: bool, stop: Callable[[], bool]
    ) -> dict[RemoteHost, Refusal]:
        """Connects to the hosts that are not connected, and tries again until the time is over or `wanted` slots are
        there.

        A handshake that is under way then may still end. If no host has ever served, a mistake ends it at once
        (UsageError); later it may be a host that is still starting, without its users or its disks. `stop` says that
        nobody needs them any more.

        Returns:
          Why a host is not there, for those that are not.
        """
        if self._beats is None:
            # A thread of its own: a terminal that is not read from holds up the rest, which must not look like death.
            self._beats = threading.Thread(target=self._beat, daemon=True)
            self._beats.start()
        deadline = time.monotonic() + timeout_seconds
        for remote in self.all:
            remote.refusal, remote.retry_at = None, 0.0
            if not remote.is_ready:
                self._drop(remote, "connected again")
        while not stop() and (waiting := self._missing()):
            now = time.monotonic()
            for remote in waiting:
                may_try = remote.refusal is None or now < deadline
                self._pursue(remote, timeout_seconds, _RETRY_SECONDS, is_first=is_first, may_try=may_try)
            if self.slots_there >= wanted and all(remote.refusal for remote in waiting):
                break
            under_way = any(remote.connection is not None for remote in waiting)
            if now > deadline and (not under_way or now > deadline + _HANDSHAKE_SECONDS):
                break
            self.wait(_TURN_SECONDS)
            for connection in self._connections():
                connection.receive()
        refusals = {}
        for remote in self._missing():
            silent = f"{remote.host.name} did not answer within {timeout_seconds:g} s (--connect_timeout)"
            refusals[remote] = remote.refusal = remote.refusal or Refusal(message=silent, is_mistake=False)
            self._drop(remote, silent)
        return refusals

    def look_for_missing(self, seconds: float) -> None:
        """Goes on connecting to the hosts that could not be connected, each `seconds` after its last refusal."""
        for remote in self._missing():
            if remote.refusal is not None:
                self._pursue(remote, seconds, seconds, is_first=False, may_try=True)

    def wait(self, timeout_seconds: float) -> None:
        """Returns when there is something to receive from any of them, after `timeout_seconds` at the latest."""
        descriptors = [number for connection in self._connections() for number in connection.descriptors()]
        if not descriptors:
            time.sleep(timeout_seconds)
            return
        poll = select.poll()
        for number in descriptors:
            poll.register(number, select.POLLIN)
        poll.poll(timeout_seconds * 1000)

    def close(self, timeout_seconds: float) -> None:
        """Lets the agents end, and waits for that."""
        connections = self._connections()
        for connection in connections:
            connection.send({"do": "close"})
        deadline = time.monotonic() + timeout_seconds
        for connection in connections:
            connection.close(max(0.0, deadline - time.monotonic()))
        for remote in self.all:
            remote.connection = None
        self._over.set()
        if self._beats is not None:
            self._beats.join()

    def _missing(self) -> list[RemoteHost]:
        return [remote for remote in self.all if not remote.is_ready and not remote.is_left_out]

    def _connections(self) -> list[Connection]:
        return [connection for connection in [remote.connection for remote in self.all] if connection is not None]

    def _beat(self) -> None:
        while not self._over.wait(protocol.BEAT_SECONDS):
            for connection in self._connections():
                connection.send({"do": "ping"})

    def _pursue(self, remote: RemoteHost, seconds: float, retry: float, *, is_first: bool, may_try: bool) -> None:
        """Sees what has become of an attempt to connect, or makes the next one."""
        if remote.connection is not None:
            refusal = self._refusal(remote.connection)
            if refusal is None:
                return
            if refusal.is_mistake and is_first:
                raise UsageError(refusal.message)
            is_new = remote.refusal is None and all(other.refusal != refusal for other in self.all)
            if is_new and not refusal.is_mistake:
                self.console.note(f"{refusal.message}; trying for {seconds:g} s")
            remote.refusal = refusal
            remote.retry_at = time.monotonic() + retry
            self._drop(remote, refusal.message)
        if may_try and time.monotonic() >= remote.retry_at:
            mark = f"{self.identity}-{remote.number}-{len(remote.marks)}"
            argv = self.transport.argv(remote.host, self.agent.words(mark))
            hello = {"earlier": list(remote.marks), "environ": dict(self.environ), "slots": remote.host.slots}
            remote.connection = Connection(remote.host, argv, mark, hello)
            remote.marks.append(mark)

    def _refusal(self, connection: Connection) -> Refusal | None:
        """Why an agent does not serve; None while it may come to."""
        if connection.mistake:
            return Refusal(message=connection.mistake, is_mistake=True)
        if not connection.lost:
            return None
        host, code, lines = connection.host, connection.exit_code or 0, list(connection.stderr)
        if connection.facts is not None:
            return Refusal(message=connection.lost, is_mistake=False)
        return self.transport.explain(host, code, lines) or self.agent.explain(host, code, lines)

    def _drop(self, remote: RemoteHost, why: str) -> None:
        if remote.connection is not None:
            remote.connection.drop(why)
        remote.connection = None

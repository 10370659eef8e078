"""The hosts of a job over its life: each connected, lost and connected again."""

import dataclasses
import select
import time
from collections.abc import Callable, Mapping

from launcher.errors import UsageError
from launcher.jobs import protocol
from launcher.jobs.output import JobConsole
from launcher.jobs.remote_host import RemoteHost
from launcher.jobs.transports import AgentCommand, Refusal, Transport

_TURN_SECONDS = 0.05
_RETRY_SECONDS = 1.0
# What a handshake may take beyond the time for trying: longer than OpenSSH's own limit, which has the better message.
_HANDSHAKE_SECONDS = 15.0


@dataclasses.dataclass
class RemoteHosts:
    """All hosts of a job, what runs on each, and the variables that its workers get from this host."""

    identity: str
    console: JobConsole
    transport: Transport
    agent: AgentCommand
    environ: Mapping[str, str]
    _beat_at: float = 0.0

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
        """Counts one more failure in a row that was of a host's workers, and returns their number."""
        for remote in self.all:
            remote.failures = remote.failures + 1 if remote is of else 0
        return of.failures

    def connect(self, timeout_seconds: float, *, wanted: int, stop: Callable[[], bool]) -> dict[RemoteHost, Refusal]:
        """Connects to the hosts that are not connected, and tries again until the time is over or `wanted` slots are
        there.

        A handshake that is under way then may still end. If no host has ever served, a mistake ends it at once
        (UsageError); later it may be a host that is still starting, without its users or its disks. `stop` says that
        nobody needs them any more.

        Returns:
          Why a host is not there, for those that are not.
        """
        is_first = not any(remote.marks for remote in self.all)
        deadline = time.monotonic() + timeout_seconds
        for remote in self.all:
            remote.refusal, remote.retry_at = None, 0.0
            if not remote.is_ready:
                remote.give_up("connected again")
        while not stop() and (waiting := self._missing()):
            now = time.monotonic()
            for remote in waiting:
                may_try = remote.refusal is None or now < deadline
                refusal = self._pursue(remote, timeout_seconds, _RETRY_SECONDS, may_try=may_try)
                if refusal and refusal.is_mistake and is_first:
                    raise UsageError(refusal.message)
            if self.slots_there >= wanted and all(remote.refusal for remote in waiting):
                break
            under_way = any(remote.is_tried for remote in waiting)
            if now > deadline and (not under_way or now > deadline + _HANDSHAKE_SECONDS):
                break
            self.beat()
            self.wait(_TURN_SECONDS)
            for remote in self.all:
                remote.receive()
        refusals = {}
        for remote in self._missing():
            silent = f"{remote.host.name} did not answer within {timeout_seconds:g} s (--connect_timeout)"
            refusals[remote] = remote.refusal = remote.refusal or Refusal(message=silent, is_mistake=False)
            remote.give_up(silent)
        return refusals

    def look_for_missing(self, seconds: float) -> None:
        """Goes on connecting to the hosts that could not be connected, each `seconds` after its last refusal."""
        for remote in self._missing():
            if remote.refusal is not None:
                self._pursue(remote, seconds, seconds)

    def beat(self) -> None:
        """Gives the agents a sign of life, when it is time for one."""
        if time.monotonic() - self._beat_at >= protocol.BEAT_SECONDS:
            self._beat_at = time.monotonic()
            for remote in self.all:
                remote.send({"do": "ping"})

    def wait(self, timeout_seconds: float) -> None:
        """Returns when there is something to receive from any of them, after `timeout_seconds` at the latest."""
        poll = select.poll()
        for remote in self.all:
            for descriptor in remote.descriptors():
                poll.register(descriptor, select.POLLIN)
        poll.poll(timeout_seconds * 1000)

    def close(self, timeout_seconds: float) -> None:
        """Lets the agents end, and waits for that."""
        for remote in self.all:
            remote.send({"do": "close"})
        deadline = time.monotonic() + timeout_seconds
        for remote in self.all:
            remote.close(max(0.0, deadline - time.monotonic()))
        self.all = []

    def _missing(self) -> list[RemoteHost]:
        return [remote for remote in self.all if not remote.is_ready and not remote.is_left_out]

    def _pursue(self, remote: RemoteHost, seconds: float, retry: float, *, may_try: bool = True) -> Refusal | None:
        """Sees what has become of an attempt to connect, and returns why it failed now; or makes the next one."""
        refusal = self._refusal(remote) if remote.is_tried else None
        if refusal is not None:
            is_new = remote.refusal is None and all(other.refusal != refusal for other in self.all)
            if is_new and not refusal.is_mistake:
                self.console.note(f"{refusal.message}; trying for {seconds:g} s")
            remote.refusal = refusal
            remote.retry_at = time.monotonic() + retry
            remote.give_up(refusal.message)
        elif not remote.is_tried and may_try and time.monotonic() >= remote.retry_at:
            mark = f"{self.identity}-{remote.number}-{len(remote.marks)}"
            argv = self.transport.argv(remote.host, self.agent.words(mark))
            known = {"earlier": list(remote.marks), "environ": dict(self.environ), "slots": remote.host.slots}
            remote.connect(argv, {"mark": mark, **known})
            remote.marks.append(mark)
        return refusal

    def _refusal(self, remote: RemoteHost) -> Refusal | None:
        """Why an agent does not serve; None while it may come to."""
        if remote.mistake:
            return Refusal(message=remote.mistake, is_mistake=True)
        if not remote.lost:
            return None
        if remote.facts is not None:
            return Refusal(message=remote.lost, is_mistake=False)
        ended = remote.host, remote.exit_code or 0, list(remote.stderr)
        return self.transport.explain(*ended) or self.agent.explain(*ended)

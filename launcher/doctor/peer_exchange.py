"""Peers: whether the other workers of a cluster can be reached, and whether ranks and versions agree.

Each doctor listens on the port of its own worker and connects to every worker. The caller sends one line of JSON and
is answered with one: rank, cluster, versions.
"""

import asyncio
import contextlib
import dataclasses
import functools
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launcher.doctor import nvidia, packages
from launcher.doctor.check import Context, Finding, Skip, check, fail, ok
from launcher.errors import EXIT_RETRY, UsageError
from launcher.machine import ports
from launcher.machine.cluster import Cluster
from launcher.reporting import strict_json
from launcher.reporting.units import first

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_LONGEST_LINE = 2**20
_PROTOCOL = "launcher doctor 3"
# What comes of talking to whatever else there may be.
_NO_DOCTOR = (OSError, ValueError, KeyError, TypeError)

_SHOWN = 4
_GPUS = "GPUs"

ANSWERED = "answered"
REFUSED = "refused"
TIMED_OUT = "timed out"
NOT_RESOLVED = "not resolved"
UNREACHABLE = "unreachable"
STRANGER = "stranger"

_TOGETHER = (
    "start the same command on all workers at once (srun, kubectl, pdsh), or with a longer --doctor_wait; if it runs "
    "there, see that the firewall lets the port through"
)
_FIXES = {
    REFUSED: f"the host is there and nothing listens on that port: {_TOGETHER}",
    TIMED_OUT: "a firewall drops what is sent there, or the host is down or has another address, or no name server "
    "answers: open the port between the workers (security group, network policy), and look at the address",
    NOT_RESOLVED: "no such name here: look at its spelling, at /etc/hosts and DNS; on Kubernetes, the headless Service "
    "must publish addresses that are not ready",
    UNREACHABLE: "there is no way to that address: look at routes, network interfaces and the address",
    STRANGER: "the port is reached, but no doctor answers: end the training that runs there, or give the workers "
    "another port",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One worker of the cluster as this worker reaches it; this worker is one of them.

    Attributes:
      index, address: its rank and address in this worker's cluster.
      state: ANSWERED, or one of those in `_FIXES`.
      detail: the system's message where the state is not ANSWERED.
      facts: its versions.
      workers: the addresses of its cluster.
      claims_index: the rank that it gives itself.
    """

    index: int
    address: str
    state: str
    detail: str = ""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workers: tuple[str, ...] = ()
    claims_index: int = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """The answers of all workers of a cluster to one of them, which has this cluster and these versions.

    Attributes:
      peers: all workers in rank order, this one included.
      listen_error: why nothing could listen on this worker's port; empty without an error.
    """

    cluster: Cluster
    facts: Mapping[str, str]
    peers: tuple[Peer, ...]
    listen_error: str

    @property
    def all_in_place(self) -> bool:
        """Whether all workers answer, each at its own address and of the same cluster."""
        here = self.cluster.workers
        return not self.listen_error and all(
            peer.state == ANSWERED and (peer.claims_index, peer.workers) == (peer.index, here) for peer in self.peers
        )

    @property
    def others(self) -> list[Peer]:
        """The workers that answered, without this one."""
        return [peer for peer in self.peers if peer.state == ANSWERED and peer.index != self.cluster.index]


def exchange(cluster: Cluster, *, facts: Mapping[str, str], wait_seconds: float) -> Exchange:
    """Exchanges versions with all workers of a cluster; one that does not answer is asked again for `wait_seconds`."""
    return asyncio.run(_exchange(cluster, facts, wait_seconds))


async def _exchange(cluster: Cluster, facts: Mapping[str, str], wait_seconds: float) -> Exchange:
    content = {"protocol": _PROTOCOL, "index": cluster.index, "workers": cluster.workers, "facts": dict(facts)}
    deadline = time.monotonic() + wait_seconds

    async def look_up(*asked: Any, **of: Any) -> Any:
        return await asyncio.wrap_future(ports.beside(socket.getaddrinfo, *asked, **of))

    # Else asyncio.run waits at its end for name servers, whatever became of the call.
    asyncio.get_running_loop().getaddrinfo = look_up  # type: ignore[method-assign]
    not_heard, all_heard = {*range(cluster.num_workers)} - {cluster.index}, asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
        """Tells the other doctor of this worker, and returns what it tells; ValueError where there is none."""
        try:
            writer.write(json.dumps(content).encode() + b"\n")
            line = await asyncio.wait_for(reader.readline(), _ANSWER_SECONDS)
        finally:
            writer.close()
        if not line:
            raise ValueError("it hangs up")
        answer = strict_json.parsed(line) or {}
        if "protocol" not in answer:
            raise ValueError("it says something else")
        if answer["protocol"] != _PROTOCOL:
            raise ValueError(f"it speaks {answer['protocol']!r}")
        return {"facts": dict(answer["facts"]), "workers": tuple(answer["workers"]), "claims_index": answer["index"]}

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*_NO_DOCTOR, asyncio.TimeoutError):  # a caller may break off or send anything
            not_heard.discard((await talk(reader, writer))["claims_index"])
            if not not_heard:
                all_heard.set()

    async def call(index: int, address: str) -> Peer:
        while True:
            peer = await attempt(index, address)
            left = deadline - time.monotonic()
            if peer.state == ANSWERED or left <= 0:
                return peer
            await asyncio.sleep(min(_RETRY_SECONDS, left))

    async def attempt(index: int, address: str) -> Peer:
        seconds = min(_CONNECT_SECONDS, max(deadline - time.monotonic(), _RETRY_SECONDS))
        state, detail = UNREACHABLE, ""
        try:
            opened = asyncio.open_connection(*ports.parts_of(address), limit=_LONGEST_LINE)
            reader, writer = await asyncio.wait_for(opened, seconds)
        except (TimeoutError, asyncio.TimeoutError):
            state, detail = TIMED_OUT, f"no answer within {seconds:.1g} s"
        except UnicodeError as error:  # what Python says of a name such as a..b
            state, detail = NOT_RESOLVED, str(error)
        except OSError as error:
            state = {socket.gaierror: NOT_RESOLVED, ConnectionRefusedError: REFUSED}.get(type(error), UNREACHABLE)
            detail = error.strerror or str(error)
        else:
            try:
                return Peer(index=index, address=address, state=ANSWERED, **await talk(reader, writer))
            except asyncio.TimeoutError:
                state, detail = STRANGER, f"no answer within {_ANSWER_SECONDS:g} s"
            except _NO_DOCTOR as error:
                state, detail = STRANGER, str(error)
        return Peer(index=index, address=address, state=state, detail=detail)

    server, listen_error, port = None, "", ports.port_of(cluster.workers[cluster.index])
    try:
        listener = ports.listener(port, backlog=max(128, 2 * cluster.num_workers))
        server = await asyncio.start_server(hear, sock=listener, limit=_LONGEST_LINE)
    except OSError as error:
        listen_error = f"port {port}: {error.strerror or error}"
    peers = await asyncio.gather(*map(call, range(cluster.num_workers), cluster.workers))
    if server is not None:
        if all(peer.state == ANSWERED for peer in peers):
            # Listens on until the others have called; those that answer do so as soon as they start.
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(all_heard.wait(), min(_ANSWER_SECONDS, wait_seconds))
        server.close()
    return Exchange(cluster=cluster, facts=facts, peers=tuple(peers), listen_error=listen_error)


@check("TF_CONFIG, Slurm, Kubernetes, Cloud TPU")
def cluster(context: Context) -> Iterator[Finding]:
    resolved = context.cluster_or_error
    if isinstance(resolved, UsageError):
        yield fail(str(resolved), "correct the variables, or unset them to train alone")
    else:
        yield ok(resolved.description)


@check("this worker's port is free, the others' answer", waits_for="waiting for the other workers' doctors")
def peers(context: Context) -> Iterator[Finding]:
    yield from peer_findings(exchanged(context))


@check("versions and number of GPUs of the other workers")
def agreement(context: Context) -> Iterator[Finding]:
    yield agreement_finding(exchanged(context))
    yield from fewer_gpus(exchanged(context))


@functools.cache
def exchanged(context: Context) -> Exchange:
    """Exchanges versions with the workers of the context's cluster, once; Skip where there are no others."""
    if context.cluster.num_workers == 1:
        raise Skip("one process, no peers")
    return exchange(
        context.cluster,
        facts={**packages.facts(), _GPUS: f"{nvidia.count(context)}"},
        wait_seconds=context.request.doctor_wait,
    )


def peer_findings(answers: Exchange) -> Iterator[Finding]:
    """Findings on which workers answered in an exchange, and why the others did not."""
    own = answers.cluster.index
    if answers.listen_error:
        yield fail(
            f"cannot listen on this worker's own {answers.listen_error} ({answers.cluster.workers[own]})",
            "end what runs there (ss -ltnp shows it), or give this worker another port",
            exit_code=EXIT_RETRY,
        )
    missing = [peer for peer in answers.peers if not (peer.index == own and answers.listen_error)]
    for state, fix in _FIXES.items():
        if those := [peer for peer in missing if peer.state == state]:
            seen = f"{state}: {_shown(those)}: {those[0].detail}"
            yield fail(seen, fix, exit_code=EXIT_RETRY)
    yield from _wrong_places(answers)
    if answers.others:
        yield ok(f"{len(answers.others)} of {len(answers.peers) - 1} other workers answer")


def _shown(peers: Sequence[Peer]) -> str:
    return first([f"worker {peer.index} ({peer.address})" for peer in peers], most=_SHOWN)


def _wrong_places(answers: Exchange) -> Iterator[Finding]:
    """Findings on clusters that differ from this worker's, and on addresses at which another worker answers."""
    here = answers.cluster.workers
    for peer in answers.peers:
        if peer.state != ANSWERED:
            continue
        if peer.workers != here:
            yield fail(
                f"worker {peer.index} ({peer.address}) has another cluster: {len(peer.workers)} workers, "
                f"{', '.join(peer.workers[:_SHOWN])}; here {len(here)}, {', '.join(here[:_SHOWN])}",
                "give all workers the same list of addresses, in the same order",
            )
        elif peer.claims_index != peer.index:
            yield fail(
                f"at {peer.address}, the address of worker {peer.index}, worker {peer.claims_index} answers",
                "give every worker its own index, from 0, and the address of its own host",
            )


def agreement_finding(answers: Exchange) -> Finding:
    """The finding on versions that differ from this worker's; Skip where nobody else answered."""
    if not answers.others:
        raise Skip("no other worker answers")
    # A number of GPUs is for the worker to tell that has fewer, so that the others are not taken for the cause.
    differing = [peer for peer in answers.others if {**peer.facts, _GPUS: ""} != {**answers.facts, _GPUS: ""}]
    if not differing:
        return ok("all that answer have " + ", ".join(f"{name} {of}" for name, of in answers.facts.items()))
    other = differing[0]
    parts = [
        f"{name} {answers.facts.get(name, 'missing')} here and {other.facts.get(name, 'missing')} there"
        for name in sorted({*answers.facts, *other.facts})
        if answers.facts.get(name) != other.facts.get(name) and name != _GPUS
    ]
    return fail(
        f"{_shown(differing)}: {', '.join(parts)}",
        "install the same versions on all workers: pip freeze on one of them, pip install -r on the others",
    )


def fewer_gpus(answers: Exchange) -> Iterator[Finding]:
    """The finding on a worker with fewer GPUs than another, which then waits for more replicas than there are."""
    most = max(answers.peers, key=lambda peer: int(peer.facts.get(_GPUS, 0)))
    here, there = (int(facts.get(_GPUS, 0)) for facts in (answers.facts, most.facts))
    if here < there:
        seen = f"{here} GPUs here, {there} for worker {most.index} ({most.address})"
        yield fail(seen, "restart this host, or take it out of the job")

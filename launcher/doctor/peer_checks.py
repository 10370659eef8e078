"""Who the other workers are, whether they can be reached, and whether they agree in time and in versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.doctor import exchange as exchange_lib
from launcher.doctor.context import Context
from launcher.doctor.exchange import ANSWERED, Exchange, Peer
from launcher.doctor.finding import Finding, Skip, fail, ok, warn
from launcher.errors import EXIT_RETRY, UsageError

_SHOWN = 4
# Logs of several workers cannot be put in order any more.
_APART_SECONDS = 1.0
# The skew that Kerberos accepts (RFC 4120, section 8.2); cloud storage refuses signed requests soon after.
_FAR_APART_SECONDS = 300.0

_TOGETHER = (
    "start the same command on all workers at once (srun, kubectl, pdsh), or with a longer --doctor_wait; if it runs "
    "there, see that the firewall lets the port through"
)
_FIXES = {
    exchange_lib.REFUSED: f"the host is there and nothing listens on that port: {_TOGETHER}",
    exchange_lib.TIMED_OUT: "a firewall drops what is sent there, or the host is down or has another address: open the "
    "port between the workers (security group, network policy), and look at the address",
    exchange_lib.NOT_RESOLVED: "no such name here: look at its spelling, at /etc/hosts and DNS; on Kubernetes, the "
    "headless Service must publish addresses that are not ready",
    exchange_lib.UNREACHABLE: "there is no way to that address: look at routes, network interfaces and the address",
    exchange_lib.STRANGER: "the port is reached, but no doctor answers: end the training that runs there, or give the "
    "workers another port",
}


def cluster(context: Context) -> Iterator[Finding]:
    """What TF_CONFIG, Slurm, Kubernetes or Cloud TPU say of this process and its peers."""
    found = context.cluster_or_error
    if isinstance(found, UsageError):
        yield fail("cluster", str(found), "correct the variables, or unset them to train alone")
    else:
        yield ok("cluster", found.description)


def peers(context: Context) -> Iterator[Finding]:
    """Whether the port of this worker is free, and who of the others can be reached on theirs."""
    found = context.exchange
    own = found.workers[found.index]
    if found.listen_error:
        yield fail(
            "peers",
            f"cannot listen on this worker's own {found.listen_error} ({own})",
            "end what runs there (ss -ltnp shows it), or give this worker another port",
            exit_code=EXIT_RETRY,
        )
    yield from peer_findings(found)


def peer_findings(found: Exchange) -> Iterator[Finding]:
    """Of what came out of an exchange."""
    for state, fix in _FIXES.items():
        others = [peer for peer in found.peers if peer.state == state and not _is_blocked_self(peer, found)]
        if others:
            seen = f"{state}: {_shown(others)}: {others[0].detail}"
            yield fail("peers", seen, fix, exit_code=EXIT_RETRY)
    answered = [peer for peer in found.peers if peer.state == ANSWERED and peer.index != found.index]
    yield from _wrong_places(found)
    if answered:
        slowest = max(answered, key=lambda peer: peer.delay_seconds)
        yield ok(
            "peers",
            f"{len(answered)} of {len(found.peers) - 1} other workers answer; longest round trip "
            f"{_seconds(slowest.delay_seconds)}, to worker {slowest.index}",
        )


def _is_blocked_self(peer: Peer, found: Exchange) -> bool:
    return peer.index == found.index and bool(found.listen_error)


def _shown(peers: Sequence[Peer]) -> str:
    names = [f"worker {peer.index} ({peer.address})" for peer in peers[:_SHOWN]]
    more = len(peers) - _SHOWN
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _wrong_places(found: Exchange) -> Iterator[Finding]:
    """Addresses at which another worker answers than the one that should, and clusters that differ."""
    for peer in found.peers:
        if peer.state != ANSWERED:
            continue
        if peer.workers != found.workers:
            yield fail(
                "peers",
                f"worker {peer.index} ({peer.address}) has another cluster: {len(peer.workers)} workers, "
                f"{', '.join(peer.workers[:_SHOWN])}; here {len(found.workers)}, {', '.join(found.workers[:_SHOWN])}",
                "give all workers the same list of addresses, in the same order",
            )
        elif peer.claims_index != peer.index or (peer.index == found.index and peer.nonce != found.nonce):
            yield fail(
                "peers",
                f"at {peer.address}, the address of worker {peer.index}, worker {peer.claims_index} answers",
                "give every worker its own index, from 0, and the address of its own host",
            )


def clock(context: Context) -> Iterator[Finding]:
    """How far the other workers' clocks are from this one's."""
    yield clock_finding(context.exchange)


def clock_finding(found: Exchange) -> Finding:
    """Of what came out of an exchange.

    Raises:
      Skip: nobody else answered.
    """
    others = [peer for peer in found.peers if peer.state == ANSWERED and peer.index != found.index]
    if not others:
        raise Skip("no other worker answers")
    worst = max(others, key=lambda peer: abs(peer.offset_seconds))
    direction = "ahead" if worst.offset_seconds > 0 else "behind"
    apart, certain = abs(worst.offset_seconds), worst.delay_seconds / 2
    seen = f"worker {worst.index}'s clock is {_seconds(apart)} {direction}, to within {_seconds(certain)}"
    fix = f"let chrony or systemd-timesyncd set the clocks of worker {found.index} and worker {worst.index}"
    if apart - certain > _FAR_APART_SECONDS:
        return fail("clock", f"{seen}: tickets and signed requests are refused", fix)
    if apart - certain > _APART_SECONDS:
        return warn("clock", f"{seen}: logs of several workers cannot be put in order", fix)
    return ok("clock", seen)


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 1 else f"{value * 1e3:.2g} ms"


def agreement(context: Context) -> Iterator[Finding]:
    """Whether all workers have the same versions."""
    yield from agreement_findings(context.exchange)


def agreement_findings(found: Exchange) -> Iterator[Finding]:
    """Of what came out of an exchange.

    Raises:
      Skip: nobody else answered.
    """
    others = [peer for peer in found.peers if peer.state == ANSWERED and peer.index != found.index]
    if not others:
        raise Skip("no other worker answers")
    differing = [peer for peer in others if dict(peer.facts) != dict(found.facts)]
    if not differing:
        yield ok("agreement", "all that answer have " + ", ".join(f"{name} {of}" for name, of in found.facts.items()))
        return
    other = differing[0]
    parts = [
        f"{name} {found.facts.get(name, 'missing')} here and {other.facts.get(name, 'missing')} there"
        for name in sorted({*found.facts, *other.facts})
        if found.facts.get(name) != other.facts.get(name)
    ]
    yield fail(
        "agreement",
        f"{_shown(differing)}: {', '.join(parts)}",
        "install the same versions on all workers: pip freeze on one of them, pip install -r on the others",
    )

"""The hosts of a job, as --hosts and --hostfile name them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import UsageError

# Nothing that a program could take for an option.
_HOST = re.compile(r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9._-]*)@)?(?P<address>[A-Za-z0-9][A-Za-z0-9._-]*)")
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,3})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """One host of a job.

    Attributes:
      name: as the person wrote it, perhaps with a user: "user@a".
      address: where the workers of other hosts reach those of this one: "a".
      slots: how many workers it runs.
    """

    name: str
    address: str
    slots: int = 1


def parse_hosts(hosts: str | None, hostfile: str | None, workers: int | None) -> tuple[Host, ...]:
    """The hosts that the flags name, with the workers divided among them.

    Args:
      hosts: names separated by commas, or None.
      hostfile: a file of one host a line, with `slots=K` behind it where it runs K workers, or None.
      workers: how many there are in all; None for the slots, or one a host.

    Raises:
      UsageError: a host is no host, one is named twice, or the workers cannot be divided.
    """
    if hosts is not None and hostfile is not None:
        raise UsageError(f"--hosts={hosts} and --hostfile={hostfile}: give one of them")
    if hosts is not None:
        source, found = f"--hosts={hosts}", [_host(word.strip(), f"--hosts={hosts}") for word in hosts.split(",")]
    elif hostfile is not None:
        source, found = f"--hostfile={hostfile}", _read(hostfile)
    else:
        raise UsageError("which hosts? give --hosts=a,b,c or --hostfile=FILE")
    seen: set[str] = set()
    for host, _ in found:
        if host.address in seen:
            raise UsageError(f"{source}: {host.address!r} is named twice; for several workers a host, raise --workers")
        seen.add(host.address)
    return _divide([host for host, _ in found], [slots for _, slots in found], workers, source)


def _read(hostfile: str) -> list[tuple[Host, int | None]]:
    try:
        text = Path(hostfile).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hostfile={hostfile}: cannot be read: {getattr(error, 'strerror', error)}") from None
    found: list[tuple[Host, int | None]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_host(" ".join(words), f"--hostfile={hostfile}, line {number}"))
    if not found:
        raise UsageError(f"--hostfile={hostfile}: names no host; write one a line")
    return found


def _host(text: str, source: str) -> tuple[Host, int | None]:
    """A host, and how many workers it is said to run."""
    name, _, rest = text.partition(" ")
    match = _HOST.fullmatch(name)
    if match is None:
        raise UsageError(f"{source}: {name!r} is not a host; write NAME or USER@NAME")
    slots = _SLOTS.fullmatch(rest)
    if rest and slots is None:
        raise UsageError(f"{source}: {rest!r} behind {name}: only slots=K is known, the number of its workers")
    return Host(name=name, address=match["address"]), int(slots[1]) if slots else None


def _divide(hosts: Sequence[Host], slots: Sequence[int | None], workers: int | None, source: str) -> tuple[Host, ...]:
    if any(slots):
        counts = [count or 1 for count in slots]
        if workers not in (None, sum(counts)):
            raise UsageError(f"--workers={workers}: {source} has slots for {sum(counts)}; leave --workers out")
    else:
        share, rest = divmod(len(hosts) if workers is None else workers, len(hosts))
        if rest or not share:
            raise UsageError(
                f"--workers={workers}: {len(hosts)} hosts run the same number of workers each; "
                f"give a multiple of {len(hosts)}, or a --hostfile with slots"
            )
        counts = [share] * len(hosts)
    return tuple(dataclasses.replace(host, slots=count) for host, count in zip(hosts, counts, strict=True))

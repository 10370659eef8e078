"""Whether strangers can reach a worker: TensorFlow's gRPC server listens on all interfaces and obeys every client."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

# Addresses of this host's own interfaces, as Linux lists them in /proc/net.
_IPV4 = re.compile(r"\|-- (\S+)\n\s+/32 host LOCAL")


def public_address_notes(workers: Sequence[str], proc: Path = Path("/proc/net")) -> list[str]:
    """What a person should know of workers with public addresses; no name is looked up.

    Args:
      workers: "host:port" of every worker; alone, nobody listens.
      proc: where the kernel lists this host's addresses.
    """
    if len(workers) < 2:
        return []
    given = [address.rpartition(":")[0].strip("[]") for address in workers]
    found = [address for address in dict.fromkeys((*given, *_own(proc))) if _is_public(address)]
    if not found:
        return []
    return [
        f"{', '.join(found[:3])}{' and others' if len(found) > 3 else ''}: public, and TensorFlow's server obeys every "
        "client that reaches a worker's port: let a firewall admit the other workers only"
    ]


def _own(proc: Path) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        found += _IPV4.findall((proc / "fib_trie").read_text())
    with contextlib.suppress(OSError):
        words = [line.split()[0] for line in (proc / "if_inet6").read_text().splitlines()]
        found += [str(ipaddress.IPv6Address(int(word, 16))) for word in words]
    return found


def _is_public(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_global
    return False

"""TCP ports for processes that are about to start on this host."""

from __future__ import annotations

import contextlib
import random
import socket

from launcher.errors import UsageError

# Below the range that Linux gives to outgoing connections (from 32768), which could take a port before its worker does.
_PORTS = range(20000, 32000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, on any address of this host.

    Raises:
      UsageError: there are fewer than `count`.
    """
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            return ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As TensorFlow's server will: on all addresses, so that one taken on any of them is not given out.
            probe.bind(("", port))
            ports.append(port)
    raise UsageError(
        f"{count} workers on one host need a port each, and {len(ports)} of {_PORTS.start} to {_PORTS.stop - 1} are "
        "free; start fewer workers"
    )

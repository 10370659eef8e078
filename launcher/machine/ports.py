"""The TCP ports of workers: free ones on this host, and one to listen on or call beside TensorFlow's server."""

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


def listener(port: int, *, backlog: int) -> socket.socket:
    """A socket that listens on a port as TensorFlow's server will: on all addresses of this host.

    Raises:
      OSError: it may not, or another process does.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def call(address: str, seconds: float) -> socket.socket:
    """A connection to "host:port", an IPv6 host in brackets.

    Raises:
      OSError: nobody answers there within the time; TimeoutError where nothing at all comes back.
      UnicodeError: the name is none.
    """
    return socket.create_connection((address.rpartition(":")[0].strip("[]"), port_of(address)), seconds)

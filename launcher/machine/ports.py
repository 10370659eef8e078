"""The TCP ports of workers: free ones on this host, to listen on or call beside TensorFlow's server, open to strangers.

TensorFlow's gRPC server listens on all interfaces and obeys every client.
"""

import contextlib
import ipaddress
import random
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from launcher.errors import UsageError, listed

# Below the range that Linux gives to outgoing connections (from 32768), which could take a port before its worker does.
_PORTS = range(20000, 32000)


def free_ports(count: int) -> list[int]:
    """As many ports as `count` that nobody listens on now, on any address of this host."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(ports) == count:
            return ports
        with socket.socket() as probe, contextlib.suppress(OSError):
            # As TensorFlow's server will: on all addresses, so that one taken on any of them is not given out.
            probe.bind(("", port))
            ports.append(port)
    raise UsageError(f"{count} workers need a port each, and {len(ports)} are free; start fewer workers")


def listener(port: int, *, backlog: int) -> socket.socket:
    """A socket that listens on a port as TensorFlow's server will, on all addresses of this host; or OSError."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=backlog)


def parts_of(address: str) -> tuple[str, int]:
    """The host and the port of "host:port", an IPv6 host in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def port_of(address: str) -> int:
    return parts_of(address)[1]


def call(address: str, seconds: float) -> socket.socket:
    """A connection to "host:port".

    Raises:
      OSError: nobody answers there within the time; TimeoutError where nothing at all comes back.
      UnicodeError: the name is none.
    """
    return socket.create_connection(parts_of(address), seconds)


def beside(function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
    """What a function returns, in a thread that nobody waits for: to look a name up may take minutes, untimed."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # so that nothing can come before its result

    def run() -> None:
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def public_address_notes(workers: Sequence[str]) -> list[str]:
    """Notes on public addresses of workers and of this host; no name is looked up."""
    if len(workers) < 2:
        return []
    import psutil  # late: most runs are of one worker

    given = [parts_of(address)[0] for address in workers]
    own = [each.address for interface in psutil.net_if_addrs().values() for each in interface]
    public = [address for address in dict.fromkeys((*given, *own)) if _is_public(address)]
    if not public:
        return []
    return [
        f"{listed(public)}: public, and TensorFlow's server obeys every client that reaches a worker's port: let a "
        "firewall admit the other workers only"
    ]


def _is_public(address: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address).is_global
    return False

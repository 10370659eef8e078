"""Peers: waits for the other workers before TensorFlow does, which says nothing, knows no limit and answers no signal.

TensorFlow 2.21 keeps Python's lock and takes SIGTERM while it connects several workers. So a worker first listens on
its port, which is TensorFlow's afterwards, and calls the others until all of them answer. Then worker 0 goes first: the
others connect to its server, and where that does not listen yet, TensorFlow tries again a whole second later.

gRPC connects through a proxy of the environment (grpc_proxy, https_proxy, http_proxy), which knows none of the workers
as a rule: they are exempt.
"""

import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from launcher.errors import PeerError, PortTakenError, UsageError
from launcher.machine import child_process, ports
from launcher.machine.cluster import Cluster
from launcher.worker import preemption
from launcher.worker.progress import Progress

START_TIMEOUT = "LAUNCHER_START_TIMEOUT"
EXEMPT = "no_grpc_proxy"

_FIRST_NOTE_SECONDS = 5.0
_LONGEST_SILENCE_SECONDS = 60.0
_CALL_SECONDS = 2.0
_CALLS_AT_ONCE = 32
_RETRY_SECONDS = 0.1
_SERVER_SECONDS, _GREETING_SECONDS = 5.0, 0.05
# Another process, since this one's threads stand still while TensorFlow connects.
_TELL = 'while sleep 15; do echo "$0" >&2; done'


@contextlib.contextmanager
def all_there(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Enters when every worker listens on its port, and on worker 0's TensorFlow; inside, that is to connect them.

    LAUNCHER_START_TIMEOUT in `environ` limits the seconds to wait; without it there is no limit.

    Raises:
      PeerError: the time is over; names those that did not come.
      PortTakenError: another process listens on this worker's port.
      UsageError: it may not listen there.
    """
    exempt = (os.environ.get(EXEMPT) or os.environ.get("no_proxy", "")).split(",")
    exempt += [ports.parts_of(address)[0] for address in cluster.workers]
    os.environ[EXEMPT] = ",".join(dict.fromkeys(filter(None, exempt)))
    progress = Progress(environ)
    others = {rank: address for rank, address in enumerate(cluster.workers) if rank != cluster.index}
    with _listener(cluster) as listener:
        _call_all(others, listener, float(environ.get(START_TIMEOUT) or "inf"), progress)
        if not cluster.is_chief:
            _await_server(cluster.workers[0], listener)
    progress.report(phase="connect")
    told = child_process.start(
        ["sh", "-c", _TELL, f"waiting for {_names(others)}: no answer of TensorFlow yet"],
        preexec_fn=child_process.die_with_parent(),
    )
    try:
        yield
    finally:
        child_process.kill_group(told.pid)
        told.wait()
        preemption.hear_again()
        progress.report(phase="startup")


def _names(workers: Mapping[int, str]) -> str:
    return ", ".join(f"worker {rank} ({address})" for rank, address in workers.items())


def port_taken(cluster: Cluster) -> PortTakenError:
    """The error for another process that listens on this worker's port."""
    return PortTakenError(
        f"worker {cluster.index} cannot listen on the port of {cluster.workers[cluster.index]}: another process has "
        "it. Run again; where ports are given by hand, as in TF_CONFIG, choose one that is free"
    )


def _call_all(missing: Mapping[int, str], listener: socket.socket, limit_seconds: float, progress: Progress) -> None:
    began, since = time.monotonic(), time.strftime("%H:%M:%S")
    note_after = _FIRST_NOTE_SECONDS
    with ThreadPoolExecutor(max_workers=_CALLS_AT_ONCE) as pool:
        while missing:
            answers = list(pool.map(_answers, missing.values()))
            _let_in(listener)
            missing = {rank: at for (rank, at), there in zip(missing.items(), answers, strict=True) if not there}
            if not missing:
                return
            waited = time.monotonic() - began
            names = _names(missing)
            if waited > limit_seconds:
                raise PeerError(
                    f"nothing listens at the address of {names} after {waited:.0f} s (--start_timeout): was it "
                    "started, and does a firewall keep this worker out?"
                )
            if waited >= note_after:
                sys.stderr.write(f"waiting for {names} since {since} ({waited:.0f} s)\n")
                sys.stderr.flush()
                progress.report(phase="startup")  # who waits is not stuck
                note_after = waited + min(_LONGEST_SILENCE_SECONDS, waited)
            time.sleep(_RETRY_SECONDS)


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), ports.call(address, _CALL_SECONDS) as call:
        # A call from a port to itself may come about, and is answered by nobody else.
        return bool(call.getsockname() != call.getpeername())
    return False


def _await_server(address: str, listener: socket.socket) -> None:
    """Returns when TensorFlow serves at an address, or does not for some seconds: it then tries for itself."""
    deadline = time.monotonic() + _SERVER_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), ports.call(address, _CALL_SECONDS) as call:
            call.settimeout(_GREETING_SECONDS)
            if call.recv(1):  # a gRPC server speaks first, and a listener of ours says nothing
                return
        _let_in(listener)
        time.sleep(_GREETING_SECONDS / 2)


@contextlib.contextmanager
def _listener(cluster: Cluster) -> Iterator[socket.socket]:
    port = ports.port_of(cluster.workers[cluster.index])
    try:
        listener = ports.listener(port, backlog=max(128, 2 * cluster.num_workers))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise UsageError(f"worker {cluster.index} cannot listen on port {port}: {error.strerror}") from None
        raise port_taken(cluster) from None
    with listener:
        listener.setblocking(False)
        yield listener


def _let_in(listener: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()

"""Peers are waited for where it can be said, limited and interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from launcher.errors import PeerError, PortTakenError
from launcher.machine import peers
from launcher.machine.cluster import Cluster

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def cluster(ports, index):
    return Cluster(source="TF_CONFIG", workers=tuple(f"127.0.0.1:{port}" for port in ports), index=index)


def meet(ports, index, *, limit=60.0, leave=None):
    with (
        peers.all_there(cluster(ports, index), {peers.START_TIMEOUT: str(limit)}),
        serving(ports[index]),
    ):
        if leave is not None:
            leave.wait(60)


@contextlib.contextmanager
def serving(port):
    """As TensorFlow's server: it speaks first, and who is late finds somebody."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def greet():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as call, contextlib.suppress(ConnectionError):
                        call.sendall(b"\0")

        threading.Thread(target=greet, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)


def test_all_enter_when_the_last_has_come(free_ports):
    ports, leave = free_ports(3), threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(meet, ports, index, leave=leave) for index in (0, 1)]
        last = pool.submit(meet, ports, 2, leave=leave)
        for one in (*waiting, last):
            one.result(60)


def test_workers_are_exempt_from_a_proxy_beside_those_that_are(free_ports, monkeypatch):
    monkeypatch.delenv(peers.EXEMPT, raising=False)
    monkeypatch.setenv("no_proxy", ".lan,127.0.0.1")
    meet(free_ports(1), 0)
    assert os.environ[peers.EXEMPT] == ".lan,127.0.0.1"
    with pytest.raises(PeerError):
        meet([*free_ports(1), 9], 0, limit=0.0)
    assert os.environ.pop(peers.EXEMPT) == ".lan,127.0.0.1"


def test_the_others_enter_when_worker_0_serves(free_ports):
    ports = free_ports(2)
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", ports[0])) as listener:  # as worker 0's own, which says nothing
            listener.settimeout(60)
            waiting = pool.submit(meet, ports, 1)
            for _ in range(3):  # the first call finds that it is there
                listener.accept()[0].close()
        with serving(ports[0]):
            waiting.result(60)


def test_those_that_do_not_come_in_time_are_named(free_ports):
    ports = free_ports(3)
    with socket.create_server(("127.0.0.1", ports[1])), pytest.raises(PeerError) as raised:
        meet(ports, 0, limit=0.2)
    assert f"worker 2 (127.0.0.1:{ports[2]})" in str(raised.value) and "worker 1" not in str(raised.value)


def test_a_port_that_another_process_has_is_named(free_ports):
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])), pytest.raises(PortTakenError, match=str(ports[0])):
        meet(ports, 0)


@pytest.mark.heavy
def test_a_worker_that_waits_for_a_peer_says_so_and_ends_on_sigterm(start_launcher, free_ports, tmp_path):
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    config = {"cluster": {"worker": hosts}, "task": {"type": "worker", "index": 0}}
    flags = ("--gin_file=resnet_cpu.gin", f"--model_dir={tmp_path / 'run'}")
    started = start_launcher(*flags, env={"TF_CONFIG": json.dumps(config)})
    started.wait_until(lambda: f"waiting for worker 1 ({hosts[1]}) since " in started.stderr)
    started.process.send_signal(signal.SIGTERM)
    assert started.wait(60).returncode == 42

"""What the doctors of several workers find out about each other: real sockets, on loopback."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import name_server
import pytest

from launcher.doctor import peer_exchange
from launcher.doctor.peer_exchange import Exchange, Peer
from launcher.machine.cluster import Cluster

pytestmark = pytest.mark.slow

FACTS = {"python": "3.11", "numpy": "2.3.0"}


def cluster(workers, index=0):
    return Cluster(source="TF_CONFIG", workers=tuple(workers), index=index)


def ask(workers, index=0, wait_seconds=0.4, facts=FACTS):
    return peer_exchange.exchange(cluster(workers, index), facts=facts, wait_seconds=wait_seconds)


def fails(found):
    return [one for one in peer_exchange.peer_findings(found) if one.status == "fail"]


@pytest.fixture
def addresses(free_ports):
    return lambda count: [f"127.0.0.1:{port}" for port in free_ports(count)]


@contextlib.contextmanager
def listening(address, handle, backlog=5):
    """A server in a thread, whose connections are given to `handle` as files."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            with contextlib.suppress(OSError):
                handle(self)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    host, _, port = address.rpartition(":")
    with Server((host, int(port)), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def other_doctor(workers, *, index=1, facts=FACTS):
    """Answers as a doctor does."""

    def handle(connection):
        connection.rfile.readline()
        answer = {"protocol": "launcher doctor 3", "index": index, "workers": workers, "facts": facts}
        connection.wfile.write(json.dumps(answer).encode() + b"\n")

    return handle


# ------------------------------------------------------------------------------------------------------ real exchanges


def test_doctors_of_three_workers_reach_each_other_and_agree_to_go_on(addresses):
    workers = addresses(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda index: ask(workers, index, wait_seconds=30), range(3)))
    for index, one in enumerate(found):
        assert one.all_in_place
        assert one.cluster.index == index
        assert [peer.claims_index for peer in one.peers] == [0, 1, 2]
        assert not fails(one)
        assert peer_exchange.agreement_finding(one).status == "ok"


@pytest.mark.parametrize(("there", "fails_here"), [(8, True), (7, False), (6, False)])
def test_a_worker_with_fewer_gpus_than_another_is_the_one_that_fails(addresses, there, fails_here):
    workers = addresses(2)
    with listening(workers[1], other_doctor(workers, facts={**FACTS, "GPUs": f"{there}"})):
        found = ask(workers, facts={**FACTS, "GPUs": "7"})
    assert peer_exchange.agreement_finding(found).status == "ok"
    said = [finding.seen for finding in peer_exchange.fewer_gpus(found)]
    assert said == ([f"7 GPUs here, 8 for worker 1 ({workers[1]})"] if fails_here else [])


def test_both_doctors_name_a_cluster_that_is_in_another_order(addresses):
    workers = addresses(2)
    with ThreadPoolExecutor(2) as pool:
        right = pool.submit(ask, workers, 0, 3)
        reverse = pool.submit(ask, list(reversed(workers)), 0, 3)  # says that it is worker 0 on the other's port
        found = [right.result(), reverse.result()]
    for one in found:
        assert not one.all_in_place
        (finding,) = fails(one)
        assert finding.exit_code == 64
        assert "has another cluster: 2 workers" in finding.seen


def test_nobody_goes_on_where_one_is_missing(addresses):
    workers = addresses(3)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda index: ask(workers, index, wait_seconds=1.0), range(2)))
    for one in found:
        assert not one.all_in_place
        (missing,) = fails(one)
        assert missing.exit_code == 75
        assert missing.seen.startswith(f"refused: worker 2 ({workers[2]})")


def test_a_closed_port_a_silent_one_and_a_name_that_is_none_are_told_apart(addresses):
    closed, silent, own = addresses(3)
    host, _, port = silent.rpartition(":")
    with socket.socket() as full, contextlib.ExitStack() as stack:
        # Nothing accepts, and the queue is full: further connections get no answer, as behind a firewall.
        full.bind((host, int(port)))
        full.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, int(port)))
        found = ask([own, closed, silent, "a..b:2222"])
    assert [peer.state for peer in found.peers] == ["answered", "refused", "timed out", "not resolved"]
    said = {one.seen.partition(":")[0]: one for one in fails(found)}
    assert "firewall drops" in said["timed out"].fix
    assert "no such name" in said["not resolved"].fix
    assert "nothing listens" in said["refused"].fix
    assert {one.exit_code for one in said.values()} == {75}


def test_a_name_server_that_never_answers_holds_nobody(addresses):
    (own,) = addresses(1)
    with ThreadPoolExecutor(1) as pool, name_server.silent("elsewhere") as asked:
        found = pool.submit(ask, [own, "elsewhere:2222"]).result(60)
        assert asked.is_set()
    assert [peer.state for peer in found.peers] == ["answered", "timed out"]
    assert "no name server answers" in fails(found)[0].fix


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[1, 2]\n", b"\x00\x00\x12\x04\x00\n"])
def test_whatever_else_listens_on_a_workers_port_is_a_stranger(addresses, words):
    workers = addresses(2)
    with listening(workers[1], lambda connection: connection.wfile.write(words)):
        found = ask(workers)
    assert found.peers[1].state == "stranger"
    (stranger,) = fails(found)
    assert "end the training that runs there" in stranger.fix


def test_whatever_is_said_to_a_doctor_it_goes_on(addresses):
    workers = addresses(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, workers, 0, 30)
        host, _, port = workers[0].rpartition(":")
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((host, int(port))) as nonsense:
                    nonsense.sendall(b"\xff\xfe not JSON\n")
                    break
            except ConnectionRefusedError:
                time.sleep(0.01)
        second = pool.submit(ask, workers, 1, 30)
        assert first.result().all_in_place
        assert second.result().all_in_place


def test_a_port_of_ones_own_that_is_taken_is_named(addresses):
    workers = addresses(2)
    with listening(workers[0], lambda connection: None):
        found = ask(workers)
    assert "Address already in use" in found.listen_error or "address already in use" in found.listen_error
    assert not found.all_in_place


def test_other_versions_another_cluster_and_another_rank_are_found(addresses):
    workers = addresses(2)
    with listening(workers[1], other_doctor(workers, facts={**FACTS, "numpy": "1.26.4"})):
        finding = peer_exchange.agreement_finding(ask(workers))
    assert (finding.status, finding.exit_code) == ("fail", 64)
    assert "numpy 2.3.0 here and 1.26.4 there" in finding.seen
    with listening(workers[1], other_doctor([*workers, "third:1"])):
        (finding,) = fails(ask(workers))
    assert "has another cluster: 3 workers" in finding.seen
    with listening(workers[1], other_doctor(workers, index=0)):
        found = ask(workers)
    assert not found.all_in_place
    (finding,) = fails(found)
    assert f"at {workers[1]}, the address of worker 1, worker 0 answers" in finding.seen


# ------------------------------------------------------------------------------------------------------------- findings


def test_many_workers_with_one_trouble_are_one_line():
    workers = tuple(f"n{index}:1" for index in range(300))
    own = Peer(index=0, address=workers[0], state="answered", claims_index=0, workers=workers)
    others = (
        Peer(index=index, address=address, state="refused", detail="Connection refused")
        for index, address in enumerate(workers[1:], 1)
    )
    found = Exchange(cluster=cluster(workers), facts={}, peers=(own, *others), listen_error="")
    (finding,) = fails(found)
    assert "worker 4 (n4:1) and 295 more" in finding.seen

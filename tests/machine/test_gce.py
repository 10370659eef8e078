"""A machine that Google Compute Engine takes away is a run that saves and exits 42, told by a real HTTP server."""

from __future__ import annotations

import collections
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import SMALL_DIGITS

from launcher.checkpoints import CheckpointStore
from launcher.machine import gce
from launcher.worker.preemption import StopRequest

DEADLINE_SECONDS = 60


class MetadataServer:
    """Answers as GCE does; the first `failures` requests get an error or no answer. `asked` counts answers by name."""

    def __init__(self) -> None:
        self.failures = 0
        self.asked: collections.Counter[str] = collections.Counter()
        self._values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self._changed = threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def set(self, name: str, value: str) -> None:
        with self._changed:
            self._values[name] = value
            self._changed.notify_all()

    def wait_until(self, condition) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, DEADLINE_SECONDS)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.rpartition("/")[2]
        with self._changed:
            self._changed.notify_all()
            if self.failures:
                self.failures -= 1
                if self.failures % 2:
                    request.send_error(503)
                return  # else without an answer
            if request.headers["Metadata-Flavor"] != "Google" or not request.path.startswith(
                "/computeMetadata/v1/instance/"
            ):
                request.send_error(403)
                return
            self.asked[name] += 1
            value = self._values[name]
        request.send_response(200)
        request.end_headers()
        request.wfile.write(f"{value}\n".encode())


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    made = MetadataServer()
    yield made
    for name, (notice, _) in gce._NOTICES.items():
        made.set(name, notice)  # which ends the thread that asks for it
    made.stop()


@pytest.mark.parametrize(
    ("name", "harmless", "notice"),
    [
        ("preempted", "FALSE", "TRUE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_a_notice_asks_to_stop_and_nothing_before_it_does(
    server: MetadataServer, name: str, harmless: str, notice: str
) -> None:
    server.failures = 4
    told, reasons = threading.Event(), []

    def notify(reason: str) -> None:
        reasons.append(reason)
        told.set()

    gce.watch({gce.METADATA_HOST: server.address}, notify, seconds=0.01)
    server.wait_until(lambda: server.asked.keys() == {"preempted", "maintenance-event"})
    server.set(name, harmless)
    before = server.asked[name]
    server.wait_until(lambda: server.asked[name] > before + 1)
    assert reasons == []
    server.set(name, notice)
    assert told.wait(DEADLINE_SECONDS)
    assert len(reasons) == 1 and "GCE" in reasons[0]


def test_a_notice_given_before_the_start_is_seen(server: MetadataServer) -> None:
    server.set("preempted", "TRUE")
    told = threading.Event()
    gce.watch({gce.METADATA_HOST: server.address}, lambda reason: told.set())
    assert told.wait(DEADLINE_SECONDS)


def test_only_gce_is_asked(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert not gce.on_gce({}, product)
    product.write_text("KVM\n")
    assert not gce.on_gce({}, product)
    product.write_text("Google Compute Engine\n")
    assert gce.on_gce({}, product)
    assert gce.on_gce({"GCE_METADATA_HOST": "127.0.0.1:1"}, tmp_path / "none")


def test_a_signal_after_the_notice_is_the_first_signal() -> None:
    """GCE sends one some seconds later, which must not end the process while it saves."""
    stop = StopRequest()
    stop.notice("GCE is taking this machine away")
    assert stop()
    stop._heard(15)
    assert stop()


@pytest.mark.heavy
def test_a_preempted_machine_saves_the_step_and_exits_42(
    start_launcher, server: MetadataServer, tmp_path: Path
) -> None:
    started = start_launcher(
        f"--gin_file={SMALL_DIGITS}", f"--model_dir={tmp_path}/run", "--mode=train",
        *("--gin_param=train.steps = 100000", "--gin_param=train.checkpoint_every = 5"),
        env={"GCE_METADATA_HOST": server.address, "http_proxy": "http://127.0.0.1:9"},
    )  # fmt: skip
    store = CheckpointStore(f"{tmp_path}/run/checkpoints")
    started.wait_until(lambda: len(store.steps()) >= 1)
    server.wait_until(lambda: "preempted" in server.asked)
    server.set("preempted", "TRUE")
    finished = started.wait()
    assert finished.returncode == 42, finished.stderr
    assert "GCE is taking this machine away: finishing the step and saving" in finished.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("preempted", store.latest())

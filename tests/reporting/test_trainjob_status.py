"""The status of a TrainJob, as Kubeflow Trainer's server is told of it: over TLS, with the token that is in force."""

from __future__ import annotations

import datetime
import http.server
import json
import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import jsonschema
import pytest
from places import ROOT, SMALL_DIGITS

from launcher.reporting.sinks import RunStart
from launcher.reporting.trackers import TrainJobStatus

SCHEMA = json.loads((ROOT / "tests/jobs/trainer_v1alpha1.schemas.json").read_text())["TrainJob"]["properties"]["status"]
OF_RUN = RunStart(model_dir="run", plan={}, config="", step=0, total_steps=200)


class Trainer:
    """The server's part: takes one request after another, and answers with the next of `answers`, at last with 200."""

    def __init__(self, folder: Path):
        self.bodies: list[dict] = []
        self.tokens: list[str] = []
        self.answers: list[int] = []
        self._folder = folder
        pem, key = folder / "ca.crt", folder / "key"
        made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        made += ["-days", "2", "-keyout", str(key), "-out", str(pem), "-subj", "/CN=127.0.0.1"]
        for extension in ("subjectAltName=IP:127.0.0.1", "keyUsage=critical,digitalSignature,keyCertSign"):
            made += ["-addext", extension]
        subprocess.run(made, check=True, capture_output=True)
        self._server = http.server.HTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.give_token("first")

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/digits/status"
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.tokens.append(self.headers["Authorization"])
                self.send_response(outer.answers.pop(0) if outer.answers else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler

    def give_token(self, token: str) -> None:
        """As the kubelet does before the last one is out of date."""
        (self._folder / "token").write_text(f"{token}\n")

    @property
    def environ(self) -> dict[str, str]:
        path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/digits/status"
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self._server.server_port}{path}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self._folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self._folder / "token"),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def trainer(tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, for a certificate")
    server = Trainer(tmp_path)
    yield server
    server.close()


def status_of(body):
    """The status in a request, by the schema that it is kept under, with its numbers by name."""
    (status,) = body.values()
    assert body == {"trainerStatus": status}
    checker = jsonschema.validators.validator_for({"$schema": "http://json-schema.org/draft-04/schema#"})
    checker(SCHEMA).validate(body)
    assert datetime.datetime.fromisoformat(status["lastUpdatedTime"]).tzinfo is datetime.timezone.utc
    return status, {one["name"]: float(one["value"]) for one in status["metrics"]}


@pytest.mark.heavy
def test_a_run_in_a_trainjob_tells_how_far_it_is_and_how_good(trainer, run_launcher, tmp_path):
    flags = [f"--gin_file={SMALL_DIGITS}", f"--model_dir={tmp_path}/run", "--gin_param=train.log_every = 1"]
    done = run_launcher(*flags, env=trainer.environ)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (first, _), (last, numbers) = status_of(trainer.bodies[0]), status_of(trainer.bodies[-1])
    assert 0 <= first["progressPercentage"] < 100 == last["progressPercentage"]
    assert last["estimatedRemainingSeconds"] == 0
    assert numbers["eval/accuracy"] == pytest.approx(summary["metrics"]["eval"]["accuracy"], rel=1e-5)
    assert {"train/loss", "eval/loss"} < numbers.keys()
    assert set(trainer.tokens) == {"Bearer first"}


def test_a_server_that_refuses_is_one_warning_and_is_asked_again_with_the_newest_token(trainer, monkeypatch, caplog):
    trainer.answers = [403, 500]
    sink = TrainJobStatus(trainer.environ)
    now = [0.0]
    monkeypatch.setattr("launcher.reporting.trackers.time.monotonic", lambda: now[0])
    sink.started(OF_RUN)
    for step, second in ((10, 0.0), (20, 4.0), (40, 6.0), (100, 12.0)):
        now[0] = second
        sink.train({"step": step, "loss": float("nan"), "x" * 100: 1})
        trainer.give_token(f"at {step}")
    sink.close()
    statuses = [status_of(body) for body in trainer.bodies]
    assert [status["progressPercentage"] for status, _ in statuses] == [5, 20, 50]  # not more often than every 5 s
    assert trainer.tokens == ["Bearer first", "Bearer at 20", "Bearer at 40"]
    assert statuses[0][0].get("estimatedRemainingSeconds") is None
    assert statuses[-1][0]["estimatedRemainingSeconds"] == round(12 / 90 * 100)
    assert max(len(name) for name in statuses[0][1]) == 64
    assert len(caplog.messages) == 1 and "HTTP Error 403" in caplog.messages[0]


@pytest.mark.parametrize("missing", ["KUBEFLOW_TRAINER_SERVER_TOKEN", "KUBEFLOW_TRAINER_SERVER_CA_CERT"])
def test_without_its_token_or_another_certificate_nothing_is_told_and_nothing_ends(trainer, missing, caplog, tmp_path):
    other = tmp_path / "other"
    other.write_text("")
    sink = TrainJobStatus({**trainer.environ, missing: str(other / "gone" if "TOKEN" in missing else other)})
    sink.started(OF_RUN)
    sink.train({"step": 10, "loss": 1.0})
    sink.close()
    assert trainer.bodies == [] and len(caplog.messages) == 1

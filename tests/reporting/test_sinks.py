"""Sinks get every event of the chief's run, and none can end a training."""

from __future__ import annotations

import io
import math
import socket
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import UsageError
from launcher.main import main
from launcher.reporting import sinks
from launcher.reporting.reporter import Reporter
from launcher.reporting.sinks import RunStart, Sink
from launcher.reporting.summary import Stopwatch, make_summary
from launcher.reporting.trackers import MlflowSink, Prometheus, WandbSink

CONFIG = """\
# Parameters for train:
train.steps = 20
train.global_batch_size = 128
train.optimizer = @momentum
train.jit_compile = False
schedule.learning_rate = 0.1
train.freeze = ()
"""
HYPERPARAMETERS = {
    "train.steps": 20,
    "train.global_batch_size": 128,
    "train.optimizer": "@momentum",
    "train.jit_compile": False,
    "schedule.learning_rate": 0.1,
}
SUMMARY = make_summary(
    exit_code=0,
    error=None,
    metrics={},
    step=20,
    strategy="one_device",
    num_replicas=1,
    policy="float32",
    loss_scale=None,
    seconds=Stopwatch().seconds(),
)


class Kept(Sink):
    """Keeps what it is told; raises on request."""

    def __init__(self, raises: str = ""):
        self.told: list[tuple[str, Any]] = []
        self._raises = raises

    def _keep(self, name: str, what: Any) -> None:
        self.told.append((name, what))
        if name == self._raises:
            raise RuntimeError("no network")

    def started(self, run: RunStart) -> None:
        self._keep("started", run)

    def train(self, event: Mapping[str, Any]) -> None:
        self._keep("train", event["step"])

    def evaluation(self, event: Mapping[str, Any]) -> None:
        self._keep("evaluation", event["step"])

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._keep("finished", summary["status"])


def report_to(*sinks: Sink, model_dir: Path, is_chief: bool = True) -> None:
    reporter = Reporter(
        model_dir=str(model_dir),
        total_steps=20,
        is_chief=is_chief,
        stream=io.StringIO(),
        sinks=sinks,
        config=lambda: CONFIG,
    )
    reporter.plan({"strategy": "one_device"})
    reporter.train({"step": 10, "loss": 0.5, "accuracy": 0.25})
    reporter.train({"step": 20, "loss": 0.25, "accuracy": 0.5})
    reporter.evaluation({"step": 20, "loss": 0.125, "accuracy": 0.75, "top@5": 0.875})
    reporter.finish(SUMMARY)


def test_a_sink_is_told_of_the_plan_every_event_and_the_end(tmp_path: Path) -> None:
    sink = Kept()
    report_to(sink, model_dir=tmp_path)
    (name, run), *rest = sink.told
    assert (name, run.plan, run.hyperparameters) == ("started", {"strategy": "one_device"}, HYPERPARAMETERS)
    assert rest == [("train", 10), ("train", 20), ("evaluation", 20), ("finished", "completed")]


def test_only_the_chief_has_sinks(tmp_path: Path) -> None:
    sink = Kept()
    report_to(sink, model_dir=tmp_path, is_chief=False)
    assert sink.told == []


def test_a_sink_that_fails_lacks_that_event_and_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Kept(raises="train"), Kept()
    report_to(broken, whole, model_dir=tmp_path)
    assert broken.told[1:] == whole.told[1:] and len(whole.told) == 5
    assert caplog.messages == [
        "Kept lacks events of this run: its train() raised RuntimeError: no network",
        "Kept lacks 2 events of this run",
    ]


def test_a_sink_that_cannot_start_is_tried_again_with_the_next_event(tmp_path: Path) -> None:
    sink = Kept()
    failures = iter([ConnectionError("refused"), ConnectionError("refused")])

    def started(run: RunStart) -> None:
        for error in failures:
            raise error
        Kept.started(sink, run)

    sink.started = started  # type: ignore[method-assign]
    report_to(sink, model_dir=tmp_path)
    assert [name for name, _ in sink.told] == ["started", "train", "evaluation", "finished"]
    assert sink.told[1] == ("train", 20)


@pytest.mark.parametrize("silent", ["started", "train", "finished"])
def test_a_sink_that_never_answers_holds_up_no_step_and_not_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    monkeypatch.setattr(sinks, "_PATIENCE_SECONDS", 0.25)
    monkeypatch.setattr(sinks, "_MOST_WAITING", 4)  # more than a run of this test ever has
    answer = threading.Event()
    sink, whole = Kept(), Kept()
    setattr(sink, silent, lambda what: answer.wait(60))
    try:
        report_to(sink, whole, model_dir=tmp_path)
        assert len(whole.told) == 5
        said = {"started": "has not started after", "train": "lacks", "finished": "has not answered within"}[silent]
        assert any(message.startswith(f"Kept {said}") for message in caplog.messages), caplog.messages
        assert "Kept has not answered within 0.25 s at the end, and is left" in caplog.messages
    finally:
        answer.set()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 3


def test_no_more_than_so_many_events_wait_for_a_sink(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_PATIENCE_SECONDS", 0.25)
    monkeypatch.setattr(sinks, "_MOST_WAITING", 1)
    answer, sink = threading.Event(), Kept()
    sink.started = lambda run: answer.wait(60)  # type: ignore[method-assign]
    try:
        report_to(sink, model_dir=tmp_path)
        assert "Kept does not answer: 1 events wait for it, and it gets no more until it does" in caplog.messages
    finally:
        answer.set()


def test_prometheus_reads_the_newest_numbers(tmp_path: Path) -> None:
    sink = Prometheus(0)
    sink.started(RunStart(model_dir="run", plan={}, config="", step=0, total_steps=20))
    sink.train({"step": 10, "loss": 0.5, "top/5": 1})
    sink.evaluation({"step": 10, "loss": math.nan})
    url = f"http://127.0.0.1:{sink.port}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        lines = answer.read().decode().splitlines()
    sink.close()
    numbers = dict(line.split() for line in lines if not line.startswith("#"))
    assert [line for line in lines if "TYPE" in line] == [f"# TYPE {name} gauge" for name in numbers]
    assert numbers == {
        "launcher_step": "10.0",
        "launcher_total_steps": "20.0",
        "launcher_train_step": "10.0",
        "launcher_train_loss": "0.5",
        "launcher_train_top_5": "1.0",
        "launcher_eval_step": "10.0",
        "launcher_eval_loss": "NaN",
    }


def test_a_port_in_use_is_one_message(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["x", "--gin_file=resnet_cpu.gin", f"--model_dir={tmp_path}/run", f"--metrics_port={port}"])
    assert code == 64
    told = capfd.readouterr()
    assert told.err.splitlines()[-1] == f"error: --metrics_port={port}: Address already in use; choose another port"
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, sink in (("wandb", WandbSink()), ("mlflow", MlflowSink())):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(UsageError, match=rf"train\.sinks needs {package}, .*\[{package}\]"):
            report_to(sink, model_dir=tmp_path / package)


def test_a_sink_that_is_bound_without_parentheses_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = [f"--model_dir={tmp_path}/run", "--gin_param=train.sinks = [@WandbSink]", "--dry_run"]
    assert main(["x", "--gin_file=resnet_cpu.gin", *flags]) == 64
    assert "train.sinks: " in capfd.readouterr().err


def test_wandb_keeps_a_run_offline_as_its_own_variables_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(sinks, "_PATIENCE_SECONDS", 120)  # its import takes seconds
    said = {"MODE": "offline", "PROJECT": "theirs", "NAME": "named", "RUN_ID": "abc123"}
    for name, value in said.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    asked: dict[str, Any] = {}
    init = wandb.init

    def keeping(**settings: Any) -> Any:
        run = init(**settings)
        asked.update(project=run.project, name=run.name, id=run.id)
        return run

    monkeypatch.setattr(wandb, "init", keeping)
    report_to(WandbSink(), model_dir=tmp_path)
    assert asked == {"project": "theirs", "name": "named", "id": "abc123"}
    assert list(tmp_path.glob("wandb/offline-run-*-abc123/*.wandb"))


def test_mlflow_keeps_a_run_in_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.setattr(sinks, "_PATIENCE_SECONDS", 120)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    for _ in range(2):  # attempts of one folder
        report_to(MlflowSink(), model_dir=tmp_path / "run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("theirs").experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params == {name: str(value) for name, value in HYPERPARAMETERS.items()}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(10, 0.5), (20, 0.25)] * 2
    assert run.data.metrics["eval/accuracy"] == 0.75 and run.data.metrics["eval/top_5"] == 0.875


def test_tensorboard_has_the_plan_the_configuration_and_the_hyperparameters(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    report_to(model_dir=tmp_path)
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "train"))
    board.Reload()
    plan, config = (board.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in ("plan", "config"))
    assert "| strategy | one_device |" in plan and "    train.steps = 20" in config
    from tensorboard.plugins.hparams import plugin_data_pb2

    content = board.summary_metadata["_hparams_/session_start_info"]

    found = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content).session_start_info.hparams
    assert found["schedule.learning_rate"].number_value == 0.1 and found["train.optimizer"].string_value == "@momentum"

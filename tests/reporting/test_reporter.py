"""The reporter reaches every place from the chief, and none from anybody else."""

from __future__ import annotations

import io
import json
import os
import resource
from pathlib import Path

import pytest
from report_page import Page

from launcher.errors import EXIT_FAILED
from launcher.reporting.metrics_file import read_events
from launcher.reporting.reporter import Reporter
from launcher.reporting.run_folder import RunRecord
from launcher.reporting.summary import Stopwatch, SummaryWriteError, make_summary

TRAIN = {"step": 10, "loss": 0.5, "accuracy": 0.25, "examples_per_second": 100.0, "loss_scale": 1.0}
SUMMARY = make_summary(
    exit_code=0,
    error=None,
    metrics={"eval": {"loss": 0.125}},
    step=20,
    strategy="one_device",
    num_replicas=1,
    policy="float32",
    loss_scale=None,
    seconds=Stopwatch().seconds(),
)


def report_a_run(reporter: Reporter, first_step: int = 0) -> None:
    reporter.plan({"strategy": "one_device"})
    reporter.begin(RunRecord(plan={"strategy": "one_device"}))
    reporter.truncate_after(first_step)
    for step in range(first_step + 5, 21, 5):
        reporter.train({**TRAIN, "step": step})
        reporter.flush()
    reporter.note("saved")
    reporter.evaluation({"step": 20, "loss": 0.125})
    reporter.finish(SUMMARY)
    reporter.close()


def test_the_chief_reports_everywhere(tmp_path: Path) -> None:
    stream = io.StringIO()
    report_a_run(Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=stream))
    assert "strategy  one_device" in stream.getvalue()
    assert "step 20/20  loss 0.5  accuracy 0.25  100 examples/s" in stream.getvalue()
    assert "saved\nevaluation at step 20  loss 0.125\n" in stream.getvalue()
    assert [event["step"] for event in read_events(str(tmp_path))] == [5, 10, 15, 20, 20]
    assert sorted(os.listdir(tmp_path / "tensorboard")) == ["eval", "train"]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    page = Page.of(tmp_path)
    assert "completed" in page.words and "strategy one_device" in page.section("Plan")
    written = ["metrics.jsonl", "report.html", "run.json", "summary.json", "tensorboard"]
    assert sorted(os.listdir(tmp_path)) == written


def test_a_plan_that_an_attempt_before_has_shown_is_not_shown_again_but_for_its_notes(tmp_path: Path) -> None:
    stream = io.StringIO()
    reporter = Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=stream)
    reporter.plan({"strategy": "one_device", "note 1": "2 of 3 workers are there"}, again=True)
    reporter.begin(RunRecord(plan={"strategy": "one_device"}))
    reporter.finish(SUMMARY)
    assert "note 1  2 of 3 workers are there" in stream.getvalue()
    assert "one_device" not in stream.getvalue()


def test_the_end_of_a_run_is_shown_with_what_can_be_done_next_if_it_was_completed(tmp_path: Path) -> None:
    seconds = {"startup": 1.0, "compile": 6.0, "train": 12.5, "total": 20.0}
    shown = []
    for summary in ({**SUMMARY, "seconds": seconds}, {**SUMMARY, "exit_code": EXIT_FAILED, "status": "failed"}):
        stream = io.StringIO()
        reporter = Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=stream)
        reporter.finish(summary, best=("accuracy", 0.91234, 15), commands={"export": "python -m launcher.main"})
        shown.append(stream.getvalue().splitlines())
    assert shown[0] == [
        "completed  step 20 of 20 in 0:20",
        "best       accuracy 0.9123 at step 15",
        "time       train 62%, compile 30%, startup 5%, rest 3%",
        f"report     {tmp_path}/report.html",
        "export:",
        "  python -m launcher.main",
    ]
    assert shown[1][0].startswith("failed") and not any("launcher.main" in line for line in shown[1])


def test_other_workers_touch_and_show_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    report_a_run(Reporter(model_dir=str(tmp_path / "run"), total_steps=20, is_chief=False, stream=stream))
    assert list(tmp_path.iterdir()) == []
    assert stream.getvalue() == ""
    assert capfd.readouterr().out == ""


def test_a_plan_alone_touches_no_disk(tmp_path: Path) -> None:
    reporter = Reporter(model_dir=str(tmp_path / "run"), total_steps=20, is_chief=True, stream=io.StringIO())
    reporter.plan({"strategy": "one_device"})
    reporter.note("that is all")
    reporter.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_and_resumed_has_every_step_once_in_every_place(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    killed = Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=io.StringIO())
    for step in (5, 10, 15):
        killed.train({**TRAIN, "step": step})
    killed.close()  # what its sinks have taken by then is written
    report_a_run(Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=io.StringIO()), first_step=10)
    train = [event["step"] for event in read_events(str(tmp_path)) if event["split"] == "train"]
    assert train == [5, 10, 15, 20]
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "train"))
    board.Reload()
    assert [point.step for point in board.Scalars("loss")] == train


def test_events_wait_for_room_on_a_disk_that_is_full_and_that_is_said_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    reporter = Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=stream)
    reporter.train({**TRAIN, "step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size, limits[1]))
    try:
        for step in (2, 3, 4):
            reporter.train({**TRAIN, "step": step})
            reporter.flush()
        assert [event["step"] for event in read_events(str(tmp_path))] == [1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reporter.evaluation({"step": 4, "loss": 0.125})
    reporter.finish(SUMMARY)
    assert [event["step"] for event in read_events(str(tmp_path))] == [1, 2, 3, 4, 4]
    assert stream.getvalue().count("metrics.jsonl: ") == 1
    assert "Training goes on; the events wait in memory" in stream.getvalue()
    assert "The events that waited for room have been written." in stream.getvalue()


def test_a_report_that_fails_does_not_cost_the_summary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "report.html").mkdir()
    Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=io.StringIO()).finish(SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 20
    assert "report of this run could not be written" in caplog.text


def test_a_summary_that_fails_ends_only_a_run_that_had_not_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "summary.json").mkdir()
    reporter = Reporter(model_dir=str(tmp_path), total_steps=20, is_chief=True, stream=io.StringIO())
    reporter.finish({**SUMMARY, "status": "failed", "exit_code": EXIT_FAILED})
    assert "Could not write" in caplog.text
    with pytest.raises(SummaryWriteError, match=r"summary\.json.*run it again"):
        reporter.finish(SUMMARY)

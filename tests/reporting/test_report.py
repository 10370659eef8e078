"""report.html is one self-contained page that says what the files of a folder say, of any folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_page import Page

from launcher import main as entry
from launcher.reporting import run_folder
from launcher.reporting.attempts import AttemptsFile
from launcher.reporting.metrics_file import MetricsFile
from launcher.reporting.report import LiveReport, write_report
from launcher.reporting.run_folder import Change, RunRecord, write_record

SUMMARY: dict[str, Any] = {
    "status": "failed",
    "exit_code": 70,
    "error": "loss <nan> & gone </script>",
    "metrics": {"train": {"loss": None}, "eval": {"accuracy": 0.96875}},
    "step": 60,
    "seconds": {"startup": 2.0, "train": 12.34, "total": 20.0},
    "versions": {"tensorflow": "2.21.0"},
}
BEGAN = 1_700_000_000.0
RECORD = RunRecord(
    started=BEGAN,
    command="python -m launcher.main --gin_file=some.gin",
    recipe=("some.gin",),
    changes=(Change(name="train.steps", recipe="50", run="60"),),
    plan={"strategy": "one_device (<auto>)"},
    total_steps=60,
    steps_per_epoch=20.0,
    best_metric="accuracy",
)
ATTEMPTS = [
    {
        "number": 1,
        "started": BEGAN,
        "ended": BEGAN + 37,
        "ended_by": "worker 1 was killed by SIGKILL",
        "from_step": 0,
        "to_step": 35,
        "seconds": {"train": 30.0},
    },
    {"number": 2, "started": BEGAN + 40, "ended": BEGAN + 70, "ended_by": "done", "from_step": 30, "to_step": 60},
]


def log(folder: Path) -> None:
    """Six log events and two evaluations, the first of them the better one."""
    now = [BEGAN]
    metrics = MetricsFile(str(folder), clock=lambda: now[0])
    for step in range(10, 61, 10):
        now[0] = BEGAN + step
        metrics.append(
            "train",
            {
                "step": step,
                "loss": float("nan") if step == 40 else 1 / step,
                "learning_rate": 0.1,
                "loss_scale": 2.0**15 / (2 if step >= 40 else 1),
                "skipped_steps": 1 if step >= 40 else 0,
                "examples_per_second": 100.0 + step,
            },
        )
        if step in (30, 60):
            metrics.append("eval", {"step": step, "loss": 1 / step, "accuracy": 0.96875 if step == 30 else 0.9})


def of(folder: Path, *, record: RunRecord | None = RECORD, **summary: Any) -> Page:
    """The page of a run with these files."""
    folder.mkdir(parents=True, exist_ok=True)
    if record is not None:
        run_folder.write_record(folder, record)
    log(folder)
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    write_report(folder)
    return Page.of(folder)


def panel(page: Page, title: str) -> dict[str, Any]:
    (found,) = [one for one in page.data["panels"]["curves"] if one["title"].partition(",")[0] == title]
    return found


def test_the_page_holds_everything_itself_and_is_small(tmp_path: Path) -> None:
    page = of(tmp_path)
    assert page.links == []
    text = (tmp_path / "report.html").read_text()
    assert "uPlot" in text and "Permission is hereby granted" in text
    assert len(text) < 120_000


def test_the_page_says_what_came_out_and_of_what(tmp_path: Path) -> None:
    page = of(tmp_path)
    assert "failed at step 60 of 60" in page.words
    assert "loss <nan> & gone </script>" in page.words
    assert "0.9688 accuracy, best evaluation, step 30" in page.words
    assert "python -m launcher.main --gin_file=some.gin" in page.words
    assert "Devices one_device (<auto>)" in page.words
    assert "tensorflow 2.21.0" in page.words
    assert "train.steps 50 60" in page.section("Changed from the recipe")
    assert "train 12.3 s" in page.section("Where the time went")


def test_curves_run_over_steps_time_and_epochs_without_what_never_moves(tmp_path: Path) -> None:
    page = of(tmp_path)
    train = page.data["groups"]["train"]
    assert train["step"] == [10, 20, 30, 40, 50, 60]
    assert train["time"] == [10, 20, 30, 40, 50, 60]
    assert train["epoch"] == [0.5, 1, 1.5, 2, 2.5, 3]
    assert page.data["groups"]["eval"]["step"] == [30, 60]
    assert [one["title"] for one in page.data["panels"]["curves"]] == [
        "Accuracy", "Loss", "Loss scale, 1 skipped", "Examples per second",
    ]  # fmt: skip
    assert "Constant: learning rate 0.1." in page.section("Curves")
    assert panel(page, "Loss")["series"][0]["y"][3] is None  # NaN is a gap, not a number


def test_the_loss_scale_shows_the_steps_that_were_skipped(tmp_path: Path) -> None:
    assert [mark["step"] for mark in panel(of(tmp_path), "Loss scale")["marks"]] == [40]


def test_attempts_are_listed_with_their_cost_and_marked_on_the_curves(tmp_path: Path) -> None:
    goodput = {"train": 60.0, "lost": 5.0, "down": 3.0, "input_wait": 2.0}
    page = of(tmp_path, attempts=ATTEMPTS, goodput=goodput, goodput_share=60 / 70)
    said = page.section("Attempts")
    assert "from 0 to 35 worker 1 was killed by SIGKILL 5 3.0 s" in said
    (mark,) = page.data["marks"]
    assert (mark["step"], mark["time"], mark["label"]) == (30, 37, "attempt 2")
    assert "1 min 10 s wall time" in page.words
    assert "85.7% goodput" in page.words
    assert "lost to repeated steps 5.0 s, 7.1%" in page.section("Where the time went")


def test_the_workers_stand_beside_one_another(tmp_path: Path) -> None:
    times = [{"worker": 0, "own_seconds": 0.25, "input_seconds": 0.01}, {"worker": 1, "own_seconds": 0.5}]
    said = of(tmp_path, workers=times, slow_worker=1).section("Workers")
    assert "Own time a step" in said and "0 250 ms 10 ms 1 500 ms" in said
    assert "Worker 1 is a straggler." in said


def test_a_folder_of_an_older_version_has_a_page(tmp_path: Path) -> None:
    page = of(tmp_path, record=None)
    assert "failed at step 60" in page.words
    assert "0.9688 accuracy, best evaluation, step 30" in page.words


def test_a_run_that_failed_before_its_first_event_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    write_report(tmp_path)
    page = Page.of(tmp_path)
    assert "Nothing was measured." in page.words
    assert "loss <nan> & gone" in page.words


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    for name in ("run.json", "samples.json", "config.gin"):
        (tmp_path / name).write_bytes(b'{"rows": \xff')
    page = of(tmp_path, record=None)
    assert page.section("Samples") == ""


def test_what_a_newer_version_has_added_is_left_out(tmp_path: Path) -> None:
    of(tmp_path)
    found = json.loads((tmp_path / "run.json").read_text())
    found["changes"][0]["by"] = "--gin_param"
    found["changes"] += [{"binding": "of another form"}, "train.seed"]
    found |= {"hosts": ["one"]}
    (tmp_path / "run.json").write_text(json.dumps(found))
    record = run_folder.read_record(tmp_path)
    assert record is not None and record.changes == RECORD.changes
    assert "train.steps" in write_report(tmp_path).read_text()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, for many changes of its files."""
    folder = tmp_path_factory.mktemp("kept")
    seconds = {"startup": 1.0, "train": 7.0, "total": 8.0}
    file = AttemptsFile(str(folder), {"LAUNCHER_ATTEMPT": "1"}, lambda: dict(seconds))
    file.begin(0)
    file.at(60)
    (folder / "samples.json").write_text(json.dumps({"step": 60, "rows": [["given", "written", "expected"]]}))
    of(folder, attempts=ATTEMPTS, goodput={"train": 30.0}, goodput_share=0.5)
    return folder


@settings(max_examples=200)
@given(data=st.data())
def test_whatever_stands_in_its_files_there_is_a_page(kept: Path, data: st.DataObject) -> None:
    """Any value in the place of any other, at any depth of any file: what is left of the page is written."""
    name = data.draw(st.sampled_from(["run.json", "summary.json", "attempts.jsonl", "metrics.jsonl", "samples.json"]))
    before = (kept / name).read_text()
    first, *rest = [before] if name.endswith(".json") else before.splitlines()
    place: Any = (whole := json.loads(first))
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        (kept / name).write_text("\n".join([json.dumps(whole), *rest]))
        assert f"<h1>{kept.name}</h1>" in write_report(kept).read_text()
    finally:
        (kept / name).write_text(before)


def test_a_pipe_among_its_files_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("run.json", "summary.json", "metrics.jsonl", "attempts.jsonl", "samples.json"):
        os.mkfifo(tmp_path / name)
    write_report(tmp_path)


def test_a_summary_of_an_earlier_attempt_does_not_speak_for_one_that_runs(tmp_path: Path) -> None:
    of(tmp_path)
    os.utime(tmp_path / "summary.json", (BEGAN, BEGAN))
    run_folder.write_record(tmp_path, dataclasses.replace(RECORD, started=BEGAN + 100))
    write_report(tmp_path)
    assert "unfinished" in Page.of(tmp_path).words
    assert run_folder.read(tmp_path).began == BEGAN, "its events are those of the first attempt"


def test_a_long_run_stays_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    lines = (
        json.dumps(
            {"step": step, "split": "train", "loss": 9.0 if step == 7777 else 1.0 + step % 7 / 10, "time": BEGAN}
        )
        for step in range(1, 20_001)
    )
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    write_report(tmp_path)
    page = Page.of(tmp_path)
    assert len(page.data["groups"]["train"]["step"]) <= 1500
    assert max(panel(page, "Loss")["series"][0]["y"]) == 9.0


def test_the_page_is_written_while_it_trains_and_not_too_often(tmp_path: Path) -> None:
    now = [0.0]
    live = LiveReport(str(tmp_path), clock=lambda: now[0])
    live.begin(RECORD)
    log(tmp_path)
    live.event()
    assert "running at step 60 of 60" in Page.of(tmp_path).words
    (tmp_path / "report.html").unlink()
    now[0] = 29.0
    live.event()
    assert not (tmp_path / "report.html").exists()
    now[0] = 31.0
    live.event()
    assert (tmp_path / "report.html").exists()


def test_sentences_that_the_model_wrote_stand_beside_what_was_expected(tmp_path: Path) -> None:
    LiveReport(str(tmp_path)).samples(30, [("one", "eins", "eins"), ("two", "drei", "zwei")])
    page = of(tmp_path)
    assert "one eins the same two drei zwei" in page.section("Samples")


def test_pictures_have_what_the_model_took_them_for(tmp_path: Path) -> None:
    picture = "data:image/png;base64,AAAA"
    LiveReport(str(tmp_path)).samples(30, [(picture, "cat", "cat"), (picture, "<dog>", "cat")])
    page = of(tmp_path)
    assert "cat <dog> , is cat" in page.section("Samples")
    assert page.text.count(f'<img src="{picture}" alt="cat">') == 2


def test_attempts_show_while_the_last_one_runs(tmp_path: Path) -> None:
    """Of a job that was killed with all its processes nothing but the chief's own lines is there."""
    for started, first, last in ((BEGAN, 0, 35), (BEGAN + 40, 30, 50)):
        seconds = {"train": 0.0, "total": 1.0}
        file = AttemptsFile(str(tmp_path), {"LAUNCHER_ATTEMPT": str(started)}, lambda now=seconds: dict(now))
        file.begin(first)
        seconds |= {"train": 7.0, "total": 8.0}
        file.at(last)
    log(tmp_path)
    write_report(tmp_path, running=True)
    page = Page.of(tmp_path)
    assert "from 0 to 35 killed, or its machine failed: it left no word" in page.section("Attempts")
    assert "from 30 to 50 running" in page.section("Attempts")
    assert "lost to repeated steps" in page.section("Where the time went")


def test_the_wall_time_ends_with_the_last_attempt_and_not_with_a_later_evaluation(tmp_path: Path) -> None:
    seconds = {"train": 0.0, "total": 1.0}
    file = AttemptsFile(str(tmp_path), {}, lambda: dict(seconds))
    file.begin(0)
    seconds |= {"train": 7.0, "total": 8.0}
    file.end(60, "done")
    write_record(tmp_path, dataclasses.replace(RECORD, started=time.time() - 8))
    evaluated = MetricsFile(str(tmp_path), clock=lambda: time.time() + 1000)
    evaluated.append("eval", {"step": 60, "loss": 0.5, "accuracy": 0.9})
    write_report(tmp_path)
    assert re.search(r"\b[78]\.\d s wall time", Page.of(tmp_path).words)


def test_the_mode_writes_the_page_of_any_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of(tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    assert entry.main(["launcher", "--mode=report", f"--model_dir={tmp_path / 'run'}"]) == 0
    assert str(tmp_path / "run" / "report.html") in capsys.readouterr().out
    assert "failed at step 60" in Page.of(tmp_path / "run").words


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mode=report"], "say of which folder"),
        (["--mode=report", "--model_dir=none"], "--model_dir=none: there is no such folder"),
        (["--mode=report", "--model_dir=."], "nothing of a run is in it"),
        (["--mode=report", "--model_dir=.", "--replicas=2"], "reads files only"),
        (["--mode=compare", "--run=one"], "name two folders or more"),
        (["--mode=compare", "--run=one", "--run=two"], "one: there is no such folder"),
        (["--mode=compare", "one", "two"], "one: there is no such folder"),
        (["--mode=train", "one"], "unexpected argument 'one'"),
        (["--mode=train", "--run=one"], "--run is for --mode=compare"),
    ],
)
def test_what_cannot_be_reported_on_is_one_message(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert entry.main(["launcher", *flags]) == 64
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert os.listdir(tmp_path) == []


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_the_curves(tmp_path: Path) -> None:
    of(tmp_path, attempts=ATTEMPTS)
    command = [CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", (tmp_path / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("<canvas") == 4
    assert 'class="u-legend' in done.stdout

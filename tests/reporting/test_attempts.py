"""Attempts and goodput, against sums made by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from launcher.reporting import attempts
from launcher.reporting.attempts import AttemptsFile, add_end, reckon


def line(kind, attempt, time, step=None, *, started=0.0, ended_by=None, **seconds):
    record = {"is": kind, "attempt": attempt, "time": time, "started": started}
    if step is not None:
        record |= {"step": step, "seconds": seconds}
    return json.dumps(record | ({"ended_by": ended_by} if ended_by else {})) + "\n"


@pytest.fixture
def reckoned(tmp_path):
    def of(*lines):
        (tmp_path / "attempts.jsonl").write_text("".join(lines))
        return reckon(str(tmp_path))

    return of


KILLED = (
    line("begin", "a", 10.0, 0, started=2.0, startup=8.0),
    line("at", "a", 15.0, 1, started=2.0, startup=8.0, compile=5.0),
    line("at", "a", 25.0, 11, started=2.0, startup=8.0, compile=5.0, train=8.0, input_wait=2.0),
    line("at", "a", 35.0, 21, started=2.0, startup=8.0, compile=5.0, train=16.0, input_wait=4.0),
)
KILLED_AS_KNOWN = (*KILLED, line("end", "a", 40.0, started=0.0, ended_by="worker 1 was killed by SIGKILL"))


def goes_on(step, started=50.0):
    return (
        line("begin", "b", started + 4, step, started=started, startup=4.0),
        line("end", "b", started + 14, 31, started=started, ended_by="done", startup=4.0, train=10.0),
    )


def test_seconds_of_steps_that_were_repeated_are_lost_and_those_between_attempts_down(reckoned):
    found = reckoned(*KILLED_AS_KNOWN, *goes_on(11))
    assert found["goodput"] == {
        "start-up": 2.0 + 8.0 + 4.0,  # 2 before the chief said a word
        "compile": 5.0, "train": 8.0 + 10.0, "input_wait": 2.0, "evaluate": 0.0, "checkpoint": 0.0,
        "lost": 10.0 + 5.0,  # steps 12 to 21, and what the last line of the chief does not know
        "down": 10.0,
    }  # fmt: skip
    assert found["goodput_share"] == 18.0 / 64.0
    one, two = found["attempts"]
    assert (one["from_step"], one["to_step"], one["ended_by"]) == (0, 21, "worker 1 was killed by SIGKILL")
    assert (one["started"], one["ended"], two["started"], two["ended"]) == (0.0, 40.0, 50.0, 64.0)
    assert [attempt["number"] for attempt in (one, two)] == [1, 2]


def test_between_two_lines_all_steps_are_taken_to_last_as_long(reckoned):
    assert reckoned(*KILLED_AS_KNOWN, *goes_on(16))["goodput"]["lost"] == 5.0 + 5.0


def test_an_older_checkpoint_than_the_attempt_before_began_from_loses_of_earlier_attempts_too(reckoned):
    third = (
        line("begin", "c", 102.0, 6, started=100.0, startup=2.0),
        line("end", "c", 103.0, 7, started=100.0, ended_by="done", startup=2.0, train=1.0),
    )
    second = (*goes_on(11)[:1], line("at", "b", 64.0, 31, started=50.0, startup=4.0, train=10.0))
    found = reckoned(*KILLED_AS_KNOWN, *second, *third)
    assert found["goodput"]["train"] == pytest.approx(4.0 + 0.0 + 1.0)
    assert found["goodput"]["lost"] == pytest.approx(5.0 + 15.0 + 10.0)


def test_without_a_supervisor_an_attempt_lasts_until_its_last_line(reckoned):
    one, _ = reckoned(*KILLED, *goes_on(21))["attempts"]
    assert one["ended"] == 35.0 and one["ended_by"].startswith("killed")


def test_the_time_after_a_run_that_was_done_is_not_down(reckoned):
    found = reckoned(*goes_on(0, started=0.0), *(text.replace('"b"', '"c"') for text in goes_on(31, started=1000.0)))
    assert found["goodput"]["down"] == 0.0 and found["goodput_share"] == 20.0 / 28.0


def test_an_attempt_that_never_began_counts_and_stood_where_the_next_one_began(reckoned):
    found = reckoned(line("end", "x", 20.0, started=0.0, ended_by="worker 0 did not start"), *goes_on(7))
    assert found["attempts"][0]["from_step"] == found["attempts"][0]["to_step"] == 7
    assert found["goodput"]["start-up"] == 24.0 and found["goodput"]["down"] == 30.0


def test_the_attempt_that_is_under_way_is_said_to_run(reckoned):
    assert reckoned(*KILLED)["attempts"][-1]["ended_by"] == "running"


@pytest.mark.parametrize(
    "broken", ["{", "[1]\n", '{"is": "at"}\n', '{"is": "at", "attempt": "a", "time": null, "started": 1, "step": 1}\n']
)
def test_broken_lines_are_passed_over(reckoned, broken):
    assert reckoned(*KILLED, broken) == reckoned(*KILLED)


def test_a_line_after_half_of_one_is_whole(tmp_path: Path):
    (tmp_path / "attempts.jsonl").write_text(KILLED[0] + KILLED[1][:20])
    add_end(str(tmp_path), attempt="a", started=1.0, seconds=9.0, ended_by="worker 0 was killed by SIGKILL")
    (only,) = reckon(str(tmp_path))["attempts"]
    assert only["ended_by"] == "worker 0 was killed by SIGKILL" and only["started"] == 1.0


def test_the_chiefs_lines_and_the_supervisors_are_of_one_attempt(tmp_path: Path):
    file = AttemptsFile(str(tmp_path), {attempts.ATTEMPT: "job/1"}, lambda: {"startup": 1.0, "total": 1.0})
    file.begin(0)
    for step in range(100):
        file.at(step, often=True)
    add_end(str(tmp_path), attempt="job/1", started=0.0, seconds=2e9, ended_by="stopped by SIGTERM")
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) < 50
    (only,) = reckon(str(tmp_path))["attempts"]
    assert only["ended_by"] == "stopped by SIGTERM"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_in_the_middle_of_an_attempt_changes_no_duration(tmp_path: Path, monkeypatch, step):
    now, seconds = [1000.0], {"startup": 4.0, "train": 0.0, "total": 4.0}
    monkeypatch.setattr(time, "time", lambda: now[0])
    file = AttemptsFile(str(tmp_path), {attempts.ATTEMPT: "job/1"}, seconds.copy)
    file.begin(0)
    seconds.update(train=20.0, total=24.0)
    now[0] += 20.0 + step
    file.at(20)
    add_end(str(tmp_path), attempt="job/1", started=995.0, seconds=30.0, ended_by="worker 1 was killed by SIGKILL")
    found = reckon(str(tmp_path))
    assert found["attempts"][0]["ended"] - found["attempts"][0]["started"] == 30.0
    assert {name: value for name, value in found["goodput"].items() if value} == {
        "start-up": 1.0 + 4.0, "train": 20.0, "lost": 5.0,
    }  # fmt: skip


def test_where_a_run_goes_back_another_attempt_begins_and_the_repeated_steps_are_lost(tmp_path: Path):
    seconds = {"startup": 4.0, "train": 0.0, "total": 4.0}
    file = AttemptsFile(str(tmp_path), {attempts.ATTEMPT: "job/1"}, seconds.copy)
    file.begin(0)
    seconds.update(train=20.0, total=24.0)
    file.end(20, "step 19: spike")
    file.begin_again(15)
    seconds.update(train=50.0, total=54.0)
    file.at(45)
    add_end(str(tmp_path), attempt="job/1", started=0.0, seconds=2e9, ended_by="worker 1 was killed by SIGKILL")
    found = reckon(str(tmp_path))
    one, two = found["attempts"]
    assert (one["from_step"], one["to_step"], one["ended_by"]) == (0, 20, "step 19: spike")
    assert (two["from_step"], two["to_step"], two["ended_by"]) == (15, 45, "worker 1 was killed by SIGKILL")
    assert (one["seconds"]["train"], one["seconds"]["lost"]) == (15.0, 5.0)
    assert two["seconds"]["train"] == 30.0


def test_without_a_file_there_is_no_share(tmp_path: Path):
    assert reckon(str(tmp_path)) == {
        "attempts": [],
        "goodput": dict.fromkeys(attempts.GOODPUT, 0.0),
        "goodput_share": None,
    }
    assert attempts.describe(reckon(str(tmp_path))) == ""

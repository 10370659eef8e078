"""--on_event: what the command is told, and that a job neither waits for it nor ends by it."""

from __future__ import annotations

import json
import sys

import pytest
from launched import fault

KEEP = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read())"


@pytest.fixture
def keeping(tmp_path):
    """The flag of a command that keeps what it is told, and a function that reads it."""
    script, kept = tmp_path / "keep.py", tmp_path / "told"
    script.write_text(KEEP)
    return f"--on_event={sys.executable} {script} {kept}", lambda: list(map(json.loads, kept.read_text().splitlines()))


def test_a_restart_and_the_end_are_told(run_job, keeping):
    flag, told = keeping
    _, finished = run_job(flag, faults=[fault("leave", code=9)], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    restart, end = sorted(told(), key=lambda event: event["time"])
    assert (restart["event"], restart["attempts"], restart["error"]) == (
        "restart",
        1,
        "worker 1 ended with exit code 9",
    )
    assert restart["text"].endswith(f"restarted at step {restart['step']}: worker 1 ended with exit code 9")
    assert (end["event"], end["exit_code"], end["restarts"], end["error"]) == ("end", 0, 1, None)


def test_a_command_that_fails_is_noted_and_changes_nothing(run_job):
    _, finished = run_job("--on_event=sh -c 'echo no network >&2; exit 7'", faults=[])
    assert finished.returncode == 0
    assert "--on_event ended with exit code 7 (no network)" in finished.stdout


@pytest.mark.parametrize(("command", "said"), [("", "is empty"), ("no_such_program x", "there is no no_such_program")])
def test_a_command_that_cannot_run_is_refused_before_anything_starts(run_job, command, said):
    job, finished = run_job(f"--on_event={command}", faults=[])
    assert finished.returncode == 64 and said in finished.stderr
    assert not job.model_dir.exists()

"""Each drill against workers that survive it, and against some that do not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from places import SMALL_DIGITS

from launcher import launch as entry
from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError
from launcher.worker import drill, progress

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="process groups and signals"), pytest.mark.slow]

ENDLESS = {"steps": 0, "checkpoint": True, "hollow": False}


@pytest.fixture
def rehearse(run_job):
    """rehearse(kind, *flags, **settings): the job after its drill, how it ended, and the contents of drill.json."""

    def run(kind, *flags, **settings):
        job, finished = run_job(f"--drill={kind}", *flags, **{**ENDLESS, **settings})
        return job, finished, json.loads((job.model_dir / "drill.json").read_text())

    return run


def assert_passed(job, finished, record, *, restarts=1):
    assert finished.returncode == 0, finished.stdout
    assert record["passed"] and record["failures"] == []
    assert record["restarts"] == restarts and len(job.attempts()) == restarts + 1
    assert record["orphans"] == 0 and record["exit_code"] == 0
    assert record["final_step"] >= record["fault_step"]
    assert "[launcher] drill passed: " in finished.stdout


@pytest.mark.parametrize(
    ("kind", "rank", "what"),
    [
        ("kill", 1, "was killed by SIGKILL"),
        pytest.param("exception", 1, "ended with exit code 75: OSError", marks=pytest.mark.nightly),
        ("disk_full", 0, "ended with exit code 75: CheckpointWriteError"),
    ],
)
def test_a_fault_is_noticed_named_and_healed(rehearse, kind, rank, what):
    job, finished, record = rehearse(kind)
    assert_passed(job, finished, record)
    assert record["named"].startswith(f"worker {rank} {what}")
    assert record["seconds_to_training"] > record["seconds_to_detection"] >= 0
    assert job.log(2, 0).startswith(f"training from step {record['resumed_from']},")
    assert record["final_step"] == record["resumed_from"] + 3
    (line,) = (json.loads(line) for line in (job.model_dir / "attempts.jsonl").read_text().splitlines())
    assert f"worker {rank} " in line["ended_by"] and what.rpartition(" ")[2] in line["ended_by"]
    assert record["goodput"]["start-up"] > 0 and "  goodput " in finished.stdout


def test_a_frozen_worker_is_noticed_before_anybody_misses_it(rehearse):
    job, finished, record = rehearse("freeze")
    assert_passed(job, finished, record)
    assert record["named"].startswith("worker 1 is frozen")


def test_a_stuck_worker_is_noticed_by_the_stall_timeout_and_where_it_is_stuck_is_said(rehearse):
    job, finished, record = rehearse("stuck", "--stall_timeout=2", "--drill_worker=0")
    assert_passed(job, finished, record)
    assert record["named"].startswith("worker 0 is stuck: no progress for ")
    assert "launcher/worker/drill.py" in record["named"] and "in _never_return" in record["named"]


def test_a_preempted_job_has_saved_its_last_step_and_runs_again_to_its_end(rehearse):
    job, finished, record = rehearse("preempt", on_sigterm="save")
    assert_passed(job, finished, record)
    assert record["named"] is None and record["steps_repeated"] == 0
    assert "exit code 42" in finished.stdout


def test_a_job_that_does_not_save_when_preempted_does_not_pass(rehearse):
    _, finished, record = rehearse("preempt", on_sigterm="die")
    assert finished.returncode == 128 + signal.SIGTERM
    assert not record["passed"] and "the job was not started again" in record["failures"]
    assert "[launcher] drill NOT PASSED: preempt" in finished.stdout


def test_a_damaged_checkpoint_is_skipped_and_kept(rehearse):
    job, finished, record = rehearse("corrupt_checkpoint", "--drill_worker=0")
    assert_passed(job, finished, record)
    assert record["named"].startswith("worker 0 was killed by SIGKILL")
    assert record["steps_repeated"] >= 1
    assert f"the checkpoint of step {record['resumed_from'] + 1} is damaged now" in finished.stdout


def test_workers_that_trust_a_damaged_checkpoint_do_not_pass(rehearse):
    _, finished, record = rehearse("corrupt_checkpoint", trusting=True)
    assert finished.returncode == 70
    assert [failure for failure in record["failures"] if " was damaged" in failure]


def test_a_job_that_goes_on_with_a_full_disk_passes_without_a_restart(rehearse):
    job, finished, record = rehearse("disk_full", disk_full="continue")
    assert_passed(job, finished, record, restarts=0)
    assert record["named"] is None and record["seconds_to_detection"] is None
    assert "going on without a checkpoint of step " in job.log(1, 0)


def test_the_step_and_the_worker_can_be_chosen(rehearse):
    _, _, record = rehearse("kill", "--drill_step=7", "--drill_worker=0", workers=3)
    assert record["fault_step"] >= 7
    assert record["named"].startswith("worker 0 ")


def test_a_drill_that_never_came_to_its_fault_is_not_passed(rehearse):
    _, finished, record = rehearse("kill", "--drill_step=1000000", steps=3)
    assert finished.returncode == 70
    assert record["failures"] == ["the fault never happened: the job ended too early. Give a smaller --drill_step"]
    _, finished, record = rehearse("kill", steps=3, checkpoint=False, model_dir="other")
    assert finished.returncode == 70
    assert "train.checkpoint_every" in record["failures"][0]


def test_a_job_that_gives_up_is_not_passed(rehearse):
    faults = [{"rank": 0, "attempt": 2, "step": "start", "do": "leave", "code": 70}]
    _, finished, record = rehearse("kill", faults=faults)
    assert finished.returncode == 70
    assert "the job ended with exit code 70" in record["failures"]


# ---------------------------------------------------------------------------------------------------------- reference


def test_the_result_is_compared_with_an_undisturbed_run(run_job, tmp_path):
    """The fake weights are a function of the step, so a run of as many steps is the reference, one of fewer is not."""
    run_job(model_dir="reference", checkpoint=True, hollow=False, steps=4)
    flags = ("--drill=kill", "--drill_step=1", f"--drill_reference={tmp_path / 'reference'}")
    settings = {"checkpoint": True, "hollow": False, "wait_for_fault": 2}
    job, finished = run_job(*flags, steps=4, **settings)
    record = json.loads((job.model_dir / "drill.json").read_text())
    assert finished.returncode == 0 and record["difference"] == ""
    assert "equal bit for bit" in finished.stdout
    job, finished = run_job(*flags, steps=5, model_dir="longer", **settings)
    record = json.loads((job.model_dir / "drill.json").read_text())
    assert finished.returncode == 70
    assert record["difference"].startswith("the last checkpoint is of step 5, that of ")
    job, finished = run_job(*flags, steps=4, weights="other", model_dir="other", **settings)
    record = json.loads((job.model_dir / "drill.json").read_text())
    assert finished.returncode == 70
    assert record["difference"].startswith("the bytes of step 4 in state.data differ from those in ")


# -------------------------------------------------------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--drill=fire"], ["fire", "kill"]),
        (["--drill_step=3"], ["--drill_step=3", "--drill="]),
        (["--drill=kill", "--drill_worker=2"], ["--drill_worker=2", "0 to 1"]),
        (["--drill=kill", "--drill_step=0"], ["--drill_step=0"]),
        (["--drill=disk_full", "--drill_worker=1"], ["--drill_worker=1", "worker 0"]),
        (["--drill=kill", "--max_restarts=0"], ["--max_restarts=0"]),
        (["--drill=kill", "--drill_reference=nowhere"], ["--drill_reference=nowhere"]),
    ],
)
def test_a_drill_that_cannot_be_is_refused_before_anything_runs(capsys, tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    assert entry.main(["launch", "--workers=2", "--gin_file=x.gin", *flags]) == 64
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    for part in said:
        assert part in printed.err
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ in the worker


def test_without_the_variable_nothing_happens_at_all():
    program = (
        "import os, signal; from launcher.worker import drill\n"
        "drill.install({}); drill.between_steps(); drill.before_write()\n"
        "assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("value", ["", "kill", "Exception", "exception,stuck"])
def test_a_fault_that_no_worker_knows_is_refused(value):
    with pytest.raises(UsageError, match="LAUNCHER_DRILL="):
        drill.install({drill.VARIABLE: value})


def test_the_fault_waits_for_its_sign_and_happens_once(monkeypatch, tmp_path):
    monkeypatch.setattr(drill, "_drill", drill._Drill())
    before = signal.getsignal(signal.SIGUSR2)
    told = progress.Progress({progress.PROGRESS_FILE: str(tmp_path / "progress")})
    try:
        drill.install({drill.VARIABLE: "disk_full"})
        drill.before_write()
        signal.raise_signal(signal.SIGUSR2)
        drill.between_steps()  # is another fault's place
        told.report(phase="checkpoint", step=3)
        assert not progress.read_report(tmp_path / "progress").drill_struck
        with pytest.raises(OSError, match="No space left on device"):
            drill.before_write()
        drill.before_write()
        told.report(phase="train")
        assert progress.read_report(tmp_path / "progress").drill_struck
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_checkpoint_that_finds_the_disk_full_leaves_the_older_ones_and_nothing_half_written(monkeypatch, tmp_path):
    import numpy as np

    from launcher.checkpoints import CheckpointWriteError

    store = CheckpointStore(str(tmp_path))
    store.save(1, {"weight": np.ones(3)})
    monkeypatch.setattr(drill, "_drill", drill._Drill(kind=drill.DISK_FULL, armed=True))
    with pytest.raises(CheckpointWriteError, match="No space left"):
        store.save(2, {"weight": np.ones(3)})
    assert os.listdir(tmp_path) == ["step_00000001"]
    store.save(2, {"weight": np.ones(3)})
    assert store.latest() == 2


# ------------------------------------------------------------------------------------------------------ real training

TRAINING = (
    "--workers=2",
    f"--gin_file={SMALL_DIGITS}",
    "--gin_param=train.steps = 30",
    "--gin_param=train.steps_per_loop = 1",
    "--gin_param=train.checkpoint_every = 5",
    "--gin_param=train.evaluate_every = 0",
)


@pytest.mark.heavy
@pytest.mark.nightly
def test_a_training_whose_worker_is_killed_ends_bitwise_as_one_that_nobody_touched(run_launcher, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    finished = run_launcher(*TRAINING, f"--model_dir={undisturbed}", module="launcher.launch")
    assert finished.returncode == 0, finished.stdout
    drilled = ("--drill=kill", f"--drill_reference={undisturbed}", f"--model_dir={killed}")
    finished = run_launcher(*TRAINING, *drilled, module="launcher.launch")
    assert finished.returncode == 0, finished.stdout
    record = json.loads((killed / "drill.json").read_text())
    assert record["passed"] and record["difference"] == "" and record["final_step"] == 30
    assert record["named"].startswith("worker 1 was killed by SIGKILL")
    assert 0 < record["resumed_from"] <= record["fault_step"] and record["orphans"] == 0

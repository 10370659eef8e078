"""What the supervisor does about each way in which workers end, with real processes and signals."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import pytest
from cases import repeated_but
from launched import fault

from launcher.model_dir import lease_file

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="process groups and signals"), pytest.mark.slow]


def summary_line(finished):
    return [line for line in finished.stdout.splitlines() if line.startswith("[launcher] job ")][-1]


def test_a_job_that_nothing_disturbs_is_done_in_one_attempt_with_its_output_on_the_console_and_in_logs(run_job):
    job, finished = run_job("--gin_param", "train.steps = 4", workers=3)
    assert finished.returncode == 0, finished.stdout
    assert summary_line(finished) == "[launcher] job done: 1 attempt(s), 0 restart(s), exit code 0"
    assert finished.stderr == ""
    assert not (job.model_dir / "error.json").exists()
    for rank in range(3):
        log = job.log(1, rank).splitlines()
        assert log[0].startswith("training from step 0, --gin_file=fake.gin --gin_param train.steps = 4 --model_dir=")
        assert [line for line in finished.stdout.splitlines() if line.startswith(f"[worker {rank}] ")] == [
            f"[worker {rank}] {line}" for line in log
        ]


@pytest.mark.parametrize("code", repeated_but([70], [64, 70]))
def test_an_error_that_a_retry_will_not_help_ends_the_job_with_its_code_and_a_summary(run_job, code):
    job, finished = run_job(faults=[fault("raise_error", kind="TheirError", message="no such thing", code=code)])
    assert finished.returncode == code
    assert summary_line(finished).endswith(f"1 attempt(s), 0 restart(s), exit code {code}")
    assert f"worker 1 ended with exit code {code}: TheirError: no such thing" in finished.stderr
    if code == 70:  # its chief could not say so
        summary = json.loads((job.model_dir / "summary.json").read_text())
        assert (summary["status"], summary["exit_code"], summary["step"]) == ("failed", 70, 2)
        assert "worker 1" in summary["error"] and "TheirError: no such thing" in summary["error"]


def test_the_report_of_an_error_that_says_what_to_do_has_no_traceback(run_job):
    said = "nothing listens at the address of worker 1"
    raised = fault("raise_error", rank=0, kind="PeerError", message=said, code=75)
    job, finished = run_job("--max_restarts=0", workers=1, faults=[raised])
    assert finished.returncode == 75
    assert f": PeerError: {said}\n" in finished.stderr
    assert "traceback" not in finished.stderr
    assert json.loads((job.model_dir / "error.json").read_text())["error"]["traceback"] == ""


def test_a_mistake_in_the_flags_leaves_nothing_behind(run_job):
    job, finished = run_job(faults=[fault("leave", rank=0, step="start", code=64), fault("leave", step=0, code=64)])
    assert finished.returncode == 64
    assert not (job.model_dir / "logs").exists() and not (job.model_dir / "error.json").exists()


def test_a_second_job_in_the_same_folder_is_refused_before_it_writes_anything(launch):
    first = launch(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)])
    first.until(lambda: all("reading a batch" in first.log(1, rank) for rank in (0, 1)))
    before = sorted(first.model_dir.rglob("*"))
    second = launch()
    finished = second.wait()
    assert finished.returncode == 64
    assert finished.stdout == ""
    assert finished.stderr.startswith(f"error: --model_dir={first.model_dir}: another run writes to it: supervisor ")
    assert f"supervisor {first.started.process.pid} on " in finished.stderr
    assert sorted(first.model_dir.rglob("*")) == before
    first.started.process.send_signal(signal.SIGTERM)
    first.wait()
    assert not (first.model_dir / "lease.json").exists()


def test_a_job_whose_supervisor_was_killed_is_taken_over(launch):
    first = launch(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)])
    first.until(lambda: all("reading a batch" in first.log(1, rank) for rank in (0, 1)))
    first.started.process.kill()
    first.started.process.wait()
    finished = launch().wait()
    assert finished.returncode == 0
    assert f"/lease.json from supervisor {first.started.process.pid} on " in finished.stdout


def test_a_job_whose_folder_another_run_has_taken_over_stops_and_writes_nothing(launch):
    job = launch(faults=[fault("read_next_batch", rank=rank) for rank in (0, 1)])
    job.until(lambda: all("reading a batch" in job.log(1, rank) for rank in (0, 1)))
    path = job.model_dir / "lease.json"
    other = dataclasses.replace(lease_file.read_path(path), job="another", host="elsewhere", boot="-")
    with open(path, "r+b") as file:
        lease_file.put(file.fileno(), other)
    finished = job.wait()
    assert finished.returncode == 70
    assert "lease.json was taken over by supervisor " in finished.stderr and "on elsewhere since" in finished.stderr
    assert job.running() == []
    assert not (job.model_dir / "error.json").exists() and not (job.model_dir / "summary.json").exists()
    assert json.loads(path.read_text())["host"] == "elsewhere"


# Of a lease alone, test_lease.py tries each damage.
@pytest.mark.parametrize("damage", repeated_but(["bit flipped"], ["removed", "bit flipped"]))
def test_a_job_whose_lease_is_damaged_writes_it_again_and_goes_on(launch, damage):
    job = launch(steps=0, hosts=True, workers=1)
    job.until(lambda: "training from" in job.log(1, 0))
    path = job.model_dir / "lease.json"
    mine, content = lease_file.read_path(path), path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(content.replace(b'"process": ', b'"process": 1'))
    job.until(lambda: path.exists() and lease_file.read_path(path) == mine)
    (job.model_dir / "last_step").write_text("0")
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert not path.exists()


def test_a_temporary_folder_that_is_full_silences_nobody(launch, small_disk):
    """It fills up in the first attempt, and the second finds it full; both are heard."""
    faults = [
        fault("exit_when_sent", rank=1, step=2, name="filled", code=75),
        fault("read_next_batch", rank=1, attempt=2, step=5),
    ]
    flags = ("--start_timeout=60", "--stall_timeout=5")
    job = launch(*flags, faults=faults, checkpoint=True, steps=8, hosts=True, env={"TMPDIR": str(small_disk)})
    job.until(lambda: (job.model_dir / "checkpoints/step_00000002").exists())
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    (job.model_dir / "filled").touch()
    assert job.wait().returncode == 0
    assert job.error(2)["what"].startswith("is stuck: no progress for ")
    assert "at step 5" in job.error(2)["what"] and "read_next_batch" in job.error(2)["what"]


def test_a_temporary_folder_without_room_is_named(launch, small_disk):
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    (small_disk / "filler").open("r+b").truncate((8 << 20) - 16384)  # room enough for Python to choose the folder
    job = launch(env={"TMPDIR": str(small_disk)})
    finished = job.wait()
    assert finished.returncode == 75
    assert f"error: the temporary folder {small_disk} cannot take what the workers report: No space" in finished.stderr
    assert not job.model_dir.exists()
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_temporary_folder_that_is_cleaned_costs_no_restart_and_silences_nobody(launch, tmp_path):
    job = launch("--max_restarts=1", workers=4, steps=0, hosts=True)
    job.until(lambda: len(list(tmp_path.glob("launcher-*/*.progress.json"))) == 4)
    scratch = next(tmp_path.glob("launcher-*"))
    job.until(lambda: len(list((job.model_dir / "meeting_1").glob("step3_*"))) == 4)
    scratch.rename(tmp_path / "cleaned")
    job.until(lambda: len(list(scratch.glob("*.progress.json"))) == 4)
    os.kill(job.numbers("pids")[1], signal.SIGKILL)
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert summary_line(finished) == "[launcher] job done: 2 attempt(s), 1 restart(s), exit code 0"
    assert list(tmp_path.glob("launcher-*")) == []


def test_what_cannot_start_for_a_while_uses_up_no_restart(launch, small_disk):
    job = launch("--max_restarts=1", steps=0, hosts=True, env={"TMPDIR": str(small_disk)})
    job.until(lambda: len(list((job.model_dir / "meeting_1").glob("step3_*"))) == 2)
    next(small_disk.glob("launcher-*")).rename(small_disk / "away")
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(bytes(9 << 20))
    os.kill(job.numbers("pids")[1], signal.SIGKILL)
    job.until(lambda: "try 3: what does not start is not counted" in job.started.stdout)
    (small_disk / "filler").unlink()
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.count("restart 1 of at most 1 ") == 1 and "restart 2" not in finished.stdout


def test_an_outage_is_waited_for_although_the_restarts_are_used_up(run_job, launch):
    away = fault("raise_error", attempt=0, step=0, kind="ConnectionError", message="no server", code=75, until="back")
    job = launch("--max_restarts=1", faults=[away])
    job.until(lambda: "restart 3 without progress: an outage has 60 s to pass" in job.started.stdout)
    (job.model_dir / "back").touch()
    assert job.wait().returncode == 0
    job, finished = run_job("--max_restarts=0", faults=[away], model_dir="no_restarts")
    assert finished.returncode == 75 and job.attempts() == ["attempt_1"]


def test_a_preempted_job_is_not_restarted(run_job):
    job, finished = run_job(faults=[fault("leave", rank=rank, code=42) for rank in (0, 1)])
    assert finished.returncode == 42
    assert job.attempts() == ["attempt_1"]


BARE_EXIT = fault("leave", code=1)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(fault("send_self", number=int(signal.SIGKILL)), id="SIGKILL"),
        pytest.param(
            fault("send_self", rank=0, number=int(signal.SIGTERM)),
            id="SIGTERM of the chief",
            marks=pytest.mark.nightly,
        ),
        pytest.param(BARE_EXIT, id="exit 1", marks=pytest.mark.nightly),  # others leave so, below
        pytest.param(
            fault("raise_error", kind="CheckpointWriteError", message="disk full", code=75), id="disk full: exit 75"
        ),
    ],
)
def test_a_failure_that_may_pass_restarts_all_workers_from_the_last_checkpoint(run_job, how):
    job, finished = run_job(faults=[how], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert summary_line(finished) == "[launcher] job done: 2 attempt(s), 1 restart(s), exit code 0"
    for rank in (0, 1):
        assert job.log(1, rank).startswith("training from step 0,")
        assert job.log(2, rank).startswith("training from step 2,")
    if how != BARE_EXIT:  # which victims have, too, and nobody can tell them apart when they end in one moment
        assert job.error(attempt=1)["worker"] == how["rank"]
    assert not (job.model_dir / "error.json").exists()


def test_workers_know_that_their_job_was_restarted_and_do_not_show_its_plan_again(run_job):
    job, _ = run_job(faults=[fault("leave", code=1)], checkpoint=True, show=["LAUNCHER_RESTARTED"])
    assert "LAUNCHER_RESTARTED" not in job.log(1, 0)
    assert job.log(2, 0).startswith("LAUNCHER_RESTARTED=1\n")


def test_gives_up_after_restarts_without_progress(run_job):
    job, finished = run_job("--max_restarts=1", faults=[fault("leave", attempt=0, code=1)], checkpoint=True)
    assert finished.returncode == 75
    # One that reaches step 2, one that gets no further.
    assert job.attempts() == ["attempt_1", "attempt_2"]
    assert job.error()["job_exit_code"] == 75
    assert finished.stderr.splitlines()[-1].startswith("Gave up: --max_restarts=1 ")


def test_progress_starts_the_count_of_restarts_over(run_job):
    faults = [fault("leave", attempt=attempt, step=attempt, code=1) for attempt in (1, 2, 3)]
    job, finished = run_job("--max_restarts=1", faults=faults, checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert len(job.attempts()) == 4


def test_without_checkpoints_the_step_that_workers_reach_is_progress(run_job):
    faults = [fault("leave", attempt=attempt, step=step, code=1) for attempt, step in ((1, 1), (2, 2), (3, 2))]
    job, finished = run_job("--max_restarts=1", faults=faults)
    assert finished.returncode == 75
    assert len(job.attempts()) == 3


def test_without_a_restart_where_none_is_allowed_the_same_command_again_keeps_the_earlier_logs(run_job):
    job, finished = run_job("--max_restarts=0", faults=[fault("leave", code=1)], checkpoint=True)
    assert finished.returncode == 75 and job.attempts() == ["attempt_1"]
    before = job.log(1, 0)
    job, finished = run_job(checkpoint=True)
    assert finished.returncode == 0
    assert job.log(1, 0) == before and job.log(2, 0).startswith("training from step 2,")


# -------------------------------------------------------------------------------------------------------- first error


def test_the_first_error_is_named_although_its_victims_end_before_it(run_job):
    raised = fault("raise_error", rank=2, kind="ValueError", message="bad label 12", code=70, after_peers=True)
    job, finished = run_job(workers=3, faults=[raised])
    assert finished.returncode == 70
    error = job.error()
    assert (error["worker"], error["exit_code"], error["job_exit_code"]) == (2, 70, 70)
    assert (error["error"]["type"], error["error"]["message"]) == ("ValueError", "bad label 12")
    assert [victim["worker"] for victim in error["victims"]] == [0, 1]
    assert all(victim["what"] == "ended with exit code 1" for victim in error["victims"])
    report = finished.stderr
    assert report.startswith("First error (attempt 1): worker 2 ended with exit code 70: ValueError: bad label 12\n")
    assert "{}))(message)" in report  # its traceback
    assert "Victims of it, not causes: worker 0 ended with exit code 1; worker 1 ended with exit code 1" in report


def test_a_death_is_found_behind_the_victims_that_were_seen_first(run_job):
    job, finished = run_job(workers=3, faults=[fault("segfault_after_peers", rank=1)], checkpoint=True)
    assert finished.returncode == 0
    assert job.error(attempt=1)["worker"] == 1
    assert job.error(attempt=1)["what"] == "was killed by SIGSEGV"


def test_a_frozen_worker_is_named_when_its_peers_leave(run_job):
    faults = [fault("send_self", number=int(signal.SIGSTOP)), fault("exit_when_peers_are_frozen", rank=0)]
    job, finished = run_job(faults=[*faults, fault("leave", rank=1, attempt=2, code=70)], checkpoint=True)
    assert finished.returncode == 70
    assert job.error(attempt=1)["worker"] == 1
    assert "frozen" in job.error(attempt=1)["what"]


def test_an_error_without_a_record_is_shown_by_the_last_lines_of_the_log(run_job):
    job, finished = run_job("--max_restarts=0", workers=1, faults=[fault("leave", rank=0, code=3)])
    assert job.error()["last_lines"][-1] == "leaving with 3"
    assert "  | leaving with 3" in finished.stderr


# ------------------------------------------------------------------------------------------------------------- stalls


def test_a_stuck_worker_is_named_with_its_python_stack_in_the_log_and_the_job_goes_on(run_job):
    job, finished = run_job("--stall_timeout=3", workers=3, faults=[fault("read_next_batch")], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    error = job.error(attempt=1)
    assert error["worker"] == 1
    assert error["what"].startswith("is stuck: no progress for ") and "at step 2" in error["what"]
    assert "in read_next_batch" in job.log(1, 1)
    for rank in (0, 2):
        assert "in quick_execute" in job.log(1, rank)  # every worker's stack is there, and tells a victim
    assert [victim["worker"] for victim in error["victims"]] == [0, 2]


def test_a_worker_that_never_starts_is_named(run_job):
    never = fault("read_next_batch", attempt=0, step="start")
    job, finished = run_job("--start_timeout=1", "--max_restarts=0", faults=[never])
    assert finished.returncode == 75
    assert job.error()["worker"] == 1
    assert job.error()["what"].startswith("did not start: no report within ")

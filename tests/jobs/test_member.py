"""Supervisors of one worker each, which find their peers in the environment and share nothing but model_dir."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
from launched import LaunchedJob

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="process groups and signals"), pytest.mark.slow]


@pytest.fixture
def start_members(start_launcher, fake_environment, free_ports, tmp_path):
    """start_members(*flags, workers=2, ranks=all, **settings): a supervisor a worker; a `LaunchedJob` of each."""
    started: list[LaunchedJob] = []

    def start(*flags: str, workers: int = 2, ranks=None, **settings) -> list[LaunchedJob]:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        given = ("--backend=member", "--worker_module=fake_worker", "--gin_file=fake.gin", *flags)
        for rank in range(workers) if ranks is None else ranks:
            environ = fake_environment(**settings, hosts=True)
            cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            environ["TF_CONFIG"] = json.dumps(cluster)
            supervisor = start_launcher(
                *given, f"--model_dir={tmp_path / 'run'}", module="launcher.launch", env=environ
            )
            started.append(LaunchedJob(supervisor, tmp_path / "run"))
        return started[-(workers if ranks is None else len(ranks)) :]

    yield start
    for job in started:
        job.started.end()
    for number in started[0].running() if started else []:
        psutil.Process(number).kill()


@pytest.fixture
def run_members(start_members, tmp_path):
    """The same, run to their end, at which nothing may be left; how each supervisor ended, in the order of rank."""

    def run(*flags: str, **options):
        members = start_members(*flags, **options)
        finished = [member.wait() for member in members]
        assert members[0].running() == []
        assert list(tmp_path.glob("launcher-*")) == []
        return members[0], finished

    return run


def raises(rank, message, *, attempt=1, code=70):
    return {
        "rank": rank, "attempt": attempt, "step": 2, "do": "raise_error",
        "kind": "ValueError", "message": message, "code": code,
    }  # fmt: skip


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_members_train_together_and_each_writes_a_log_of_its_own(run_members):
    job, finished = run_members(workers=3)
    assert [one.returncode for one in finished] == [0, 0, 0], finished
    assert left_in(job.model_dir / "logs" / "attempt_1") == ["worker_0.log", "worker_1.log", "worker_2.log"]
    for rank, one in enumerate(finished):
        assert job.log(1, rank).endswith("done\n")
        assert f"[worker {rank}] done" in one.stdout
    assert not (job.model_dir / "error.json").exists()


def test_a_member_that_fails_ends_with_its_code_and_is_not_restarted(run_members):
    job, finished = run_members(faults=[raises(1, "bad label 12")])
    assert finished[1].returncode == 70
    assert finished[0].returncode == 75
    assert job.attempts() == ["attempt_1"]


def test_the_error_of_the_job_is_the_first_and_those_of_its_victims_stay_beside_it(run_members):
    job, _ = run_members(workers=3, faults=[raises(2, "bad label 12")])
    assert (job.error()["worker"], job.error()["error"]["message"]) == (2, "bad label 12")
    assert job.error()["victims"] == [{"worker": rank, "what": "ended with exit code 1"} for rank in (0, 1)]
    assert job.error(attempt=1) == job.error()
    names = {f"worker_{rank}.error.json" for rank in range(3)}
    assert names <= set(left_in(job.model_dir / "logs" / "attempt_1"))


def test_a_victim_that_ends_last_points_to_the_first_error(run_members, start_members):
    culprit, *_ = start_members(workers=2, ranks=[1], faults=[{**raises(1, "bad label 12"), "step": "start"}])
    assert culprit.wait().returncode == 70
    (victim,) = start_members(workers=2, ranks=[0], faults=[{"rank": 0, "step": "start", "do": "leave", "code": 1}])
    finished = victim.wait()
    assert finished.returncode == 75
    assert "This worker is a victim. Failed before it: worker 1 ended with exit code 70: ValueError: bad label 12" in (
        finished.stderr
    )
    assert victim.error()["worker"] == 1


def test_started_again_by_a_scheduler_all_members_write_to_the_next_attempt(run_members):
    run_members(faults=[raises(1, "gone", code=75)], checkpoint=True)
    job, finished = run_members(checkpoint=True)
    assert [one.returncode for one in finished] == [0, 0]
    assert job.attempts() == ["attempt_1", "attempt_2"]
    for rank in (0, 1):
        assert job.log(2, rank).startswith("training from step 2,")
    assert not (job.model_dir / "error.json").exists()


def test_a_pod_that_failed_after_a_new_checkpoint_is_replaced_and_not_counted(launch):
    pod = {"JOB_COMPLETION_INDEX": "0", "LAUNCHER_NUM_WORKERS": "1", "JOBSET_NAME": "x", "REPLICATED_JOB_NAME": "y"}
    failing = {"faults": [raises(0, "gone", attempt=0, code=75)], "checkpoint": True, "hosts": True}
    codes = [launch("--backend=member", workers=1, env=pod, **failing).wait().returncode for _ in range(2)]
    assert codes == [42, 75]  # the second gets no further than the checkpoint of the first
    assert launch("--backend=member", workers=1, env=pod, checkpoint=True).wait().returncode == 0


def test_a_mistake_in_the_flags_leaves_the_logs_of_other_members_alone(start_members):
    (wrong,) = start_members(ranks=[1], faults=[{"rank": 1, "step": "start", "do": "leave", "code": 64}])
    others = wrong.model_dir / "logs" / "attempt_1"
    others.mkdir(parents=True)
    (others / "worker_0.log").write_text("theirs\n")
    assert wrong.wait().returncode == 64
    assert left_in(others) == ["worker_0.log"]


def test_a_member_that_is_stuck_is_named_in_its_own_supervisor(run_members):
    stuck = {"rank": 1, "step": 2, "do": "read_next_batch"}
    job, finished = run_members("--stall_timeout=1", faults=[stuck], checkpoint=True)
    assert [one.returncode for one in finished] == [75, 75]
    assert "in read_next_batch" in job.log(1, 1)


def test_on_sigterm_members_save_and_end_with_42(start_members):
    members = start_members(on_sigterm="save", steps=10**9)
    members[0].until(lambda: all("training from" in members[0].log(1, rank) for rank in (0, 1)))
    for member in members:
        member.started.process.send_signal(signal.SIGTERM)
    assert 42 in [member.wait().returncode for member in members]
    assert members[0].running() == []


def test_an_environment_that_contradicts_itself_is_one_message(run_launcher):
    environ = {"JOB_COMPLETION_INDEX": "3", "LAUNCHER_NUM_WORKERS": "2"}
    done = run_launcher("--backend=member", "--gin_file=fake.gin", module="launcher.launch", env=environ)
    assert done.returncode == 64
    assert done.stderr.startswith("error: JOB_COMPLETION_INDEX='3'") and done.stderr.count("\n") == 1


def test_the_number_of_workers_is_not_for_a_member_to_say(run_launcher):
    done = run_launcher("--backend=member", "--workers=2", "--gin_file=fake.gin", module="launcher.launch")
    assert done.returncode == 64 and "--workers=2" in done.stderr


def test_workers_of_one_host_do_not_take_the_place_of_the_task_that_starts_them(launch):
    """A task of Slurm, or a pod, among others, that starts two workers of its own."""
    elsewhere = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}
    job = launch(env={**elsewhere, "JOB_COMPLETION_INDEX": "1", "LAUNCHER_NUM_WORKERS": "4"})
    assert job.wait().returncode == 0, job.started.stderr


def test_finding_the_peers_needs_no_tensorflow():
    program = "import sys, launcher.launch; sys.exit('tensorflow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_of_a_job_of_members_one_supervisor_tells_of_its_end(run_members, tmp_path):
    told = tmp_path / "told"
    _, finished = run_members(f"--on_event=tee -a {told}")
    assert [one.returncode for one in finished] == [0, 0]
    (event,) = map(json.loads, told.read_text().splitlines())
    assert (event["event"], event["exit_code"]) == ("end", 0)

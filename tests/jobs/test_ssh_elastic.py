"""Jobs by a real ssh over hosts that come, go, fail the checks and lag behind."""

from __future__ import annotations

import signal

import psutil
import pytest
import sshd
from launched import fault
from ssh_jobs import A, B, C, D, assert_nothing_left, hanging, wait_for_log, wait_for_training

pytestmark = [pytest.mark.skipif(bool(sshd.MISSING), reason=sshd.MISSING), pytest.mark.slow]


def test_a_job_goes_on_with_fewer_workers_and_with_all_after_a_failure_when_the_host_is_back(launch_on, tmp_path):
    faults = [*hanging(4), *hanging(3, attempt=2, step=3)]
    job, servers = launch_on([A, B, C, D], "--min_workers=2", "--connect_timeout=2", faults=faults, checkpoint=True)
    wait_for_training(job, 4)
    servers.stop(D)
    wait_for_training(job, 3, attempt=2)
    assert job.error(attempt=1)["worker"] == 3
    logs = (job.model_dir / "logs" / "attempt_2").iterdir()
    assert sorted(path.name for path in logs) == [f"worker_{rank}.log" for rank in range(3)]
    assert "one of 3 for 4" in job.log(2, 0)
    assert "going on without a host: 127.0.0.4 cannot be reached" in job.started.stdout
    servers.start(D)
    psutil.Process(job.numbers("pids")[-1]).kill()
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert "attempt 3: starting 4 worker(s)" in finished.stdout
    for rank in range(4):
        assert job.log(3, rank).startswith("training from step 3,") and "one of" not in job.log(3, rank)
    assert_nothing_left(job, tmp_path)


def test_a_host_that_is_back_takes_part_again_at_the_next_save_without_a_failure(launch_on, tmp_path):
    flags = ("--min_workers=1", "--connect_timeout=2")
    job, servers = launch_on([A, B, C], *flags, steps=10**9, checkpoint=True, on_sigterm="save")
    wait_for_log(job, 3, "training from")
    servers.stop(C)
    wait_for_log(job, 2, "one of 2 for 3", attempt=2)
    servers.start(C)
    wait_for_log(job, 3, "training from", attempt=3)
    assert "saved at step" in job.log(2, 0) and "saved at step" in job.log(2, 1)
    assert "one of" not in job.log(3, 0)
    assert job.error()["attempt"] == 1
    job.started.send(signal.SIGTERM)
    finished = job.wait()
    assert finished.returncode == 42, finished.stdout
    assert "more hosts are there" in finished.stdout and "attempt 4" not in finished.stdout
    assert_nothing_left(job, tmp_path)


def test_a_spare_host_takes_the_place_of_a_lost_one_at_once(launch_on, tmp_path):
    job, servers = launch_on([A, B, C], workers=2, faults=hanging(2), checkpoint=True)
    wait_for_training(job, 2)
    servers.stop(A)
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert "attempt 2: starting 2 worker(s)" in finished.stdout and "one of" not in job.log(2, 0)
    assert_nothing_left(job, tmp_path)


def test_a_host_whose_workers_fail_three_times_in_a_row_is_left_out_and_named(launch_on, tmp_path):
    faults = [fault("leave", rank=1, attempt=attempt, step=0, code=9) for attempt in (1, 2, 3)]
    job, _ = launch_on([A, B, C], "--max_restarts=5", workers=2, faults=faults, steps=3)
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert "127.0.0.2 is left out: 3 failures in a row were its workers" in finished.stdout
    assert "attempt 4: starting 2 worker(s)" in finished.stdout and "going on without" not in finished.stdout
    assert_nothing_left(job, tmp_path)


def straggling(worker):
    """Attempts 1 and 2 call this worker a straggler after their first steps."""
    return [fault("name_straggler", rank=0, attempt=attempt, step=1, worker=worker) for attempt in (1, 2)]


@pytest.mark.parametrize(
    ("places", "flags", "attempt_2", "spared"),
    [
        ([A, B, C], (), "starting 2 worker(s)", "127.0.0.3"),
        ([A, B], ("--min_workers=1",), "starting 1 worker(s)", None),
    ],
)
def test_a_straggler_is_left_out_after_a_save_where_the_others_are_enough(
    launch_on, tmp_path, places, flags, attempt_2, spared
):
    settings = {"faults": straggling(1)[:1], "checkpoint": True, "on_sigterm": "save", "steps": 0}
    job, _ = launch_on(places, "--leave_out_stragglers", "--connect_timeout=2", *flags, workers=2, **settings)
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    assert "127.0.0.2 is left out: worker 1 is a straggler" in finished.stdout
    assert f"attempt 2: {attempt_2}" in finished.stdout and "attempt 3" not in finished.stdout
    assert "saved at step" in job.log(1, 1) and "restarting" not in finished.stdout
    assert not (job.model_dir / "error.json").exists(), "nothing has failed"
    assert ("one of 1 for 2" in job.log(2, 0)) == (spared is None)
    assert_nothing_left(job, tmp_path)


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.nightly), ("--leave_out_stragglers",)])
def test_a_straggler_that_cannot_be_spared_or_whom_no_flag_leaves_out_stays(launch_on, tmp_path, flags):
    job, _ = launch_on([A, B], *flags, faults=straggling(1), steps=20)
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    told = "worker 1 is a straggler, and 127.0.0.2 cannot be spared"
    assert finished.stdout.count(told) == len(flags) and "attempt 2" not in finished.stdout
    assert_nothing_left(job, tmp_path)


@pytest.fixture
def unfit_host(hosts, tmp_path):
    """unfit_host(*addresses): hosts with a GPU each, of which B's driver tells of memory errors."""

    def bring_up(*addresses):
        settings = ""
        for address in addresses:
            program = tmp_path / f"gpu_of_{address}" / "nvidia-smi"
            program.parent.mkdir()
            faults = f"0, {3 if address == B else 0}, No, No, Not Active"
            listed = "0, Card, 570.1, 4, 81559, 9.0, GPU-1"
            program.write_text(f'#!/bin/sh\ncase "$*" in *ecc*) echo "{faults}";; *) echo "{listed}";; esac\n')
            program.chmod(0o755)
            settings += f"Match LocalAddress {address}\nSetEnv PATH={program.parent}:/usr/bin:/bin\n"
        return hosts(*addresses, settings=settings)

    return bring_up


def test_a_host_that_fails_the_checks_is_left_out_and_a_spare_one_takes_its_place(launch_on, unfit_host, tmp_path):
    job, _ = launch_on([B, C], "--check_hosts", workers=1, servers=unfit_host(B, C), steps=3)
    finished = job.started.wait(120)
    assert finished.returncode == 0, finished.stdout
    assert "127.0.0.2 is left out: it fails the checks: driver GPU 0: ecc.errors" in finished.stdout
    assert finished.stdout.count("checking the places of 1 worker(s)") == 2
    assert "sums are right" in (job.model_dir / "logs" / "attempt_1" / "check_0.log").read_text()
    assert "[worker 0] ok" not in finished.stdout, "what is fit is told in the logs alone"
    assert_nothing_left(job, tmp_path)


@pytest.mark.nightly  # the checks: above; that too few are left: below
def test_a_host_that_fails_the_checks_and_cannot_be_spared_is_named(launch_on, unfit_host, tmp_path):
    job, _ = launch_on([B], "--check_hosts", servers=unfit_host(B), steps=3)
    finished = job.started.wait(120)
    assert finished.returncode == 75, finished.stdout
    said = finished.stdout + finished.stderr
    assert "127.0.0.2 fails the checks before an attempt: driver GPU 0: ecc.errors.uncorrected" in said
    assert "starting 1 worker(s)" not in said
    assert_nothing_left(job, tmp_path)


def test_a_signal_ends_the_checks(launch_on, tmp_path):
    job, _ = launch_on([A, B], "--check_hosts", steps=3)
    job.until(lambda: "checking the places" in job.started.stdout)
    job.started.send(signal.SIGTERM)
    finished = job.wait()
    assert finished.returncode == 42, finished.stdout
    assert "starting 2 worker(s)" not in finished.stdout
    assert_nothing_left(job, tmp_path)


def test_with_too_few_workers_left_the_job_waits_and_gives_up(launch_on, tmp_path):
    flags = ("--min_workers=2", "--connect_timeout=1", "--max_restarts=1")
    job, servers = launch_on([A, B, C, D], *flags, faults=hanging(4))
    wait_for_training(job, 4)
    for address in (B, C, D):
        servers.stop(address)
    finished = job.wait()
    assert finished.returncode == 75
    assert job.error()["what"].startswith("did not start: 127.0.0.2 cannot be reached")
    assert_nothing_left(job, tmp_path)

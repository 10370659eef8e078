"""Jobs on the nodes of a real Slurm, which runs on this machine while the tests do."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from cases import repeated_but
from launched import LaunchedJob, fault
from places import ROOT

from launcher.errors import UsageError
from launcher.jobs.slurm import srun
from launcher.jobs.transports import AgentCommand, Host

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "scripts" / "slurm.sbatch"

# ------------------------------------------------------------------------------------------------------ without Slurm


@pytest.fixture
def allocation():
    """The variables of a batch script, on a machine without Slurm."""
    return {
        "PATH": "/nowhere",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[9-10]",
        "SLURM_NTASKS": "3",
        "SLURM_TASKS_PER_NODE": "2,1",
    }


def test_workers_are_numbered_node_by_node_in_the_order_of_slurm(allocation):
    hosts = srun(allocation, None).hosts
    assert hosts == (Host(name="n9", address="n9", slots=2), Host(name="n10", address="n10", slots=1))


def test_a_number_of_workers_overrules_the_tasks_of_the_job(allocation):
    assert [host.slots for host in srun(allocation, 4).hosts] == [2, 2]


def test_without_tasks_every_node_has_one_worker(allocation):
    del allocation["SLURM_NTASKS"]
    allocation["SLURM_TASKS_PER_NODE"] = "32(x2)"  # processors
    assert [host.slots for host in srun(allocation, None).hosts] == [1, 1]


# As 22.05 and 25.11 show nodes; what people write comes behind what Slurm writes.
NODES = """\
NodeName=n9 Arch=x86_64 CoresPerSocket=8 CPUAlloc=0 CPUTot=32 CPULoad=0.02 AvailableFeatures=a,NodeAddr=b Gres=(null) \
NodeAddr=10.0.0.9 NodeHostName=h9 Version=22.05.8 OS=Linux 6.1.0 #1 SMP RealMemory=1 State=ALLOCATED \
Comment=was NodeName=n1 NodeAddr=10.0.0.1 Reason=NodeName=n2 NodeAddr=10.0.0.2 [root@2026-11-01T00:00:00]
NodeName=n10 Arch=x86_64 CoresPerSocket=8 CPUAlloc=0 CPUEfctv=32 CPUTot=32 CPULoad=0.02 AvailableFeatures=(null) \
Gres=gpu:h200:8(S:0-1) NodeAddr={address} NodeHostName=h10 Port=0 Version=25.11.0 OS=Linux 6.8.0 #2 SMP \
RealMemory=1 State=ALLOCATED Topology=default:leaf1 Extra={{"NodeAddr=": 1}} Comment=NodeName=n9 NodeAddr=10.0.0.3 \
ResumeAfterTime=None CfgTRES=cpu=32
"""


@pytest.mark.parametrize("address", ["10.0.0.10", "(null)"])
def test_addresses_are_those_that_the_controller_shows_whatever_people_write(allocation, tmp_path, capsys, address):
    (tmp_path / "scontrol").write_text(
        f"#!/bin/sh\n[ $2 = hostnames ] || cat <<'END'\n{NODES.format(address=address)}END\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    hosts = srun({**allocation, "PATH": f"{tmp_path}:/usr/bin:/bin"}, None).hosts
    known = address != "(null)"
    assert [host.address for host in hosts] == ["10.0.0.9", address if known else "n10"]
    said = "" if known else "note: scontrol shows no NodeAddr of n10: its name is taken for it\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("changes", "workers", "said"),
    [
        ({"SLURM_NTASKS": "many"}, None, ["SLURM_NTASKS='many' is not a whole number"]),
        ({"SLURM_JOB_ID": ""}, None, ["SLURM_JOB_ID", "sbatch", "scripts/slurm.sbatch", "salloc"]),
        ({"SLURM_STEP_ID": "0"}, None, ["SLURM_STEP_ID=0", "--backend=member"]),
        ({"SLURM_HET_SIZE": "2"}, None, ["job 7 is heterogeneous (SLURM_HET_SIZE=2)"]),
        ({}, 5, ["--workers=5", "multiple of 2"]),
        ({"SLURM_TASKS_PER_NODE": "many"}, None, ["SLURM_TASKS_PER_NODE='many'"]),
    ],
)
def test_a_mistake_says_what_to_do(allocation, changes, workers, said):
    with pytest.raises(UsageError) as raised:
        srun({**allocation, **changes}, workers)
    for part in said:
        assert part in str(raised.value)


@pytest.mark.parametrize("options", ["container-image=x", "--container-image='x"])
def test_options_of_srun_that_are_none_are_refused(allocation, options):
    with pytest.raises(UsageError, match=f"--srun_options={options}: "):
        srun(allocation, None, options)


@pytest.mark.parametrize("value", ["ten", "-1"])
def test_a_limit_of_requeues_that_is_no_number_is_refused_before_anything_starts(tmp_path, value):
    started = tmp_path / "started"
    environ = {"PATH": os.environ["PATH"], "MAX_REQUEUES": value, "PYTHON": f"touch {started}"}
    done = subprocess.run(["bash", SCRIPT], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert f"MAX_REQUEUES={value}: give a whole number" in done.stderr and not started.exists()


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        (["--backend=slurm"], "srun"),
        (["--backend=ssh", "--hosts=a,b"], "ssh"),
        (["--backend=tpu_vm", "--tpu_node=my-tpu"], "gcloud"),
    ],
)
def test_a_plan_needs_no_program_of_the_cluster_and_a_job_says_which(
    run_launcher, allocation, tmp_path, flags, program
):
    flags = [*flags, "--gin_file=fake.gin", f"--model_dir={tmp_path / 'run'}"]
    planned = run_launcher(*flags, "--dry_run", module="launcher.launch", env=allocation)
    assert planned.returncode == 0, planned.stderr
    assert f"# note: there is no {program} on PATH; " in planned.stdout
    done = run_launcher(*flags, module="launcher.launch", env=allocation)
    assert (done.returncode, done.stderr.count("\n")) == (64, 1), done.stderr
    assert f"error: there is no {program} on PATH; " in done.stderr and not (tmp_path / "run").exists()


def test_an_end_that_srun_reports_is_explained_by_what_the_command_said(allocation):
    transport = srun(allocation, None)
    said = [f"{sys.executable}: No module named launcher", "srun: error: n9: task 0: Exited with exit code 1"]
    assert transport.explain(transport.hosts[0], 1, said) is None
    refusal = AgentCommand(python=sys.executable, folder="/").explain(transport.hosts[0], 1, said)
    assert refusal.is_mistake and "n9 does not find the launcher" in refusal.message


@pytest.mark.parametrize(
    ("line", "is_mistake"),
    [
        ("srun: error: Unable to create step for job 7: Job/step already completing or completed", True),
        ("srun: error: Task launch for StepId=7.0 failed on node n9: Communication connection failure", False),
    ],
)
def test_what_srun_itself_refuses_is_its_own(allocation, line, is_mistake):
    transport = srun(allocation, None)
    refusal = transport.explain(transport.hosts[0], 1, [line, "srun: error: Application launch failed"])
    assert refusal.is_mistake == is_mistake and line.removeprefix("srun: error: ") in refusal.message


def test_a_person_outside_of_slurm_is_told_how_to_get_in(run_launcher):
    done = run_launcher("--backend=slurm", "--gin_file=fake.gin", module="launcher.launch")
    assert done.returncode == 64
    assert done.stderr.startswith("error: --backend=slurm: there is no Slurm job here") and "sbatch" in done.stderr


# -------------------------------------------------------------------------------------------------- with a real Slurm


@pytest.fixture(scope="module")
def running_slurm():
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has a limit
    try:
        with slurm_cluster.slurm(folder) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm(running_slurm):
    """Slurm with two free nodes."""
    yield running_slurm
    running_slurm.clear()


@pytest.fixture
def settings(fake_environment, slurm):
    """settings(**settings): what a person's shell has, and the fake worker's settings."""

    def make(**given):
        environ = slurm.environment(**fake_environment(**given, hosts=True, show=["SLURMD_NODENAME"]))
        return {**environ, "PYTHON": sys.executable, "TMPDIR": str(slurm.folder)}

    return make


@pytest.fixture
def flags(tmp_path):
    return ("--worker_module=fake_worker", "--gin_file=fake.gin", f"--model_dir={tmp_path / 'run'}")


@pytest.fixture
def submit(slurm, settings, flags, tmp_path):
    """submit(*flags, tasks=1, **settings): submits scripts/slurm.sbatch on two nodes; its number and the job."""

    def start(*more, tasks=1, **given):
        options = ("--nodes=2", f"--ntasks-per-node={tasks}", "--chdir", str(tmp_path))
        number = slurm.submit(SCRIPT, *flags, *more, options=options, **settings(**given))
        return number, LaunchedJob(None, tmp_path / "run")

    yield start
    for number in LaunchedJob(None, tmp_path / "run").running():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(number).kill()


def node_of(job, rank):
    return re.search(r"SLURMD_NODENAME=(\S+)", job.log(1, rank))[1]


def assert_nothing_is_left(slurm, job):
    assert job.running() == []
    assert list(slurm.folder.glob("launcher-*")) == []


def test_a_submitted_job_trains_on_all_its_nodes(slurm, submit):
    number, job = submit(tasks=2)
    ended = slurm.wait(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output(number)
    nodes = [node_of(job, rank) for rank in range(4)]
    assert nodes == ["node1", "node1", "node2", "node2"]
    assert "[launcher] job done: 1 attempt(s), 0 restart(s), exit code 0" in slurm.output(number)
    assert_nothing_is_left(slurm, job)


@pytest.mark.nightly  # the agents of all hosts are alike: test_ssh.py; a lost host is below
def test_a_killed_worker_is_named_and_all_go_on_from_the_checkpoint(slurm, submit):
    number, job = submit(faults=[fault("send_self", number=int(signal.SIGKILL))], checkpoint=True)
    assert slurm.wait(number)["JobState"] == "COMPLETED", slurm.output(number)
    assert (job.error(attempt=1)["worker"], job.error(attempt=1)["what"].split(" (")[0]) == (1, "was killed by SIGKILL")
    assert "training from step 2," in job.log(2, 0)
    assert_nothing_is_left(slurm, job)


def test_a_step_that_slurm_ends_is_a_lost_host_and_the_job_goes_on_without_its_orphans(slurm, submit, eventually):
    stuck = [fault("read_next_batch", rank=rank) for rank in (0, 1)]
    number, job = submit("--srun_options=--job-name=mine", faults=stuck, checkpoint=True)
    eventually(lambda: all("reading a batch" in job.log(1, rank) for rank in (0, 1)))
    steps = slurm.run("squeue", "--steps", "--noheader", "--format=%i %j %N", f"--jobs={number}").split("\n")
    assert len([line for line in steps if " mine " in line]) == 2
    (second,) = [line.split()[0] for line in steps if line.endswith("node2")]
    slurm.run("scancel", "--signal=KILL", second)
    assert slurm.wait(number)["JobState"] == "COMPLETED", slurm.output(number)
    assert job.error(attempt=1)["worker"] == 1
    assert "training from step 2," in job.log(2, 1)
    assert_nothing_is_left(slurm, job)


def test_the_early_signal_saves_and_queues_the_job_again_and_it_goes_on(slurm, submit, eventually):
    waiting = [fault("wait_for_sigterm", rank=rank, step=3) for rank in (0, 1)]
    number, job = submit(on_sigterm="save", steps=10, checkpoint=True, faults=waiting)
    eventually(lambda: all("waiting for SIGTERM" in job.log(1, rank) for rank in (0, 1)))
    # What --signal=B:TERM@300 has Slurm send five minutes before the end, now: to the batch script, and only to it.
    slurm.run("scancel", "--batch", "--signal=TERM", number)
    eventually(lambda: slurm.job(number).get("Restarts") == "1")
    assert "saved at step 4" in job.log(1, 0) and "saved at step 4" in job.log(1, 1)
    assert slurm.wait(number)["JobState"] == "COMPLETED", slurm.output(number)
    assert "training from step 4," in job.log(2, 0)
    assert "goes back into the queue" in slurm.output(number)
    assert_nothing_is_left(slurm, job)


def test_a_job_that_was_queued_again_as_often_as_it_may_ends_with_42(slurm, submit, eventually, monkeypatch):
    monkeypatch.setenv("MAX_REQUEUES", "0")
    waiting = [fault("wait_for_sigterm", rank=rank, step=3) for rank in (0, 1)]
    number, job = submit(on_sigterm="save", steps=10, checkpoint=True, faults=waiting)
    eventually(lambda: all("waiting for SIGTERM" in job.log(1, rank) for rank in (0, 1)))
    slurm.run("scancel", "--batch", "--signal=TERM", number)
    assert slurm.wait(number)["ExitCode"] == "42:0", slurm.output(number)
    assert "MAX_REQUEUES=0 times; the same command goes on" in slurm.output(number)
    assert_nothing_is_left(slurm, job)


def test_a_cancelled_job_saves_and_stays_out_of_the_queue(slurm, submit, eventually):
    waiting = [fault("wait_for_sigterm", rank=rank, step=3) for rank in (0, 1)]
    number, job = submit(on_sigterm="save", steps=10, checkpoint=True, faults=waiting)
    eventually(lambda: all("waiting for SIGTERM" in job.log(1, rank) for rank in (0, 1)))
    slurm.run("scancel", number)
    assert slurm.wait(number)["JobState"] == "CANCELLED", slurm.output(number)
    eventually(lambda: "stays out of the queue" in slurm.output(number) and not job.running())
    assert slurm.job(number)["Restarts"] == "0" and not job.log(2, 0)
    assert "saved at step 4" in job.log(1, 0) and "saved at step 4" in job.log(1, 1)
    assert_nothing_is_left(slurm, job)


def test_an_error_that_a_retry_will_not_help_fails_the_slurm_job_with_its_code(slurm, submit):
    number, job = submit(faults=[fault("raise_error", kind="ValueError", message="bad label 12", code=70)])
    ended = slurm.wait(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "70:0")
    assert "worker 1 ended with exit code 70: ValueError: bad label 12" in slurm.output(number)
    assert_nothing_is_left(slurm, job)


@pytest.mark.nightly  # nor does one that saves, above
def test_a_cancelled_job_leaves_nothing(slurm, submit, eventually):
    number, job = submit(
        faults=[fault("start_children", rank=0, step=1), *(fault("read_next_batch", rank=r) for r in (0, 1))]
    )
    eventually(lambda: all("reading a batch" in job.log(1, rank) for rank in (0, 1)))
    slurm.run("scancel", number)
    assert slurm.wait(number)["JobState"] == "CANCELLED"
    eventually(lambda: not job.running() and not list(slurm.folder.glob("launcher-*")))


NOWHERE = [
    ("--remote_python=/nowhere/python", "no interpreter /nowhere/python"),
    ("--remote_dir=/nowhere", "no folder /nowhere"),
]


@pytest.mark.parametrize(("flag", "said"), repeated_but(NOWHERE[:1], NOWHERE))
def test_a_node_that_cannot_run_the_launcher_is_a_mistake_with_its_reason(slurm, submit, flag, said):
    number, job = submit(flag, "--connect_timeout=1e6")
    ended = slurm.wait(number)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "64:0"), slurm.output(number)
    assert re.search(rf"error: node[12] has {said}", slurm.output(number)), slurm.output(number)
    assert not job.model_dir.exists()


def test_dry_run_prints_the_step_of_every_node_and_starts_nothing(slurm, submit):
    number, job = submit("--dry_run")
    assert slurm.wait(number)["JobState"] == "COMPLETED", slurm.output(number)
    for node in slurm_cluster.NODES:
        assert f"srun --nodelist={node} --nodes=1 --ntasks=1 --overlap" in slurm.output(number)
    assert not job.model_dir.exists()


def test_members_find_each_other_as_the_tasks_of_one_step(slurm, settings, flags, tmp_path):
    words = ("-m", "launcher.launch", "--backend=member", *flags)
    slurm.run("srun", "--nodes=2", "--ntasks-per-node=2", sys.executable, *words, env=settings())
    job = LaunchedJob(None, tmp_path / "run")
    assert [node_of(job, rank) for rank in range(4)] == ["node1", "node1", "node2", "node2"]
    assert all(job.log(1, rank).endswith("done\n") for rank in range(4))
    assert_nothing_is_left(slurm, job)

"""Jobs on several hosts by a real ssh: what is done about each way in which hosts and connections end.

Some run by `--backend=exec` too, with the same ssh as its --command.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
import sshd
from launched import fault
from places import ROOT
from running import is_running
from ssh_jobs import A, B, C, assert_nothing_left, by_each, by_ssh, hanging, wait_for_training, what_is_left

from launcher import __version__

pytestmark = [pytest.mark.skipif(bool(sshd.MISSING), reason=sshd.MISSING), pytest.mark.slow]


def client_of(job, address):
    """The ssh that connects the supervisor to a host."""
    children = psutil.Process(job.started.process.pid).children()
    return next(child for child in children if address in child.cmdline())


@by_each
def test_workers_on_three_hosts_train_together_and_their_logs_are_here(run_on):
    job, finished = run_on([A, B, C], "--gin_param", "train.steps = 4", workers=6)
    assert finished.returncode == 0, finished.stdout
    assert finished.stderr == ""
    for rank in range(6):
        log = job.log(1, rank).splitlines()
        assert log[0].startswith("training from step 0, --gin_file=fake.gin --gin_param train.steps = 4 --model_dir=")
        assert [line for line in finished.stdout.splitlines() if line.startswith(f"[worker {rank}] ")] == [
            f"[worker {rank}] {line}" for line in log
        ]


def test_a_login_that_greets_everybody_does_no_harm(run_on, hosts):
    greeting = 'ForceCommand printf "Welcome!\\nLast login: never "; eval "$SSH_ORIGINAL_COMMAND"\n'
    _, finished = run_on([A, B], servers=hosts(A, B, settings=greeting))
    assert finished.returncode == 0, finished.stdout


@by_ssh
def test_a_killed_worker_is_named_and_all_go_on_from_the_last_checkpoint(run_on):
    job, finished = run_on([A, B], faults=[fault("send_self", number=int(signal.SIGKILL))], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert job.error(attempt=1)["worker"] == 1
    assert "was killed by SIGKILL" in job.error(attempt=1)["what"]
    for rank in (0, 1):
        assert job.log(2, rank).startswith("training from step 2,")


def test_the_first_error_is_named_although_its_victims_on_other_hosts_end_before_it(run_on):
    raised = fault("raise_error", rank=2, kind="ValueError", message="bad label 12", code=70, after_peers=True)
    job, finished = run_on([A, B, C], faults=[raised])
    assert finished.returncode == 70
    assert finished.stderr.startswith(
        "First error (attempt 1): worker 2 ended with exit code 70: ValueError: bad label"
    )
    assert [victim["worker"] for victim in job.error()["victims"]] == [0, 1]


@pytest.mark.nightly  # as on one host, test_launch.py
def test_a_frozen_worker_is_named(run_on):
    faults = [fault("send_self", number=int(signal.SIGSTOP)), fault("exit_when_peers_are_frozen", rank=0)]
    job, finished = run_on([A, B], faults=faults, checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert job.error(attempt=1)["worker"] == 1
    assert "frozen" in job.error(attempt=1)["what"]


@pytest.mark.nightly  # as on one host, test_launch.py
def test_a_stuck_worker_is_named_by_its_stack(run_on):
    job, finished = run_on([A, B], "--stall_timeout=1", faults=[fault("read_next_batch")], checkpoint=True)
    assert finished.returncode == 0, finished.stdout
    assert job.error(attempt=1)["worker"] == 1
    assert job.error(attempt=1)["what"].startswith("is stuck: no progress for ")
    assert "in read_next_batch" in job.log(1, 1) and "in quick_execute" in job.log(1, 0)


# ---------------------------------------------------------------------------------------------------------- connections


def kill_client(job, servers, tmp_path):
    client_of(job, B).kill()


def kill_session(job, servers, tmp_path):
    for session in servers.sessions(B):
        session.kill()


def agent_at(address, job, tmp_path):
    """The agent that the connection to a host has started."""
    mark = re.search(r"LAUNCHER_AGENT=(\S+)", " ".join(client_of(job, address).cmdline()))[1]
    return next(agent for agent in sshd.agents(tmp_path) if agent.environ()["LAUNCHER_AGENT"] == mark)


def kill_agent(job, servers, tmp_path):
    agent_at(B, job, tmp_path).kill()


def stop_agent(job, servers, tmp_path):
    agent_at(B, job, tmp_path).suspend()


def stop_client(job, servers, tmp_path):
    client_of(job, B).suspend()


@pytest.mark.parametrize(
    ("launch_on", "lose", "said"),
    [
        ("ssh", kill_client, "the connection to 127.0.0.2 ended"),
        pytest.param("exec", kill_client, "the connection to 127.0.0.2 ended", marks=pytest.mark.nightly),
        pytest.param("ssh", kill_session, "the connection to 127.0.0.2 ended", marks=pytest.mark.nightly),
        pytest.param("ssh", kill_agent, "the connection to 127.0.0.2 ended", marks=pytest.mark.nightly),
        pytest.param(
            "ssh",
            stop_agent,  # the next test has one, too
            "nothing was heard from 127.0.0.2 for 8 s",
            marks=[pytest.mark.heavy, pytest.mark.nightly],
        ),
        pytest.param(
            "ssh",
            stop_client,
            "nothing was heard from 127.0.0.2 for 8 s",
            marks=[pytest.mark.heavy, pytest.mark.nightly],
        ),
    ],
    indirect=["launch_on"],
)
def test_a_host_that_is_lost_is_named_and_the_job_goes_on_without_what_ran_there(launch_on, tmp_path, lose, said):
    children = [fault("start_children", rank=rank, step=1) for rank in range(4)]
    job, servers = launch_on([A, B], workers=4, faults=[*children, *hanging(4)], checkpoint=True)
    wait_for_training(job, 4)
    before = job.running()
    assert len(before) == 4 + 8
    lose(job, servers, tmp_path)
    finished = job.wait()
    assert finished.returncode == 0, finished.stdout
    error = job.error(attempt=1)
    assert error["worker"] == 2 and error["what"].startswith(f"was lost: {said}")
    assert "The same error in: worker 3" in finished.stdout
    assert not any(map(is_running, before))
    assert_nothing_left(job, tmp_path)


def test_a_host_that_fell_silent_is_named_although_its_peers_failed_first(launch_on, tmp_path):
    faults = [fault("read_next_batch"), fault("exit_when_sent", rank=0, name="go")]
    job, servers = launch_on([A, B], faults=faults, checkpoint=True)
    job.until(lambda: "reading a batch" in job.log(1, 1))
    stop_agent(job, servers, tmp_path)
    (job.model_dir / "go").touch()
    assert job.wait().returncode == 0
    assert job.error(attempt=1)["worker"] == 1
    assert job.error(attempt=1)["what"].startswith("was lost: nothing was heard from 127.0.0.2")
    assert_nothing_left(job, tmp_path)


@pytest.mark.nightly  # so it is for local workers, in test_ends_of_a_job.py
@pytest.mark.heavy
def test_a_terminal_that_is_not_read_from_holds_nothing_up(fake_environment, hosts, tmp_path):
    servers = hosts(A)
    flags = ["--backend=ssh", f"--hosts={A}", f"--ssh_command={servers.command()}", "--env=FAKE_WORKER", "--env=TMPDIR"]
    settings = {"hosts": True, "faults": [fault("print_much", rank=0)]}
    command = [sys.executable, "-m", "launcher.launch", *flags, "--worker_module=fake_worker", "--gin_file=fake.gin"]
    process = subprocess.Popen(
        [*command, f"--model_dir={tmp_path / 'run'}"],
        stdout=subprocess.PIPE,
        env={**os.environ, **fake_environment(**settings)},
        cwd=tmp_path,
    )
    try:
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.communicate()


@by_ssh
def test_workers_that_save_on_a_signal_end_the_job_with_42(launch_on, tmp_path):
    job, _ = launch_on([A, B], on_sigterm="save", steps=10**9)
    job.until(lambda: job.log(1, 0) and job.log(1, 1))
    job.started.process.send_signal(signal.SIGTERM)
    finished = job.wait()
    assert finished.returncode == 42
    assert "saved at step" in finished.stdout
    assert job.attempts() == ["attempt_1"]
    assert_nothing_left(job, tmp_path)


@by_ssh
def test_nothing_survives_on_any_host_when_the_supervisor_is_killed(launch_on, eventually, tmp_path):
    children = [fault("start_children", rank=rank, step=1) for rank in (0, 1)]
    job, _ = launch_on([A, B], faults=[*children, *hanging(2)])
    wait_for_training(job, 2)
    assert len(job.running()) == 6 and len(sshd.agents(tmp_path)) == 2
    job.started.process.kill()
    job.started.process.wait()
    eventually(lambda: not what_is_left(job, tmp_path))


# ---------------------------------------------------------------------------------------------------------- not there


def test_a_host_that_cannot_be_reached_is_named_and_nothing_is_written(launch_on, hosts, tmp_path):
    job, _ = launch_on([A, B], "--connect_timeout=1", servers=hosts(A))
    finished = job.wait()
    assert finished.returncode == 75
    assert finished.stderr.startswith("error: 127.0.0.2 cannot be reached by ssh (")
    assert "Connection refused" in finished.stderr and finished.stderr.count("\n") == 1
    assert not job.model_dir.exists()
    assert_nothing_left(job, tmp_path)


def test_a_host_that_comes_up_in_time_is_waited_for(launch_on, hosts):
    servers = hosts(A)
    job, _ = launch_on([A, B], servers=servers)
    job.until(lambda: "127.0.0.2 cannot be reached" in job.started.stdout)
    servers.start(B)
    assert job.wait().returncode == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 42), (signal.SIGINT, 130)])
def test_a_signal_while_hosts_are_tried_ends_the_job(launch_on, hosts, tmp_path, number, code):
    job, _ = launch_on([A, B], servers=hosts(A))
    job.until(lambda: "127.0.0.2 cannot be reached" in job.started.stdout)
    job.started.process.send_signal(number)
    assert job.wait().returncode == code
    assert_nothing_left(job, tmp_path)


@pytest.mark.nightly  # test_ssh_elastic.py: too few are left
def test_a_host_that_does_not_come_back_ends_the_job_after_the_allowed_restarts(launch_on, tmp_path):
    job, servers = launch_on([A, B], "--connect_timeout=1", "--max_restarts=1", faults=hanging(2))
    wait_for_training(job, 2)
    servers.stop(B)
    finished = job.wait()
    assert finished.returncode == 75
    assert job.error()["worker"] == 1
    assert job.error()["what"].startswith("did not start: 127.0.0.2 cannot be reached by ssh (")
    assert_nothing_left(job, tmp_path)


def other_version(tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(ROOT / "launcher", folder / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "launcher" / "__init__.py").write_text('__version__ = "9.9.9"\n')
    return f"--remote_dir={folder}"


MISTAKES = {
    "key": (lambda servers, _: f"--ssh_command={servers.command('stranger')}", ["ssh to 127.0.0.1", "without a pass"]),
    "host key": (
        lambda servers, _: f"--ssh_command={servers.command(UserKnownHostsFile=os.devnull)}",
        ["ssh to 127.0.0.1", "Host key verification failed"],
    ),
    "python": (lambda *_: "--remote_python=/no/python", ["127.0.0.1", "/no/python", "--remote_python"]),
    "folder": (lambda *_: "--remote_dir=/no/folder", ["127.0.0.1", "/no/folder", "--remote_dir"]),
    "version": (
        lambda _, tmp_path: other_version(tmp_path),
        ["127.0.0.1", "9.9.9", f"install {__version__}, as here"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_person_has_to_mend_is_one_message_with_exit_code_64(launch_on, hosts, tmp_path, mistake):
    flag, said = MISTAKES[mistake]
    servers = hosts(A)
    job, _ = launch_on([A], flag(servers, tmp_path), servers=servers)
    finished = job.wait()
    assert finished.returncode == 64, finished.stdout
    assert finished.stderr.startswith("error: ") and finished.stderr.count("\n") == 1
    for part in said:
        assert part in finished.stderr
    assert not job.model_dir.exists()
    assert_nothing_left(job, tmp_path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--command=sh -c 'exec {command} </dev/null'"], "the agent on a gets no input; --command must pass it on"),
        (["--command=sh -c {command}", "--remote_dir=/no/folder"], "a has no folder /no/folder (env: "),
    ],
)
def test_a_command_that_serves_no_agent_is_a_mistake_with_its_reason(launch, flags, said):
    job = launch("--backend=exec", "--hosts=a", *flags, workers=1)
    finished = job.wait()
    assert (finished.returncode, finished.stderr.count("\n")) == (64, 1), finished.stdout
    assert finished.stderr.startswith(f"error: {said}") and not job.model_dir.exists()


@pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < 2, reason="one processor here")
def test_workers_of_a_host_divide_its_processors(launch):
    job = launch("--backend=exec", "--hosts=a", "--command=env {command}", workers=2, faults=hanging(2))
    wait_for_training(job, 2)
    shares = [psutil.Process(number).cpu_affinity() for number in job.running()]
    assert len(shares) == 2 and all(shares)
    assert sorted(shares[0] + shares[1]) == psutil.Process().cpu_affinity()


def test_a_host_without_the_launcher_is_told_so(launch, hosts, tmp_path):
    servers = hosts(A)
    python = tmp_path / "python"  # without what is installed here
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    job = launch(
        "--backend=ssh", f"--hosts={A}", f"--ssh_command={servers.command()}", f"--remote_python={python}",
        f"--remote_dir={tmp_path}", workers=1,
    )  # fmt: skip
    finished = job.wait()
    assert finished.returncode == 64
    assert f"{python} on 127.0.0.1 does not find the launcher" in finished.stderr

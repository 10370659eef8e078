"""The program on host 0 of a Cloud TPU, by a stand-in for gcloud that runs the command on this machine as a login shell
there would. No TPU is involved: what is tested is how the program is started, watched and ended."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest
from launched import LaunchedJob
from places import ROOT

from launcher.jobs.tpu_vm import gcloud as gcloud_to

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="process groups and signals"), pytest.mark.slow]

# Notes its words, and then does as gcloud does: --command goes to a shell on the host, with gcloud's own streams.
GCLOUD = r"""#!/usr/bin/env bash
printf '%s\n' "$*" >>"$GCLOUD_NOTES"
if [[ -n "${GCLOUD_FAILS:-}" ]]; then
  printf 'ERROR: (gcloud.compute.tpus.tpu-vm.ssh) %s\n' "$GCLOUD_FAILS" >&2
  exit 1
fi
printf 'SSH: Attempting to connect to worker 0...\n' >&2
for word in "$@"; do
  case "$word" in --command=*) command="${word#--command=}" ;; esac
done
env -u PYTHONPATH -u FAKE_WORKER bash -c "$command"
"""


@pytest.fixture
def gcloud(tmp_path):
    """A folder for PATH with the stand-in; what it was told is in `notes`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "gcloud").write_text(GCLOUD)
    (folder / "gcloud").chmod(0o755)
    return folder


@pytest.fixture
def launch_on_tpu(start_launcher, fake_environment, gcloud, tmp_path):
    """launch_on_tpu(*flags, env={}, **settings): starts a job on the node my-tpu."""
    jobs = []

    def start(*flags, env=(), **settings):
        environ = {
            **fake_environment(**settings),
            "PATH": f"{gcloud}:{os.environ['PATH']}",
            "GCLOUD_NOTES": str(gcloud / "notes"),
            **dict(env),
        }
        given = (
            "--backend=tpu_vm",
            "--tpu_node=my-tpu",
            "--zone=us-west4-a",
            "--env=FAKE_WORKER",
            "--gin_file=fake.gin",
        )
        here = (f"--remote_python={sys.executable}", f"--remote_dir={tmp_path}")
        words = (*given, *here, "--worker_module=fake_worker", f"--model_dir={tmp_path / 'run'}", *flags)
        jobs.append(LaunchedJob(start_launcher(*words, module="launcher.launch", env=environ), tmp_path / "run"))
        return jobs[-1]

    yield start
    for job in jobs:
        job.started.end()
        for number in job.running():
            psutil.Process(number).kill()


def test_one_program_on_host_0_drives_the_slice_by_its_name(launch_on_tpu, gcloud, tmp_path):
    job = launch_on_tpu(show=["TPU_NAME", "TPU_LOAD_LIBRARY"])
    finished = job.wait()
    assert finished.returncode == 0, finished.stderr
    assert "TPU_NAME=my-tpu" in job.log(1, 0) and "TPU_LOAD_LIBRARY=0" in job.log(1, 0)
    assert job.log(1, 0).endswith("done\n")
    told = (gcloud / "notes").read_text()
    assert told.startswith("compute tpus tpu-vm ssh my-tpu --zone=us-west4-a --worker=0 --quiet ")
    assert job.running() == [] and list(tmp_path.glob("launcher-*")) == []


def test_a_node_of_one_host_is_its_own(launch_on_tpu):
    job = launch_on_tpu("--tpu=local", show=["TPU_NAME", "TPU_LOAD_LIBRARY"], env={"TPU_NAME": None})
    assert job.wait().returncode == 0, job.started.stderr
    assert "TPU_NAME" not in job.log(1, 0) and "TPU_LOAD_LIBRARY" not in job.log(1, 0)


def test_a_killed_program_is_started_again_from_its_checkpoint(launch_on_tpu):
    killed = {"rank": 0, "step": 2, "do": "send_self", "number": int(signal.SIGKILL)}
    job = launch_on_tpu(faults=[killed], checkpoint=True)
    assert job.wait().returncode == 0, job.started.stderr
    assert job.log(2, 0).splitlines()[0].startswith("training from step 2,")


def test_sigterm_here_saves_there(launch_on_tpu):
    job = launch_on_tpu(on_sigterm="save", faults=[{"rank": 0, "step": 2, "do": "wait_for_sigterm"}])
    job.until(lambda: "waiting for SIGTERM" in job.log(1, 0))
    job.started.process.send_signal(signal.SIGTERM)
    assert job.wait().returncode == 42
    assert "saved at step 3" in job.log(1, 0) and job.running() == []


def test_what_gcloud_says_is_the_message(launch_on_tpu):
    job = launch_on_tpu(env={"GCLOUD_FAILS": "NOT_FOUND: Resource 'my-tpu' was not found"})
    finished = job.wait()
    assert finished.returncode == 64
    assert finished.stderr.startswith("error: gcloud finds no my-tpu (") and "was not found" in finished.stderr
    assert "scripts/tpu_vm_create.sh --node=my-tpu" in finished.stderr
    assert not job.model_dir.exists()


def test_dry_run_prints_gclouds_command_line_and_runs_nothing(launch_on_tpu, gcloud):
    finished = launch_on_tpu("--dry_run").wait()
    assert finished.returncode == 0, finished.stderr
    assert "gcloud compute tpus tpu-vm ssh my-tpu --zone=us-west4-a --worker=0" in finished.stdout
    assert "TPU_NAME=my-tpu" in finished.stdout
    assert not (gcloud / "notes").exists()


def test_with_jax_a_dry_run_prints_what_runs_on_every_host(launch_on_tpu):
    finished = launch_on_tpu("--dry_run", "--engine=pjrt", "--hosts=10.0.0.1,10.0.0.2").wait()
    assert finished.returncode == 0, finished.stderr
    for number in (0, 1):
        assert f"# agent on my-tpu host {number}, 1 worker(s)" in finished.stdout
        assert f"--worker={number} --quiet" in finished.stdout
    assert "10.0.0.1:<free port>" in finished.stdout and "TPU_NAME" not in finished.stdout


def test_the_program_is_where_the_start_up_script_installs_it(start_launcher, gcloud, tmp_path):
    words = ("--backend=tpu_vm", "--tpu_node=my-tpu", "--gin_file=x.gin", "--model_dir=/mnt/run", "--dry_run")
    environ = {"PATH": f"{gcloud}:{os.environ['PATH']}"}
    finished = start_launcher(*words, module="launcher.launch", env=environ).wait(60)
    assert finished.returncode == 0, finished.stderr
    assert "/opt/launcher/python -m launcher.main" in finished.stdout and "/opt/launcher/src" in finished.stdout
    script = (ROOT / "scripts" / "tpu_vm_startup.sh").read_text()
    assert 'home="${LAUNCHER_HOME:-/opt/launcher}"' in script
    assert '"$home/python"' in script and '"$home/src"' in script


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tpu_node="], "--tpu_node is missing"),
        (["--tpu_node=My TPU"], "--tpu_node=My TPU"),
        (["--zone=a b"], "--zone=a b"),
        (["--workers=2"], "--workers=2"),
        (["--hosts=a,b"], "add --engine=pjrt"),
        (["--hosts=a,a", "--engine=pjrt"], "named twice"),
        (["--hosts=a,b", "--engine=pjrt", "--workers=2"], "--workers=2"),
    ],
)
def test_a_mistake_is_one_message(launch_on_tpu, flags, said):
    finished = launch_on_tpu(*flags).wait()
    assert finished.returncode == 64
    assert finished.stderr.startswith("error: ") and said in finished.stderr and finished.stderr.count("\n") == 1


def test_an_error_of_the_connection_may_pass_and_one_of_the_request_may_not(gcloud, monkeypatch):
    monkeypatch.setenv("PATH", str(gcloud))
    transport = gcloud_to("me@my-tpu", None, None)
    (host,) = transport.hosts
    assert host.address == "my-tpu"
    lost = transport.explain(host, 255, ["ssh: connect to host 10.0.0.2 port 22: Connection timed out"])
    assert lost is not None and not lost.is_mistake
    refused = transport.explain(host, 1, ["ERROR: (gcloud.compute.tpus.tpu-vm.ssh) PERMISSION_DENIED: no"])
    assert refused is not None and refused.is_mistake
    assert transport.explain(host, 70, ["Traceback"]) is None

"""The start-up script of Cloud TPU VMs where JAX runs a slice: every host runs the program, and knows the others."""

from __future__ import annotations

import json
import os
import shlex

import pytest
from places import ROOT
from tpu_vm_host import Host

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="the script is bash"), pytest.mark.slow]

SLICE = ("--engine=pjrt", "--hosts=10.0.0.1,10.0.0.2:23", "--replicas=4")


def test_with_jax_every_host_runs_the_program_and_knows_the_others(host):
    done = host.train(*SLICE, "--worker=1", "--save_to=gs://bucket/run")
    assert done.returncode == 0, done.stderr
    assert host.calls[0] == "install cpu,jax_tpu " and (host.home / "venv_pjrt").exists()
    assert shlex.split(host.calls[1]) == [
        "launch", "--backend=member", "--start_timeout=3600", "--gin_file=resnet_tpu.gin",
        "--gin_param=train.steps = 30", "--engine=pjrt", f"--model_dir={host.home}/run", "--replicas=4",
    ]  # fmt: skip
    assert json.loads(host.environment["TF_CONFIG"]) == {
        "cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:23"]}, "task": {"type": "worker", "index": 1}
    }  # fmt: skip
    assert (host.environment["TPU_NAME"], host.environment["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"]) == ("", "")
    assert host.status["worker"] == 1 and host.status["state"] == "done"
    assert not (host.buckets / "bucket").exists()  # host 0 saves for all


def test_with_jax_one_host_is_a_program_alone(host):
    done = host.run(f"--source={host.repository}", "--replicas=8", "--", "--gin_file=x.gin", "--engine", "pjrt")
    assert done.returncode == 0, done.stderr
    assert host.calls[1] == f"main --gin_file=x.gin --engine pjrt --model_dir={host.home}/run --replicas=8"
    assert (host.environment["TPU_NAME"], host.environment["TF_CONFIG"]) == ("", "")


def test_all_hosts_go_on_from_what_is_in_the_bucket(host):
    host.plan(75, 75)
    assert host.train(*SLICE, "--worker=0", "--save_to=gs://bucket/run").returncode == 75
    newer = host.home / "run" / "checkpoints" / "newer_than_the_bucket"
    newer.touch()
    assert host.train(*SLICE, "--worker=0", "--save_to=gs://bucket/run").returncode == 75
    assert (host.notes / "found").read_text().split() == ["step_2"] and not newer.exists()


def test_a_folder_that_all_hosts_share_is_host_0s_to_fill(host):
    shared = host.folder / "shared"
    flags = ("--", "--gin_file=x.gin", f"--model_dir={shared}")
    done = host.run(f"--source={host.repository}", *SLICE, "--worker=1", "--save_to=gs://bucket/run", *flags)
    assert done.returncode == 0, done.stderr
    assert not (host.notes / "gcloud").exists()


def test_hosts_without_common_checkpoints_are_refused(host):
    done = host.train(*SLICE, "--worker=1")
    assert done.returncode == 64 and "--save_to=gs://..., or --model_dir on a disk they share" in done.stderr
    assert host.calls == [] and host.status["state"] == "failed"


def test_a_host_whose_python_is_too_old_for_jax_gets_another(host):
    for name in ("python3", "python3.13", "python3.12", "python3.11", "python3.10"):
        host.write(host.folder / "bin" / name, "#!/bin/sh\nexit 1\n")
    host.write(host.folder / "bin" / "apt-get", f'#!/bin/sh\necho "$@" >>"{host.notes}/apt"\n')
    assert host.run(f"--source={host.repository}", "--engine=pjrt", "--install_only").returncode == 0
    assert (host.notes / "apt").read_text().splitlines()[-1].endswith("install -y -q python3.11-venv")
    assert (host.notes / "given").read_text().splitlines()[0] == "python3.11"


TRAINS = r"""#!/usr/bin/env bash
mkdir -p "$VENV/bin"
touch "$VENV/pyvenv.cfg"
printf '#!/bin/sh\nexport JAX_PLATFORMS=cpu PYTHONPATH=ROOT\nexec REAL "$@"\n' >"$VENV/bin/python"
chmod +x "$VENV/bin/python"
"""


@pytest.mark.nightly  # test_skypilot.py has two nodes, test_pjrt_engine.py two processes of JAX
@pytest.mark.heavy
def test_two_hosts_train_one_model_by_jax(tmp_path, free_ports):
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    flags = ("--gin_file", str(ROOT / "tests/support/small_digits.gin"), "--gin_param=train.epochs = 1")
    slice_ = []
    for worker in range(2):
        folder = tmp_path / str(worker)
        folder.mkdir()
        slice_.append(Host(folder))
        slice_[-1].write(slice_[-1].repository / "scripts" / "install.sh", TRAINS.replace("ROOT", str(ROOT)))
        slice_[-1].commit()
    try:
        running = [
            one.start(
                f"--source={one.repository}", f"--hosts={hosts}", f"--worker={worker}", "--engine=pjrt",
                "--replicas=2", "--", *flags, f"--model_dir={tmp_path}/run",
            )
            for worker, one in enumerate(slice_)
        ]  # fmt: skip
        for process in running:
            out, _ = process.communicate(timeout=240)
            assert process.returncode == 0, out
        assert [one.status["state"] for one in slice_] == ["done", "done"]
    finally:
        for one in slice_:
            one.close()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["num_replicas"], summary["strategy"]) == ("completed", 4, "pjrt")


def test_a_dry_run_of_every_host_prints_its_own_command(host):
    done = host.train("--dry_run", *SLICE, "--worker=1", "--save_to=gs://bucket/run")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert any(words[-1] == "cpu,jax_tpu" for words in commands)
    assert ["+", "rm", "-rf", "--", f"{host.home}/run"] in commands
    assert "launcher.launch" in commands[-1] and any('"index": 1' in word for word in commands[-1])

"""One program that drives another host: the same weights, checkpoints on its own disk, and a host that is lost."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from launcher.checkpoints import CheckpointStore

RECIPE = (
    "--gin_file=resnet_cpu.gin",
    "--gin_param=resnet.depth = 8",
    "--gin_param=train.global_batch_size = 32",
    "--gin_param=train.ema_decay = 0.9",
    "--gin_param=train.steps_per_loop = 2",
    "--gin_param=train.log_every = 2",
    "--gin_param=train.checkpoint_every = 2",
)
PATH = f"{Path(__file__).parent.parent.parent}:{Path(__file__).parent}"


@pytest.fixture
def start_host(start_launcher, tmp_path):
    """start_host(port) -> a host that serves, in a folder of its own."""

    def start(port):
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        host = start_launcher(
            f"127.0.0.1:{port}", module="remote_host", cwd=folder, env={"PYTHONPATH": PATH, "GRPC_VERBOSITY": "NONE"}
        )
        host.wait_until(lambda: "serves" in host.stdout)
        return host

    return start


def drive(start_launcher, port, *flags):
    environ = {"PYTHONPATH": PATH, "REMOTE_HOST": f"127.0.0.1:{port}"}
    return start_launcher(*RECIPE, "--model_dir=run", *flags, module="remote_run", env=environ)


def state_of(model_dir):
    store = CheckpointStore(f"{model_dir}/checkpoints", is_chief=False)
    return store.latest(), store.read(store.latest())


@pytest.mark.heavy
def test_a_run_on_a_host_that_is_driven_is_the_run_of_one_at_home(start_host, start_launcher, free_ports, tmp_path):
    (port,) = free_ports(1)
    start_host(port)
    driven = drive(start_launcher, port, "--gin_param=train.steps = 4").wait()
    assert driven.returncode == 0, driven.stderr
    home = start_launcher(*RECIPE, "--model_dir=home", "--gin_param=train.steps = 4").wait()
    assert home.returncode == 0, home.stderr

    (step, weights), (_, expected) = state_of(tmp_path / "run"), state_of(tmp_path / "home")
    assert step == 4
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert list((tmp_path / "elsewhere").iterdir()) == [], "the driven host has written nothing"


@pytest.mark.heavy
def test_a_host_that_is_lost_is_a_run_to_be_started_again(start_host, start_launcher, free_ports, tmp_path):
    (port,) = free_ports(1)
    host = start_host(port)
    driving = drive(start_launcher, port, "--gin_param=train.steps = 100_000", "--gin_param=train.epochs = None")
    checkpoints = tmp_path / "run" / "checkpoints"
    driving.wait_until(lambda: checkpoints.is_dir() and list(checkpoints.glob("step_*")))
    host.send(signal.SIGKILL)
    lost = driving.wait()
    assert lost.returncode == 75, lost.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 75)
    step, _ = state_of(tmp_path / "run")
    assert summary["step"] >= step >= 2

    start_host(port)
    again = drive(start_launcher, port, f"--gin_param=train.steps = {step + 2}").wait()
    assert again.returncode == 0, again.stderr
    assert f"restored step {step}" in again.stdout
    assert state_of(tmp_path / "run")[0] == step + 2

"""One program that drives another host, which is lost: exit 75, and the same command goes on from what was saved."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from building import build_session
from places import PYTHONPATH

from launcher.checkpoints import CheckpointStore

RECIPE = "mlp_fashion.gin"
BINDINGS = (
    "image_data.name = 'digits'",
    "mlp.units = 8",
    "mlp.layers = 1",
    "train.global_batch_size = 32",
    "train.steps = 300",
    "train.steps_per_loop = 5",
    "train.log_every = 10",
    "train.checkpoint_every = 10",
    "train.ema_decay = 0.9",
)
STEPS = 300


@pytest.mark.heavy
def test_a_run_on_a_driven_host_outlives_it_and_ends_as_a_run_at_home(start_launcher, free_ports, tmp_path):
    (port,) = free_ports(1)
    elsewhere, checkpoints = tmp_path / "elsewhere", tmp_path / "run" / "checkpoints"
    elsewhere.mkdir()

    def start_host():
        host = start_launcher(f"127.0.0.1:{port}", module="remote_host", cwd=elsewhere, env={"PYTHONPATH": PYTHONPATH})
        host.wait_until(lambda: "serves" in host.stdout)
        return host

    def drive():
        environ = {"PYTHONPATH": PYTHONPATH, "REMOTE_HOST": f"127.0.0.1:{port}"}
        flags = (f"--gin_file={RECIPE}", "--model_dir=run", *(f"--gin_param={binding}" for binding in BINDINGS))
        return start_launcher(*flags, module="remote_run", env=environ)

    def saved():
        store = CheckpointStore(str(checkpoints), is_chief=False)
        return store.latest(), store.read(store.latest())

    host, driving = start_host(), drive()
    driving.wait_until(lambda: checkpoints.is_dir() and list(checkpoints.glob("step_*")))
    host.send(signal.SIGKILL)
    lost = driving.wait()
    assert lost.returncode == 75, lost.stderr
    assert (tmp_path / "run" / "summary.json").exists(), f"{lost.stdout}\n{lost.stderr}"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 75)
    step, _ = saved()
    assert 10 <= step <= summary["step"] < STEPS

    start_host()
    again = drive().wait()
    assert again.returncode == 0, again.stderr
    assert f"restored step {step}" in again.stdout
    assert list(elsewhere.iterdir()) == [], "what is saved is saved by the program that drives"

    home = build_session(RECIPE, BINDINGS)
    home.trainer.train(home.trainer.batches(home.plan.data), STEPS)
    last, weights = saved()
    assert last == STEPS
    for name, value in home.trainer.state.snapshot().items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6, err_msg=name)

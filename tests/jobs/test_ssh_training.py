"""Training over ssh is the training of this host: the same weights, bit for bit, from the same command elsewhere."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import sshd
from places import PYTHONPATH, SMALL_DIGITS

from launcher.checkpoints import CheckpointStore

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(bool(sshd.MISSING), reason=sshd.MISSING)]

A, B = "127.0.0.1", "127.0.0.2"
STEPS = 6
FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    f"--gin_param=train.steps = {STEPS}",
    "--mode=train",
    "--deterministic",
)


@pytest.mark.nightly
def test_two_hosts_train_to_the_weights_of_two_local_workers(run_launcher, hosts, tmp_path):
    local = run_launcher("--workers=2", *FLAGS, f"--model_dir={tmp_path}/local", module="launcher.launch")
    assert local.returncode == 0, local.stdout
    servers = hosts(A, B)
    flags = ("--backend=ssh", f"--hosts={A},{B}", f"--ssh_command={servers.command()}", "--env=CUDA_VISIBLE_DEVICES")
    remote = run_launcher(*flags, *FLAGS, f"--model_dir={tmp_path}/remote", module="launcher.launch")
    assert remote.returncode == 0, remote.stdout
    expected = CheckpointStore(f"{tmp_path}/local/checkpoints").read(STEPS)
    found = CheckpointStore(f"{tmp_path}/remote/checkpoints").read(STEPS)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def trained(model_dir, steps):
    events = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    losses = {event["step"]: event["loss"] for event in events if event["split"] == "train"}
    return np.array([losses[step] for step in range(10, steps + 1, 10)]), CheckpointStore(
        str(model_dir / "checkpoints")
    ).read(steps)


@pytest.mark.nightly
def test_eight_hosts_lose_one_and_two_more_and_get_all_back_with_the_weights_of_an_undisturbed_run(
    run_launcher, start_launcher, hosts, tmp_path
):
    steps, places = 1500, [f"127.0.0.{number}" for number in range(1, 9)]
    flags = (
        f"--gin_file={SMALL_DIGITS}", f"--gin_param=train.steps = {steps}", "--gin_param=train.epochs = None",
        "--gin_param=train.log_every = 10", "--gin_param=train.steps_per_loop = 10", "--mode=train",
        "--gin_param=train.checkpoint_every = 50", "--gin_param=train.global_batch_size = 64",
    )  # fmt: skip
    alone = run_launcher(*flags, "--replicas=1", f"--model_dir={tmp_path}/alone")
    assert alone.returncode == 0, alone.stdout
    servers = hosts(*places)
    logs = tmp_path / "elastic" / "logs"
    job = start_launcher(
        "--backend=ssh", f"--hosts={','.join(places)}", f"--ssh_command={servers.command()}", "--min_workers=3",
        "--connect_timeout=3", "--env=CUDA_VISIBLE_DEVICES", *flags, f"--model_dir={tmp_path}/elastic",
        module="launcher.launch",
    )  # fmt: skip

    def trains(workers):
        """Whether the newest attempt has so many workers and has done a step."""
        began = re.findall(r"attempt (\d+): starting (\d+) worker", job.stdout)
        log = logs / f"attempt_{began[-1][0]}" / "worker_0.log" if began else logs
        return bool(began) and int(began[-1][1]) == workers and log.exists() and "\nstep " in log.read_text()

    job.wait_until(lambda: trains(8), timeout=180)
    servers.stop(places[6])
    job.wait_until(lambda: trains(7), timeout=180)
    servers.stop(places[1])
    servers.stop(places[3])
    job.wait_until(lambda: trains(5), timeout=180)
    servers.start(places[1], places[3], places[6])
    finished = job.wait(300)
    assert finished.returncode == 0, finished.stdout
    assert "more hosts are there" in finished.stdout
    assert trains(8)
    (losses, weights), (expected_losses, expected) = (trained(tmp_path / name, steps) for name in ("elastic", "alone"))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.nightly
def test_a_slow_host_is_left_out_and_the_weights_are_those_of_an_undisturbed_run(run_launcher, hosts, tmp_path):
    """The run itself finds that one of its workers is slow; the whole global batch is the other one's from then on."""
    steps, recipe = 150, tmp_path / "slowed.gin"
    lines = ["import slowed_digits", f"include '{SMALL_DIGITS}'", "image_classification.model = @slowed.perceptron",
             "slowed.perceptron.seconds = 0.05", "slowed.perceptron.worker = 1", "train.log_every = 2",
             f"train.steps = {steps}"]  # fmt: skip
    recipe.write_text("\n".join(lines) + "\n")
    flags, env = (f"--gin_file={recipe}", "--mode=train"), {"PYTHONPATH": PYTHONPATH}
    alone = run_launcher(*flags, "--replicas=1", f"--model_dir={tmp_path}/alone", env=env)
    assert alone.returncode == 0, alone.stderr
    servers = hosts(A, B)
    job = run_launcher(
        "--backend=ssh", f"--hosts={A},{B}", f"--ssh_command={servers.command()}", "--env=CUDA_VISIBLE_DEVICES",
        "--min_workers=1", "--leave_out_stragglers", *flags, f"--model_dir={tmp_path}/job", module="launcher.launch",
        env=env,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    assert "127.0.0.2 is left out: worker 1 is a straggler" in job.stdout
    assert "attempt 2: starting 1 worker(s)" in job.stdout
    (losses, weights), (expected_losses, expected) = (trained(tmp_path / name, steps) for name in ("job", "alone"))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=0, atol=1e-5, err_msg=name)

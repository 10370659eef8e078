"""A run of four workers, interrupted, goes on with two or one: same examples, same state, same losses."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from launcher import main as entry
from launcher.checkpoints import CheckpointStore

RECIPE = """
include 'base/images.gin'
train.global_batch_size = 64
train.steps_per_loop = 4
train.log_every = 1
train.checkpoint_every = 5
train.ema_decay = 0.9
train.seed = 7
train.optimizer = @adam
train.loss_scale = @DynamicLossScale()
DynamicLossScale.initial_scale = 4.0
DynamicLossScale.growth_interval = 9
image_classification.model = @mlp
image_data.name = 'digits'
image_data.augmentation = 'small'
mlp.units = 64
adam.learning_rate = @cosine()
cosine.peak = 1e-3
cosine.decay_steps = 1000
"""
MORE_STEPS = 12


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "elastic.gin"
    path.write_text(RECIPE)
    return f"--gin_file={path}"


def train_events(model_dir: Path) -> list[dict]:
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["split"] == "train"]


def interrupt_four_workers(start_launcher, free_ports, recipe: str, model_dir: Path) -> int:
    """Asks one worker of four to stop; returns the step that all saved."""
    hosts = [f"127.0.0.1:{port}" for port in free_ports(4)]
    workers = [
        start_launcher(
            recipe, f"--model_dir={model_dir}", "--mode=train", "--gin_param=train.steps = 100000",
            env={"TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})},
        )
        for index in range(4)
    ]  # fmt: skip
    store = CheckpointStore(str(model_dir / "checkpoints"))
    workers[0].wait_until(lambda: len(store.steps()) >= 1)
    workers[3].send(signal.SIGTERM)
    assert [worker.wait().returncode for worker in workers] == [42] * 4, workers[0].tail()
    step = store.latest()
    assert step is not None
    return step


@pytest.mark.heavy
@pytest.mark.parametrize("fewer", [("three", "one"), pytest.param(("two",), marks=pytest.mark.nightly)])
def test_four_workers_interrupted_go_on_as_fewer_with_the_same_losses(
    fewer, start_launcher, run_workers, free_ports, recipe, tmp_path
):
    interrupted, undisturbed = tmp_path / "interrupted", tmp_path / "undisturbed"
    step = interrupt_four_workers(start_launcher, free_ports, recipe, interrupted)
    total = step + MORE_STEPS
    to_the_end = (recipe, f"--gin_param=train.steps = {total}", "--mode=train")

    def one_process(model_dir: str, *flags: str) -> list[int]:
        return [entry.main(["launcher", *to_the_end, model_dir, *flags])]

    assert one_process(f"--model_dir={undisturbed}", "--strategy=one_device") == [0]
    expected = train_events(undisturbed)
    assert [event["step"] for event in expected] == list(range(1, total + 1))
    assert expected[-1]["loss"] < 0.98 * expected[0]["loss"], "nothing was learned, so nothing is compared"
    assert len({event["loss_scale"] for event in expected[step:]}) > 1, "the scale did not move after the interruption"
    weights = CheckpointStore(str(undisturbed / "checkpoints")).read(total)

    def three_of_four(model_dir: str) -> list[int]:
        missing = {"LAUNCHER_FULL_WORKERS": "4"}
        return [worker.returncode for worker in run_workers(3, *to_the_end, model_dir, env=missing)]

    def two_workers(model_dir: str) -> list[int]:
        return [worker.returncode for worker in run_workers(2, *to_the_end, model_dir)]

    resumptions = {
        "three": three_of_four,
        "two": two_workers,
        "one": lambda model_dir: one_process(model_dir, "--strategy=one_device", "--gin_param=train.microbatches = 4"),
    }
    for name in fewer:
        model_dir = tmp_path / name
        shutil.copytree(interrupted, model_dir)
        assert set(resumptions[name](f"--model_dir={model_dir}")) == {0}, name
        found = train_events(model_dir)
        for field in ("step", "loss_scale", "skipped_steps"):
            assert [event[field] for event in found] == [event[field] for event in expected], (name, field)
        for field in ("loss", "accuracy", "learning_rate"):
            values = [[event[field] for event in events] for events in (found, expected)]
            np.testing.assert_allclose(*values, rtol=1e-5, err_msg=f"{field} on {name}")
        state = CheckpointStore(str(model_dir / "checkpoints")).read(total)
        assert state.keys() == weights.keys()
        for key, value in weights.items():
            np.testing.assert_allclose(state[key], value, rtol=0, atol=1e-5, err_msg=f"{key} on {name}")


# In one process, test_shard_optimizer.py has other numbers of parts, and test_from_chief.py workers that share it out.
@pytest.mark.nightly
@pytest.mark.heavy
def test_two_workers_killed_with_their_state_shared_out_go_on_on_other_topologies_and_without_sharing(
    start_launcher, free_ports, recipe, tmp_path
):
    killed, undisturbed, sharing = (
        tmp_path / "killed",
        tmp_path / "undisturbed",
        "--gin_param=train.shard = 'optimizer'",
    )
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = [
        start_launcher(
            recipe, sharing, f"--model_dir={killed}", "--mode=train", "--gin_param=train.steps = 100000",
            env={"TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})},
        )
        for index in range(2)
    ]  # fmt: skip
    store = CheckpointStore(str(killed / "checkpoints"))
    workers[0].wait_until(lambda: len(store.steps()) >= 1)
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        worker.wait()
    total = store.latest() + MORE_STEPS
    to_the_end = (recipe, f"--gin_param=train.steps = {total}", "--mode=train")

    def one_process(model_dir: Path, *flags: str) -> None:
        assert entry.main(["launcher", *to_the_end, f"--model_dir={model_dir}", *flags]) == 0

    one_process(undisturbed, "--strategy=one_device")
    expected = CheckpointStore(str(undisturbed / "checkpoints")).read(total)
    # As two workers again, test_from_chief.py does, bit for bit.
    resumptions = {
        "two replicas without sharing": lambda model_dir: one_process(model_dir, "--replicas=2"),
        "four replicas": lambda model_dir: one_process(model_dir, "--replicas=4", sharing),
    }
    for name, resume in resumptions.items():
        shutil.copytree(killed, tmp_path / name)
        resume(tmp_path / name)
        state = CheckpointStore(str(tmp_path / name / "checkpoints")).read(total)
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(state[key], value, rtol=0, atol=1e-5, err_msg=f"{key} on {name}")


def test_another_order_of_examples_is_refused_and_nothing_is_touched(recipe, tmp_path, capsys):
    flags = ("launcher", recipe, f"--model_dir={tmp_path}/run", "--mode=train")
    assert entry.main([*flags, "--gin_param=train.steps = 3", "--seed=5"]) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    longer = "--gin_param=train.steps = 6"
    for change, named in (
        ((), "seed: 5 then, 7 now"),
        (("--seed=5", "--gin_param=train.global_batch_size = 32"), "global_batch_size: 64 then, 32 now"),
    ):
        assert entry.main([*flags, longer, *change]) == 64
        said = capsys.readouterr().err
        assert named in said
        assert "Traceback" not in said
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert entry.main([*flags, longer, "--seed=5"]) == 0

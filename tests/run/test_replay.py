"""train.replay_every: a batch's gradients computed twice, and the replica that computes other bits named."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

from launcher import main as entry
from launcher.errors import UsageError
from launcher.run.actions import replay

RECIPE = """
include 'base/images.gin'
train.global_batch_size = 32
train.steps = 6
train.log_every = 1
train.replay_every = 2
train.optimizer = @momentum
momentum.learning_rate = 0.1
image_classification.model = @mlp
image_data.name = 'digits'
mlp.units = 8
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "replay.gin"
    path.write_text(RECIPE)
    return f"--gin_file={path}"


def losses(model_dir):
    events = map(json.loads, (model_dir / "metrics.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["split"] == "train"]


def test_it_changes_no_number(recipe, tmp_path):
    for name, every in (("with", 2), ("without", 0)):
        flags = ("--mode=train", "--replicas=2", f"--gin_param=train.replay_every = {every}")
        assert entry.main(["launcher", recipe, f"--model_dir={tmp_path / name}", *flags]) == 0
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_one_flipped_bit_ends_the_run_and_names_the_replica_and_the_layer(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("launcher.worker.drill.flips_bit", iter([False, True]).__next__)
    assert entry.main(["launcher", recipe, f"--model_dir={tmp_path / 'run'}", "--mode=train"]) == 75
    said = capsys.readouterr().err
    assert "replica 0 on " in said and "dense1/kernel twice with different bits, after step 4" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("accelerator", "beside", "steps", "reads_once", "said"),
    [
        ("gpu", False, None, False, "add --deterministic"),
        ("cpu", True, None, False, "--engine=tensorflow"),
        ("cpu", False, (), False, "--engine=tensorflow"),
        ("cpu", False, None, True, "no batch twice"),
        ("cpu", False, None, False, ""),
    ],
)
def test_what_cannot_be_repeated_is_refused(accelerator, beside, steps, reads_once, said):
    plan = SimpleNamespace(
        recipe=SimpleNamespace(replay_every=3, task=SimpleNamespace(step_assigns=steps)),
        data=SimpleNamespace(batch_size=4, note="", reads_again=False, reads_once=reads_once),
        strategy=SimpleNamespace(accelerator=accelerator),
        deterministic=False,
    )
    runtime = SimpleNamespace()
    runtime.host = SimpleNamespace() if beside else runtime
    with pytest.raises(UsageError, match=said) if said else contextlib.nullcontext():
        replay._check(plan, runtime)


def test_a_number_below_zero_is_refused_before_anything_is_written(recipe, tmp_path, capsys):
    flags = (f"--model_dir={tmp_path / 'run'}", "--mode=train")
    assert entry.main(["launcher", recipe, *flags, "--gin_param=train.replay_every = -1"]) == 64
    assert "replay_every" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.heavy
def test_a_drill_flips_a_bit_in_one_of_two_workers_which_is_named_and_the_job_goes_on(run_launcher, recipe, tmp_path):
    run = run_launcher(
        "--workers=2", recipe, f"--model_dir={tmp_path / 'run'}", "--mode=train", "--drill=flip_bit",
        "--drill_step=2", "--gin_param=train.steps = 40", "--gin_param=train.checkpoint_every = 20",
        "--gin_param=train.steps_per_loop = 1", module="launcher.launch",
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
    assert "drill passed: flip_bit" in run.stdout
    assert "worker 1" in run.stdout and "MachineError" in run.stdout

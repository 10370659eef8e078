"""`--mode=precision_report`: recipes, a task of one's own, checkpoints, and what is refused."""

from __future__ import annotations

import json
import re

import keras
import numpy as np
import pytest
from small_run import GivenTask, build, linear_batches, negative_sum

from launcher import main
from launcher.config import gin_bindings
from launcher.precision_report.examine import PrecisionReportSettings, examine
from launcher.step.precision import FixedLossScale

pytestmark = pytest.mark.slow

SMALL = (
    "--gin_file=mlp_fashion.gin",
    "--gin_param=image_data.name = 'digits'",
    "--gin_param=mlp.units = 16",
    "--gin_param=train.global_batch_size = 16",
    "--gin_param=train.steps = 4",
    "--gin_param=verify.steps = 3",
    "--gin_param=gpu.tf32 = False",
)


@pytest.fixture
def launch(capsys):
    """launch(*args): runs `launcher.main` in this process; the exit code and all it printed."""

    def run(*args: str) -> tuple[int, str, str]:
        gin_bindings.reset()
        code = main.main(["launcher", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def steep() -> keras.Model:
    """The gradient of the mean loss by its first layer's outputs is 2^-26: float16 has none of it at scale 1."""
    inputs = keras.Input((4,))
    values = keras.layers.Dense(8, use_bias=False, name="lost", kernel_initializer="zeros")(inputs)
    for name in ("middle", "last"):
        small = keras.initializers.Constant(2.0**-12)
        values = keras.layers.Dense(1, use_bias=False, name=name, kernel_initializer=small)(values)
    return keras.Model(inputs, values)


def steep_task(steps: int = 2) -> GivenTask:
    x = np.random.default_rng(0).normal(size=(steps, 4, 4)).astype(np.float32)
    return GivenTask(linear_batches(x), steep, negative_sum)


def test_finds_the_layer_that_underflows_and_a_scale_that_saves_it():
    made = build(steep_task(), precision="mixed_float16", loss_scale=FixedLossScale(scale=1.0))

    found = examine(made, PrecisionReportSettings(batches=2), 1.0, lambda line: None)
    lost = {one.path: one for one in found.gradients if one.kind == "activation"}["lost"]
    assert found.advice.needed
    assert found.advice.scale_log2 is not None and found.advice.scale_log2 >= 3
    assert lost.maximum == 2.0**-26
    before, after = ({one.path: one for one in found.errors[k]} for k in (0, found.advice.scale_log2))
    assert before["lost/kernel"].relative == 1  # all of it
    assert after["lost/kernel"].relative < 2e-3
    assert after["lost/kernel"].cosine > 0.9999


def test_training_with_the_recommended_scale_moves_what_scale_1_does_not():
    def moved(policy, scale):
        made = build(steep_task(), precision=policy, loss_scale=FixedLossScale(scale=scale))
        made.trainer.train(made.trainer.batches(made.plan.data), 1)
        return made.model.get_layer("lost").kernel.numpy()

    made = build(steep_task(), precision="mixed_float16")
    scale = 2.0 ** examine(made, PrecisionReportSettings(), 1.0, lambda line: None).advice.scale_log2
    assert not moved("mixed_float16", 1.0).any()
    np.testing.assert_allclose(moved("mixed_float16", scale), moved("float32", 1.0), rtol=5e-3)


def test_reports_on_a_recipe(launch, tmp_path):
    code, out, err = launch(*SMALL, "--mode=precision_report", "--replicas=2", f"--model_dir={tmp_path}")

    assert code == 0, err
    assert "mixed_float16 (the recipe's is float32)" in out
    assert re.search(r"Recommended scale: 2\^\d+", out)
    report = json.loads((tmp_path / "precision.json").read_text())
    assert set(report) == {
        "format", "plan", "policy", "batches", "loss", "loss_scale", "sweep", "gradients", "errors", "lint", "versions",
    }  # fmt: skip
    assert set(report["lint"][0]) == {"rule", "level", "path", "text", "fix"}
    assert {one["kind"] for one in report["gradients"]} == {"weight", "activation", "wire"}
    assert set(report["errors"]) >= {"1", "32768"}
    assert "What float16 does to the gradients" in out
    assert [path.name for path in tmp_path.iterdir()] == ["precision.json"]


def test_takes_the_weights_of_the_newest_checkpoint(launch, tmp_path):
    code, _, err = launch(*SMALL, "--mode=train", f"--model_dir={tmp_path}")
    assert code == 0, err

    code, out, err = launch(
        *SMALL, "--mode=precision_report", f"--model_dir={tmp_path}", "--gin_param=precision_report.batches = 1",
        "--gin_param=precision_report.policy = 'mixed_bfloat16'",
    )  # fmt: skip
    assert code == 0, err
    assert f"weights: of step 4 in {tmp_path}" in out
    assert "loss scaling is not needed: bfloat16 has the 8 exponent bits" in out
    assert json.loads((tmp_path / "precision.json").read_text())["loss_scale"]["recommended"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gin_param=precision_report.batches = 0"], "precision_report.batches = 0: must be 1 or more"),
        (["--gin_param=precision_report.policy = 'float8'"], "precision_report.policy = 'float8': expected one of"),
        (["--gin_param=precision_report.batchs = 3"], "did you mean 'batches'"),
        (["--strategy=mirrored"], "--mode=precision_report runs on this machine"),
        (["--replicas=3"], "cannot be split evenly over 3 replicas"),
        (["--gin_param=image_data.name = 'imagenet2012'"], "imagenet2012"),
        (["--model_dir=/dev/null/x"], "not a folder"),
    ],
)
def test_refuses_in_one_message_and_writes_nothing(launch, tmp_path, args, message):
    code, _, err = launch(*SMALL, "--mode=precision_report", f"--model_dir={tmp_path / 'new'}", *args)

    assert code == 64
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


def test_a_dry_run_says_what_would_be_examined(launch, tmp_path):
    code, out, _ = launch(*SMALL, "--mode=precision_report", "--dry_run", f"--model_dir={tmp_path / 'new'}")

    assert code == 0
    assert "2 batches" in out
    assert not (tmp_path / "new").exists()

"""The experiments of benchmarks/notes/mixed_precision.md, shortened to what shows their point."""

from __future__ import annotations

import numpy as np
import pytest
from places import ROOT

pytestmark = pytest.mark.slow

UNDERFLOW = "experiment_underflow.gin"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.nightly  # a result of an experiment, not of Launcher
def test_without_a_scale_the_underflowing_network_learns_less_and_with_one_as_much_as_float32():
    import loss_scales

    short = ["train.steps = 60", "amplified_mlp.units = (64, 4, 1024)"]
    float32, scaled, unscaled = (
        loss_scales.run(UNDERFLOW, [*short, *loss_scales.RUNS[name]], seed=0)
        for name in ("float32", "mixed_float16, scale 2^15", "mixed_float16, scale 1")
    )
    assert scaled["loss_scale"] == 2.0**15 and unscaled["loss_scale"] == 1.0
    assert scaled["skipped_steps"] == unscaled["skipped_steps"] == 0
    assert scaled["accuracy"] == pytest.approx(float32["accuracy"], abs=0.05)
    assert unscaled["accuracy"] < float32["accuracy"] - 0.2


@pytest.mark.parametrize(("run", "move"), [("mixed_float16, scale 1", False), ("mixed_float16, scale 2^15", True)])
def test_without_a_scale_no_hidden_layer_of_it_moves_in_the_first_step(run, move):
    import in_process
    import loss_scales

    # Else the first step of the warm-up has a rate of zero.
    made = in_process.build(UNDERFLOW, [*loss_scales.RUNS[run], "cosine.warmup_fraction = 0.0"])
    before = [weight.numpy() for weight in made.model.trainable_weights]
    made.trainer.train(made.trainer.batches(made.plan.data), 1)
    moved = [np.any(weight.numpy() != old) for weight, old in zip(made.model.trainable_weights, before, strict=True)]
    assert moved[:3] == [move] * 3, "dense1, dense2, dense3"
    assert moved[3:] == [True] * 2, "the logits, which are float32"


def test_limits_are_numpys():
    import float16_limits

    found = {name: row["float16"] for name, row in float16_limits.limits().items()}
    with np.errstate(over="ignore", under="ignore"):
        assert found["256 ** 2"] == np.float16(256) ** np.float16(2) == np.inf
        assert found["1e-5 ** 2"] == np.float16(1e-5) ** 2 == 0.0
        assert found["65504"] == np.finfo(np.float16).max
        assert found["65520"] == np.float16(65520) == np.inf
    assert found["2^-14 (smallest normal float16)"] == np.finfo(np.float16).smallest_normal
    assert found["2^-24 (smallest subnormal float16)"] == np.finfo(np.float16).smallest_subnormal
    assert found["2^-25"] == 0.0 < found["1.001 * 2^-25"]
    assert found["1 + 2^-10"] == 1 + np.finfo(np.float16).eps
    assert found["1 + 2^-12"] == 1.0


def test_small_updates_vanish_in_16_bits():
    import float16_limits

    assert float16_limits.added_up() == {"float16": 1.0, "bfloat16": 1.0, "float32": 2.0}


def test_master_weights_learn_on_where_float16_weights_stand_still():
    import master_weights

    master, half = (
        master_weights.train(dtype, seed=0, steps=12, learning_rate=0.002) for dtype in ("float32", "float16")
    )
    assert master["unmoved"] < 0.05 and half["unmoved"] > 0.5
    assert master["loss"] < half["loss"]


@pytest.mark.nightly  # models/test_resnet.py
def test_the_resnet18_of_the_experiment_has_the_published_number_of_parameters(capsys, tmp_path, monkeypatch):
    from launcher import main as entry

    monkeypatch.chdir(tmp_path)
    assert entry.main(["launcher", "--gin_file=experiment_resnet18.gin", "--dry_run", "--strategy=one_device"]) == 0
    assert "11,689,512" in capsys.readouterr().out  # torchvision's

"""The moving average of the weights: its definition, gated by the judgement, restored, used in evaluation."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from cases import repeated_but
from small_run import GivenTask, build, linear_batches, negative_sum

from launcher import optimizers
from launcher.step.precision import FixedLossScale

pytestmark = pytest.mark.slow

DECAY = 0.5


def model() -> keras.Model:
    """Two layers and a normalisation, whose statistics are averaged, too."""
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


@functools.cache
def first_session(replicas, **recipe):
    x = np.random.default_rng(0).normal(size=(8, 8, 3))
    task = GivenTask(linear_batches(x), model, negative_sum)
    made = build(task, replicas, ema_decay=DECAY, optimizer=lambda: optimizers.momentum(learning_rate=0.1), **recipe)
    return made, made.trainer.state.snapshot()


def built(replicas=1, **recipe):
    """A session at its first step; every topology's graph is traced once."""
    made, start = first_session(replicas, **recipe)
    made.trainer.state.restore(start)
    return made


def averages(state):
    return {name.removeprefix("ema/"): value for name, value in state.items() if name.startswith("ema/")}


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_average_follows_its_recurrence_and_is_equal_on_replicas(replicas):
    made = built(replicas)
    trainer, batches = made.trainer, made.trainer.batches(made.plan.data)
    expected = averages(trainer.state.snapshot())
    for name, value in expected.items():
        np.testing.assert_array_equal(value, trainer.state.snapshot()[f"model/{name}"])
    for update in range(4):
        trainer.train(batches, 1)
        state = trainer.state.snapshot()
        decay = min(DECAY, (1 + update) / (10 + update))
        for name in expected:
            expected[name] = expected[name] * decay + state[f"model/{name}"] * (1 - decay)
            np.testing.assert_allclose(state[f"ema/{name}"], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)
    assert any(name.endswith("moving_mean") for name in expected)
    if replicas > 1:
        for _, average in trainer.ema.variables:
            copies = [copy.numpy() for copy in average.values]
            np.testing.assert_array_equal(copies[0], copies[1])


def test_a_skipped_step_leaves_the_average_alone_also_under_float16():
    made = built(2, precision="mixed_float16", loss_scale=FixedLossScale(scale=1e38))
    trainer = made.trainer
    before = averages(trainer.state.snapshot())
    records = trainer.train(trainer.batches(made.plan.data), 2)
    assert list(records.finite) == [0, 0]
    for name, value in averages(trainer.state.snapshot()).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_evaluation_sees_the_average_and_training_gets_its_weights_back(replicas):
    made = built(replicas)
    trainer = made.trainer
    trainer.train(trainer.batches(made.plan.data), 3)
    before = trainer.state.snapshot()
    of_weights = made.evaluator.evaluate()["loss"]
    with trainer.state.averaged():
        of_average = made.evaluator.evaluate()["loss"]
        inside = trainer.state.snapshot()
    for name, value in averages(before).items():
        np.testing.assert_array_equal(inside[f"model/{name}"], value, err_msg=name)
    assert of_average != of_weights
    after = trainer.state.snapshot()
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_average_is_restored_from_a_snapshot():
    made = built()
    made.trainer.train(made.trainer.batches(made.plan.data), 3)
    state = made.trainer.state.snapshot()
    other = built().trainer.state
    assert any(not np.array_equal(value, state[f"ema/{name}"]) for name, value in averages(other.snapshot()).items())
    other.restore(state)
    for name, value in averages(other.snapshot()).items():
        np.testing.assert_array_equal(value, state[f"ema/{name}"], err_msg=name)

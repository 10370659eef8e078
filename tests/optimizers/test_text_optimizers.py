"""What the text recipes train with: Adafactor against the paper's equations, the rate of Vaswani et al. 2017."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher import optimizers
from launcher.errors import UsageError
from launcher.optimizers import schedules
from launcher.optimizers.methods import Adafactor

SHAPES = {"kernel": (3, 5), "bias": (5,), "many": (2, 3, 4), "zeros": (4, 2)}
STEPS = 6


def weights():
    numbers = np.random.default_rng(1)
    made = {name: numbers.normal(size=shape) for name, shape in SHAPES.items()}
    made["zeros"][:] = 0
    return {name: value.astype(np.float32) for name, value in made.items()}


def gradients():
    numbers = np.random.default_rng(2)
    return [[numbers.normal(size=shape).astype(np.float32) for shape in SHAPES.values()] for _ in range(STEPS)]


def rms(x):
    return math.sqrt(np.mean(x * x))


def paper(w, g, state, rate, t, *, decay=0.8, threshold=1.0, weight_decay=0.0):
    """Algorithms 4 and 5 of Shazeer and Stern 2018 for one variable, with sums as they are written there.

    Decay is not in them; T5X and PyTorch take rms(w) before it.
    """
    beta = 1 - t**-decay
    squares = g * g + 1e-30
    if g.ndim == 1:
        state["v"] = beta * state.get("v", 0) + (1 - beta) * squares
        second = state["v"]
    else:
        state["r"] = beta * state.get("r", 0) + (1 - beta) * squares.sum(axis=-1)
        state["c"] = beta * state.get("c", 0) + (1 - beta) * squares.sum(axis=-2)
        second = state["r"][..., :, None] * state["c"][..., None, :] / state["r"].sum(axis=-1)[..., None, None]
    update = g / np.sqrt(second)
    update /= max(1.0, rms(update) / threshold)
    return w - max(1e-3, rms(w)) * rate * update - rate * weight_decay * w


def trained(optimizer):
    variables = [keras.Variable(value, name=name) for name, value in weights().items()]
    optimizer.build(variables, STEPS)
    apply = tf.function(optimizer.apply)
    for step, batch in enumerate(gradients()):
        apply([tf.constant(gradient) for gradient in batch], tf.constant(float(step)))
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("settings", [{}, {"threshold": 0.3}, {"decay": 0.5, "weight_decay": 0.2}])
def test_adafactor_follows_algorithms_4_and_5_of_shazeer_and_stern_2018(settings):
    expected = {name: value.astype(np.float64) for name, value in weights().items()}
    states = {name: {} for name in expected}
    for t, batch in enumerate(gradients(), start=1):
        for name, gradient in zip(expected, batch, strict=True):
            args = settings if name != "bias" else {**settings, "weight_decay": 0.0}
            expected[name] = paper(expected[name], gradient.astype(np.float64), states[name], 0.1 / t, t, **args)
    optimizer = optimizers.adafactor(
        learning_rate=lambda step, total_steps: 0.1 / (1.0 + step),
        decay=settings.get("decay", 0.8),
        clip_threshold=settings.get("threshold", 1.0),
        weight_decay=settings.get("weight_decay", 0.0),
    )
    for found, (name, value) in zip(trained(optimizer), expected.items(), strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=2e-6, err_msg=name)


def test_adafactor_keeps_rows_and_columns_instead_of_the_whole_matrix():
    optimizer = optimizers.adafactor(learning_rate=0.1)
    optimizer.build([keras.Variable(np.zeros((300, 200), np.float32), name="kernel")], STEPS)
    assert sum(math.prod(variable.shape) for variable in optimizer.variables) == 300 + 200 + 1
    # Why it is not Keras's: that one keeps the matrix as well, and bounds the rate whatever the schedule says.
    theirs = keras.optimizers.Adafactor()
    theirs.build([keras.Variable(np.zeros((300, 200), np.float32), name="kernel")])
    assert sum(math.prod(variable.shape) for variable in theirs.variables) > 300 * 200


def test_a_zero_gradient_moves_nothing_and_makes_no_nan():
    optimizer = optimizers.adafactor(learning_rate=0.1)
    variables = [keras.Variable(value, name=name) for name, value in weights().items()]
    optimizer.build(variables, STEPS)
    optimizer.apply([tf.zeros(shape) for shape in SHAPES.values()], tf.constant(0.0))
    for variable, before in zip(variables, weights().values(), strict=True):
        np.testing.assert_array_equal(variable.numpy(), before)


def test_its_arguments_come_back_from_its_configuration():
    again = Adafactor.from_config(Adafactor(decay=0.7, clip_threshold=2.0).get_config())
    assert (again.decay, again.clip_threshold) == (0.7, 2.0)


@pytest.mark.parametrize(("width", "warmup"), [(512, 4000), (1024, 16000)])
def test_the_inverse_square_root_is_equation_3_of_vaswani_et_al_2017(width, warmup):
    schedule = schedules.inverse_square_root(width=width, warmup_steps=warmup)
    for number in (1, 10, warmup - 1, warmup, warmup + 1, 100_000):
        wanted = width**-0.5 * min(number**-0.5, number * warmup**-1.5)
        assert float(schedule(tf.constant(number - 1.0), 7)) == pytest.approx(wanted, rel=1e-5)


def test_a_peak_may_be_said_instead_of_a_width():
    schedule = schedules.inverse_square_root(peak=0.5, warmup_steps=10)
    assert [float(schedule(tf.constant(step), 1)) for step in (0.0, 9.0, 39.0)] == pytest.approx([0.05, 0.5, 0.25])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"warmup_steps": 0, "peak": 1.0}, "warmup_steps = 0"),
        ({"warmup_steps": 5}, "bind one of them"),
        ({"warmup_steps": 5, "peak": 1.0, "width": 8}, "bind one of them"),
        ({"warmup_steps": 5, "width": 0}, "width = 0"),
        ({"warmup_steps": 5, "peak": -1.0}, "peak = -1.0"),
    ],
)
def test_rates_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        schedules.inverse_square_root(**arguments)


@pytest.mark.parametrize(
    ("bad", "says"), [({"decay": 1.0}, "decay = 1.0"), ({"clip_threshold": 0.0}, "clip_threshold")]
)
def test_settings_of_adafactor_that_cannot_be_are_refused(bad, says):
    with pytest.raises(UsageError, match=says):
        optimizers.adafactor(learning_rate=0.1, **bad)

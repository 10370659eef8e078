"""Learning rate schedules against their closed forms in NumPy."""

import math

import numpy as np
import pytest
import tensorflow as tf

from launcher.errors import UsageError
from launcher.optimizers import schedules

PEAK, FINAL, TOTAL = 0.8, 0.1, 100


def values(schedule, steps=range(TOTAL + 20), total=TOTAL):
    return np.array([float(schedule(tf.constant(float(step)), total)) for step in steps])


def closed_form(shape, warmup=0, horizon=TOTAL):
    steps = np.arange(TOTAL + 20)
    progress = np.clip((steps - warmup) / (horizon - warmup), 0, 1)
    return np.where(steps < warmup, PEAK * (steps + 1) / max(1, warmup), shape(progress))


SHAPES_OF_SCHEDULES = {
    "constant": (schedules.constant, {}, lambda p: PEAK + 0 * p),
    "cosine": (schedules.cosine, {"final": FINAL}, lambda p: FINAL + (PEAK - FINAL) * (1 + np.cos(np.pi * p)) / 2),
    "linear": (schedules.linear, {"final": FINAL}, lambda p: PEAK + (FINAL - PEAK) * p),
}


@pytest.mark.parametrize("name", SHAPES_OF_SCHEDULES)
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 10}, {"warmup_fraction": 0.1}])
def test_a_schedule_warms_up_linearly_and_then_keeps_its_shape(name, warmup):
    make, arguments, shape = SHAPES_OF_SCHEDULES[name]
    schedule = make(peak=PEAK, **arguments, **warmup)
    np.testing.assert_allclose(values(schedule), closed_form(shape, 10 if warmup else 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_decay_steps_replace_the_length_of_the_run(name):
    make, arguments, shape = SHAPES_OF_SCHEDULES[name]
    schedule = make(peak=PEAK, **arguments, decay_steps=40, warmup_fraction=0.5)
    np.testing.assert_allclose(values(schedule), closed_form(shape, 20, 40), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("boundaries", [(30, 60, 90), (0.3, 0.6, 0.9)])
def test_step_decay_multiplies_at_each_boundary(boundaries):
    schedule = schedules.step_decay(peak=PEAK, boundaries=boundaries, factor=0.5, warmup_steps=10)
    found = values(schedule, [0, 4, 9, 10, 29, 30, 59, 60, 89, 90, 99])
    expected = PEAK * np.array([0.1, 0.5, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_run_cut_shorter_than_the_warm_up_stays_in_the_warm_up():
    for schedule in (
        schedules.cosine(peak=1.0, warmup_steps=500),
        schedules.linear(peak=1.0, warmup_steps=500),
        schedules.constant(peak=1.0, warmup_steps=500),
        schedules.step_decay(peak=1.0, boundaries=(600,), warmup_steps=500),
    ):
        np.testing.assert_allclose(values(schedule, range(30), 30), (np.arange(30) + 1) / 500, rtol=1e-6)


@pytest.mark.parametrize("step", [7, np.int64(7), tf.constant(7, tf.int64), tf.constant(7.0)])
def test_steps_may_be_whole_numbers(step):
    for schedule in (
        schedules.constant(peak=1.0, warmup_steps=10),
        schedules.cosine(peak=1.0),
        schedules.linear(peak=1.0),
        schedules.step_decay(peak=1.0, boundaries=(0.05,)),
    ):
        found = schedule(step, TOTAL)
        assert found.dtype == tf.float32
        assert found.shape == ()
        assert float(found) == float(schedule(tf.constant(7.0), TOTAL))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: schedules.cosine(peak=0.0), "cosine.peak = 0.0"),
        (lambda: schedules.cosine(peak=math.inf), "cosine.peak = inf"),
        (lambda: schedules.constant(peak=-1.0), "constant.peak = -1.0"),
        (lambda: schedules.linear(peak=1.0, final=2.0), "linear.final = 2.0"),
        (lambda: schedules.cosine(peak=1.0, warmup_steps=-1), "cosine.warmup_steps = -1"),
        (lambda: schedules.cosine(peak=1.0, warmup_fraction=1.0), "cosine.warmup_fraction = 1.0"),
        (lambda: schedules.cosine(peak=1.0, warmup_fraction=0.1, warmup_steps=5), "bind one"),
        (lambda: schedules.cosine(peak=1.0, decay_steps=0), "cosine.decay_steps = 0"),
        (lambda: schedules.linear(peak=1.0, decay_steps=5, warmup_steps=5), "linear.decay_steps = 5"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=()), "step_decay.boundaries = ()"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=(60, 30)), "ascending"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=(30, 30)), "ascending"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=(0.5, 60)), "step_decay.boundaries = (0.5, 60)"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=(0.5, 1.0)), "step_decay.boundaries"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=(0, 10)), "step_decay.boundaries"),
        (lambda: schedules.step_decay(peak=1.0, boundaries=(10,), factor=0.0), "step_decay.factor = 0.0"),
    ],
)
def test_schedules_refuse_arguments_out_of_range(make, says):
    with pytest.raises(UsageError) as caught:
        make()
    assert says in str(caught.value)

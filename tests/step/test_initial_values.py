"""First values that are made later: the same bits, and only where that can be."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.step import initial_values

STRATEGY = tf.distribute.get_strategy()
OWN = np.random.default_rng(0)


def made(build, later=None):
    keras.utils.set_random_seed(7)
    with initial_values.scope(STRATEGY, later):
        return build()


def layers() -> list[tf.Variable]:
    wide = {"kernel_initializer": "glorot_uniform"}
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, **wide), keras.layers.Dense(100)])
    return [variable.value for variable in model.weights]


def test_they_are_those_that_would_have_been_made_at_once():
    wanted, later = [one.numpy() for one in made(layers)], {}
    variables = made(layers, later)
    assert [id(one) in later for one in variables] == [True, False, True, False]
    for variable, value in zip(variables, wanted, strict=True):
        found = later[id(variable)]() if id(variable) in later else variable.numpy()
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.normal(size=[128, 128]),
        lambda: tf.fill([128, 128], random.random()),
        lambda: tf.random.normal([128, 128]),
    ],
    ids=["numpy", "python", "tensorflow"],
)
def test_what_another_call_would_draw_anew_is_made_at_once(draw):
    def build() -> tf.Variable:
        return tf.Variable(draw, dtype=tf.float32, shape=[128, 128])

    later = {}
    np.testing.assert_array_equal(made(build, later).numpy(), made(build).numpy())
    assert later == {}


def test_what_is_drawn_from_a_generator_of_the_programs_own_is_made_at_once():
    later = {}
    made(lambda: tf.Variable(lambda: OWN.normal(size=[128, 128]), dtype=tf.float64, shape=[128, 128]), later)
    assert later == {}

"""First values that are made later: the same bits, and only where that can be."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.optimizers.weight_shards import of_model
from launcher.runtime import initial_values
from launcher.tasks import keras_losses
from launcher.tasks.base import Place
from launcher.tasks.keras_answers import answers
from launcher.tasks.keras_model import KerasTask

STRATEGY = tf.distribute.get_strategy()
OWN = np.random.default_rng(0)
WIDTH = 2048  # of the smallest square whose value is made later


def made(build, later=None):
    keras.utils.set_random_seed(7)
    with initial_values.scope(STRATEGY, later):
        return build()


def network() -> keras.Model:
    layers = [keras.layers.Dense(units) for units in (WIDTH, WIDTH, WIDTH, 10)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


def test_they_are_those_that_would_have_been_made_at_once():
    wanted, later = made(network).get_weights(), {}
    variables = [one.value for one in made(network, later).weights]
    assert [id(one) in later for one in variables] == [True, False] * 3 + [False, False]
    for variable, value in zip(variables, wanted, strict=True):
        found = later[id(variable)].make() if id(variable) in later else variable.numpy()
        np.testing.assert_array_equal(found, value)


def test_what_a_program_loads_into_its_model_is_what_it_has():
    later = {}
    model = made(network, later)
    loaded, changed, left = (layer.kernel for layer in model.layers[:3])
    wanted = made(network).layers[1].kernel.numpy() + 1
    loaded.assign(np.ones(loaded.shape))
    changed.assign_add(np.ones(changed.shape))
    initial_values.settle(later, model, of_model(model, 2))
    assert list(later) == [id(left.value)]
    np.testing.assert_array_equal(loaded.numpy(), 1.0)
    np.testing.assert_array_equal(changed.numpy(), wanted)
    initial_values.settle(later, model, [])
    assert later == {}
    np.testing.assert_array_equal(left.numpy(), made(network).layers[2].kernel.numpy())


def test_what_a_program_quantizes_is_what_it_would_have_been():
    def quantized() -> keras.Model:
        model = network()
        model.layers[0].quantize("int8")
        return model

    later = {}
    model = made(quantized, later)
    initial_values.settle(later, model, of_model(model, 2))
    for found, wanted in zip(model.layers[0].weights, made(quantized).layers[0].weights, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def test_a_large_model_is_not_computed_before_it_trains():
    def build() -> keras.Model:
        model = network()
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    x = np.ones((8, WIDTH), np.float32)
    task, later = KerasTask(build=build, train=(x, x[:, :10])), {}
    model = made(task.model, later)
    task.placed(Place(num_replicas=2, microbatches=1, compiled=True, jit=False, pads=False))
    initial_values.settle(later, model, of_model(model, 2))
    assert set(later) == {id(layer.kernel.value) for layer in model.layers[:3]}
    assert task.example[2].shape == (1, 10)


@keras.saving.register_keras_serializable()
class OnlyComputed(keras.Model):
    """Its answers have a shape that a trace does not know, and its call reads a value."""

    def __init__(self, **about):
        super().__init__(**about)
        self.dense = keras.layers.Dense(WIDTH)
        self.build((None, WIDTH))

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        answers = self.dense(x)
        return tf.boolean_mask(answers, answers[:, 0] < float(tf.reduce_sum(tf.abs(answers)).numpy()))


@pytest.mark.parametrize("mixes", [False, True])
def test_whether_rows_of_a_large_model_matter_to_one_another_is_computed(mixes):
    inputs = keras.Input((WIDTH,))
    outputs = keras.layers.Dense(WIDTH)(inputs)
    model = keras.Model(inputs, outputs / keras.ops.sum(outputs, axis=0) if mixes else outputs)
    x = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
    batch = tf.constant(x), tf.zeros([4, 1]), answers(model, x), None
    assert keras_losses._mixes_rows(model, batch) == mixes


def test_what_cannot_be_traced_is_computed():
    model, x = OnlyComputed(), np.ones((4, WIDTH), np.float32)
    np.testing.assert_array_equal(answers(model, x), model(x))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: np.random.normal(size=[WIDTH, WIDTH]),
        lambda: tf.fill([WIDTH, WIDTH], random.random()),
        lambda: tf.random.normal([WIDTH, WIDTH]),
    ],
    ids=["numpy", "python", "tensorflow"],
)
def test_what_another_call_would_draw_anew_is_made_at_once(draw):
    def build() -> tf.Variable:
        return tf.Variable(draw, dtype=tf.float32, shape=[WIDTH, WIDTH])

    later = {}
    np.testing.assert_array_equal(made(build, later).numpy(), made(build).numpy())
    assert later == {}


def test_what_is_drawn_from_a_generator_of_the_programs_own_is_made_at_once():
    later = {}
    made(lambda: tf.Variable(lambda: OWN.normal(size=[WIDTH, WIDTH]), dtype=tf.float64, shape=[WIDTH, WIDTH]), later)
    assert later == {}

"""What a step moves besides weights (moving statistics, random numbers) and what it adds to the loss: regularisers."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import (
    GivenTask,
    assert_replicas_equal,
    build,
    copies,
    descent,
    dropout_masks,
    dropout_task,
    linear_batches,
    linear_model,
    train,
)

from launcher.models.normalization import BatchNormalization
from launcher.step.diagnosis import Diagnosis

pytestmark = pytest.mark.slow

TOPOLOGIES = [(1, 1), (2, 1), (4, 1), (1, 4), (2, 2)]  # replicas, microbatches
PRECISIONS = ["float32", "mixed_float16", "mixed_bfloat16"]

# ---------------------------------------------------------------------------------------------------- moving statistics

KEEP, EPSILON = 0.75, 1e-3


def first_output(model, batch, training):
    outputs = tf.cast(model(batch["x"], training=training), tf.float32)[:, 0]
    return -tf.reduce_sum(outputs * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


def normalised(layer: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1, name="line")])


def numpy_statistics(x: np.ndarray, group: int):
    """Moving mean and variance over steps of inputs [step, example, channel], normalised in groups of `group`."""
    mean, variance = np.zeros(x.shape[-1]), np.ones(x.shape[-1])
    for step in x.astype(np.float64):
        groups = step.reshape(-1, group, x.shape[-1])
        mean = KEEP * mean + (1 - KEEP) * groups.mean(1).mean(0)
        variance = KEEP * variance + (1 - KEEP) * groups.var(1).mean(0)
    return mean, variance


LAYERS = {
    "ours in groups of 2": (lambda: BatchNormalization(momentum=KEEP, group_size=2), lambda part: 2),
    "ours": (lambda: BatchNormalization(momentum=KEEP), lambda part: part),
    "Keras's": (lambda: keras.layers.BatchNormalization(momentum=KEEP), lambda part: part),
}


@pytest.mark.parametrize(
    ("layer", "replicas", "microbatches"),
    repeated_but(
        [("ours in groups of 2", 2, 2), ("Keras's", 2, 2)],
        [(layer, *topology) for layer in LAYERS for topology in TOPOLOGIES],
    ),
)
def test_moving_statistics_are_the_mean_over_all_replicas_and_microbatches(layer, replicas, microbatches):
    x = np.random.default_rng(0).normal(3, 2, (4, 16, 3)).astype(np.float32)
    x += np.arange(16, dtype=np.float32)[:, np.newaxis]  # no two parts of the batch are alike
    make, group = LAYERS[layer]
    made = build(GivenTask(linear_batches(x), lambda: normalised(make()), first_output), replicas, microbatches)
    train(made)
    mean, variance = numpy_statistics(x, group(16 // replicas // microbatches))
    found = {variable.name: variable for variable in made.model.non_trainable_variables}
    np.testing.assert_allclose(found["moving_mean"].numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(found["moving_variance"].numpy(), variance, rtol=1e-5)
    assert_replicas_equal(made)


@pytest.mark.parametrize("replicas", repeated_but([4], [2, 4]))
def test_synchronised_statistics_are_those_of_the_global_batch(replicas):
    x = np.random.default_rng(0).normal(3, 2, (4, 16, 3)).astype(np.float32)
    x += np.arange(16, dtype=np.float32)[:, np.newaxis]

    def model():
        return normalised(BatchNormalization(momentum=KEEP, synchronized=True))

    made = build(GivenTask(linear_batches(x), model, first_output), replicas)
    train(made)
    layer = made.model.layers[0]
    mean, variance = numpy_statistics(x, 16)
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-5)
    assert_replicas_equal(made)


class Largest(keras.layers.Layer):
    """Remembers half of the largest input of a call, and a mean of ones; hands on what is finite of the inputs."""

    def build(self, input_shape):
        self.largest = self.add_weight(name="largest", shape=(2,), initializer="zeros", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.largest.assign(tf.stack([tf.reduce_max(inputs) / 2, (self.largest[1] + 1) / 2]))
        return tf.where(tf.math.is_finite(inputs), inputs, 1.0)


@pytest.mark.parametrize(
    ("replicas", "microbatches", "bad"),
    repeated_but(
        [(2, 2, "nan")],
        [(*topology, bad) for topology in [(1, 1), (4, 1), (2, 2)] for bad in ("inf", "nan")],
    ),
)
def test_a_statistic_that_alone_is_not_finite_stays_as_it_was_on_every_replica(replicas, microbatches, bad):
    x = np.tile(np.array([2.0, 4.0, 6.0, 8.0], np.float32)[:, np.newaxis], (3, 1, 1))
    x[1, 2] = float(bad)

    def model():
        return keras.Sequential([keras.Input((1,)), Largest(name="meter"), *linear_model(1).layers])

    made = build(GivenTask(linear_batches(x), model, first_output), replicas, microbatches)
    expected = x[0].max() / 2  # as one device has it, which no mean over parts is
    batches = made.trainer.batches(made.plan.data)
    for other in (0.5, 0.75):  # what is finite beside it moves on
        records = made.trainer.train(batches, 1)
        assert records.finite == [1.0]
        for copy in copies(made.model.layers[0].largest):
            np.testing.assert_array_equal(copy, [expected, other])
    assert made.model.layers[1].weights[0].numpy() == 5.0 + (2 + 4 + 1 + 8) / 4


class Calls(keras.layers.Layer):
    """Counts the training steps it was in, as a schedule inside a layer would."""

    def build(self, input_shape):
        self.count = self.add_weight(name="count", shape=(), initializer="zeros", dtype="int64", trainable=False)

    def call(self, inputs, training=None):
        if training:
            self.count.assign_add(1)
        return inputs


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], [(1, 1), (2, 1), (1, 2), (2, 2)]))
def test_a_whole_number_that_a_layer_counts_is_one_a_step_and_none_for_a_skipped_one(replicas, microbatches):
    x = np.ones((4, 4, 1), np.float32)
    x[1, 0] = x[3, 3] = np.inf

    def model():
        return keras.Sequential([keras.Input((1,)), Calls(name="calls"), *linear_model(1).layers])

    made = build(GivenTask(linear_batches(x), model, first_output), replicas, microbatches)
    assert train(made).finite.tolist() == [1, 0, 1, 0]
    assert copies(made.model.layers[0].count) == [2] * replicas
    assert (
        Diagnosis(made.trainer, made.plan.data)
        .non_finite_gradients()
        .endswith(f"line/kernel, on replica {replicas - 1}")
    )
    assert copies(made.model.layers[0].count) == [2] * replicas


# ------------------------------------------------------------------------------------------------------- random numbers

PLACES, STEPS, BATCH = 32, 3, 8


@functools.cache
def dropout_session(replicas, microbatches, **recipe):
    made = build(dropout_task(STEPS, BATCH, PLACES), replicas, microbatches, **recipe)
    return made, made.trainer.state.snapshot()


def dropout_run(replicas=1, microbatches=1, **recipe):
    made, start = dropout_session(replicas, microbatches, **recipe)
    made.trainer.state.restore(start)
    return made


def masks(made, steps=STEPS):
    return dropout_masks(made, steps)


@pytest.fixture(scope="module")
def four_replicas():
    return masks(dropout_run(replicas=4))


def test_every_replica_step_and_layer_drops_places_of_its_own(four_replicas):
    assert set(np.unique(four_replicas)) == {0.0, 2.0}
    assert abs(four_replicas.mean() - 1) < 0.1  # 768 coins: the standard deviation is 0.036
    flat = four_replicas.reshape(-1, PLACES)
    assert len(np.unique(flat, axis=0)) == len(flat) == STEPS * 2 * BATCH


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], [(2, 2), (1, 4)]))
def test_microbatches_draw_what_as_many_replicas_draw(four_replicas, replicas, microbatches):
    np.testing.assert_array_equal(masks(dropout_run(replicas, microbatches)), four_replicas)


def test_a_run_resumed_on_another_topology_draws_what_the_first_would_have_drawn(four_replicas):
    first = dropout_run(2, 2)
    masks(first, steps=1)
    state = first.trainer.state.snapshot()
    second = dropout_run(replicas=4)
    second.trainer.state.restore(state)
    np.testing.assert_array_equal(masks(second, steps=2), four_replicas[1:])


def test_another_seed_draws_others(four_replicas):
    other = masks(dropout_run(replicas=4, seed=1), steps=1)[0]
    assert not (other == four_replicas[0]).all(-1).any()


@pytest.mark.nightly  # test_text_models_training.py trains with dropout by XLA
def test_a_step_compiled_by_xla_draws_by_the_same_rule():
    """XLA has generators of its own, so the masks are others; what they depend on is the same."""
    found = masks(dropout_run(2, 2, jit_compile=True), steps=2)
    assert set(np.unique(found)) == {0.0, 2.0}
    flat = found.reshape(-1, PLACES)
    assert len(np.unique(flat, axis=0)) == len(flat)
    np.testing.assert_array_equal(masks(dropout_run(4, jit_compile=True), steps=2), found)


class UsersNoise(keras.layers.Layer):
    """A layer of a user's own, with a named generator, that adds the same noise to all examples of a call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.generator = keras.random.SeedGenerator(7, name="mine")

    def call(self, inputs, training=None):
        noise = keras.random.uniform((1, inputs.shape[-1]), seed=self.generator)
        return inputs + noise if training else inputs


def test_a_users_own_generator_follows_replica_and_step_too():
    def model():
        return keras.Sequential([keras.Input((2,)), keras.Sequential([UsersNoise()]), *linear_model(2).layers])

    def gradients(replicas, microbatches):
        made = build(GivenTask(linear_batches(np.zeros((2, 4, 2))), model, first_output), replicas, microbatches)
        first = train(made, 1) and made.model.weights[0].numpy().copy()
        train(made, 1)
        return first, made.model.weights[0].numpy() - first

    first, second = gradients(4, 1)
    assert np.all(first != second)
    np.testing.assert_allclose(np.array(gradients(2, 2)), [first, second], rtol=1e-6)
    assert np.abs(np.array(gradients(1, 1)) - [first, second]).min() > 1e-4  # one draw, not the mean of four


# --------------------------------------------------------------------------------------------------------- regularisers


def regularised(**dense):
    model = linear_model(2, **dense)
    model.layers[0].kernel.assign([[2.0], [-3.0]])
    return model


PADDED = np.array([[1, 1, 0, 1, 0, 0, 0, 0]] * 2, np.float32)  # on four replicas, two have nothing but padding


@pytest.mark.parametrize(
    ("replicas", "microbatches", "precision"),
    repeated_but(
        [(2, 2, "mixed_float16")],
        [(*topology, one) for topology in TOPOLOGIES for one in PRECISIONS],
    ),
)
def test_a_weight_regulariser_counts_once_however_the_batch_is_split_and_padded(replicas, microbatches, precision):
    arrays = {"x": np.zeros((2, 8, 2), np.float32), "weight": PADDED}

    def model():
        return regularised(kernel_regularizer=keras.regularizers.L2(0.25))

    task = GivenTask(arrays, model, first_output)
    made = build(task, replicas, microbatches, optimizer=lambda: descent(0.5), precision=precision)
    records = train(made)
    kernels = np.array([[2.0, -3.0], [1.5, -2.25]])  # w -= 0.5 * 2 * 0.25 * w
    np.testing.assert_allclose(records.loss / records.weight, 0.25 * (kernels**2).sum(1), rtol=1e-3)
    np.testing.assert_allclose(made.model.weights[0].numpy()[:, 0], kernels[-1] * 0.75, rtol=1e-3)
    assert_replicas_equal(made)


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(4, 1), (1, 4)], TOPOLOGIES))
def test_an_activity_regulariser_counts_as_keras_has_it_of_the_global_batch(replicas, microbatches):
    """Keras before 3.14 adds it up over the batch that it sees, later ones divide by its rows."""
    x = np.random.default_rng(0).integers(-4, 4, (1, 8, 2)).astype(np.float32)

    def model():
        return regularised(activity_regularizer=keras.regularizers.L2(0.25))

    made = build(GivenTask(linear_batches(x), model, first_output), replicas, microbatches)
    records = train(made)
    outputs, whole = x[0] @ [2.0, -3.0], model()
    whole(x[0])
    np.testing.assert_allclose(records.loss, -outputs.sum() + 8 * float(sum(whole.losses)), rtol=1e-5)


@pytest.mark.parametrize("precision", repeated_but(["mixed_float16"], PRECISIONS))
def test_regularisers_of_weights_and_of_16_bit_activities_go_together(precision):
    x = np.full((1, 8, 2), 2.0, np.float32)

    def model():
        return regularised(
            kernel_regularizer=keras.regularizers.L2(0.25), activity_regularizer=keras.regularizers.L2(0.5)
        )

    made = build(GivenTask(linear_batches(x), model, first_output), 2, 1, precision=precision, loss_scale="none")
    records = train(made)
    whole = model()
    whole(x[0])
    np.testing.assert_allclose(records.loss / records.weight, [2.0 + sum(map(float, whole.losses))], rtol=1e-2)

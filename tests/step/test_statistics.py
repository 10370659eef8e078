"""States of a model are those of Keras on one device, on replicas and in microbatches; or they are refused by name."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from keras import layers, ops
from oracle import eager

import launcher
from launcher.errors import UsageError
from launcher.step import statistics

pytestmark = pytest.mark.slow

_random = np.random.default_rng(0)
X = _random.uniform(0.1, 3.0, (22, 3)).astype(np.float32)  # the last batch is short
Y = (X @ _random.normal(size=(3, 1))).astype(np.float32)
TOKENS = _random.integers(1, 6, (32, 5)) * (np.arange(5) < _random.integers(1, 6, (32, 1)))


class Meter(layers.Layer):
    """Keeps whatever adds up, is an extreme, a mean, or no matter of rows; integers and floating point."""

    def build(self, shape):
        def state(name, dtype="float32", start=0, shape=()):
            start = keras.initializers.Constant(start)
            return self.add_weight(name=name, shape=shape, dtype=dtype, initializer=start, trainable=False)

        self.rows, self.total = state("rows", "int64"), state("total", shape=(3,))
        self.steps, self.rate = state("steps", "int32"), state("rate")
        self.high, self.low = state("high", start=-5, shape=(3,)), state("low", "int32", start=900)
        self.mean, self.above = state("mean", shape=(3,)), state("above", "bool", shape=(3,))

    def call(self, x, training=False):
        if training:
            self.rows.assign_add(ops.cast(ops.shape(x)[0], "int64"))
            self.total.assign_add(ops.sum(x, 0))
            self.steps.assign_add(1)
            self.rate.assign(0.9 * self.rate + 0.1)
            self.high.assign(ops.maximum(self.high, ops.max(x, 0)))
            self.low.assign(ops.minimum(self.low, ops.cast(100 * ops.min(x), "int32")))
            self.above.assign(ops.logical_or(self.above, ops.any(x > 2.8, 0)))
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, 0))
        return x


class Scaled(layers.Layer):
    """As float8 does: the largest input of a batch is the gradient that overwrites a weight."""

    def build(self, shape):
        self.held = self.add_weight(name="held", shape=(2,), initializer="zeros", overwrite_with_gradient=True)

    def call(self, x):
        largest = tf.reduce_max(x)
        return tf.custom_gradient(lambda x, held: (tf.identity(x), lambda by: (by, largest * tf.ones_like(held))))(
            x, tf.convert_to_tensor(self.held)
        )


class Codebook(layers.Layer):
    """Divides by what it has counted, as the codebooks of a VQ-VAE do."""

    def build(self, shape):
        self.codes = self.add_weight(name="codes", shape=(3,), initializer="ones", trainable=False)

    def call(self, x, training=False):
        if training:
            self.codes.assign(self.codes / (1 + ops.sum(x, 0)))
        return x


class Counts(keras.Model):
    """A step of its own that counts rows."""

    def train_step(self, data):
        x, y = data
        self.seen.assign_add(ops.shape(x)[0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def metered(own_step=False):
    inputs = keras.Input((3,))
    model = (Counts if own_step else keras.Model)(inputs, layers.Dense(1)(Scaled()(Meter()(inputs))))
    if own_step:
        model.seen = model.add_weight(name="seen", shape=(), dtype="int32", initializer="zeros", trainable=False)
    model.compile(keras.optimizers.Adam(0.01, clipnorm=1.0), "mse")
    return model


def masked():
    inputs = keras.Input((5,))
    normal = layers.BatchNormalization(momentum=0.5)(layers.Embedding(6, 3, mask_zero=True)(inputs))
    pooled = layers.GlobalAveragePooling1D()(layers.BatchNormalization()(layers.Dense(4)(normal)))
    model = keras.Model(inputs, layers.Dense(1)(pooled))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def normalised():
    hidden = layers.BatchNormalization(momentum=0.5)(layers.Dense(4)(inputs := keras.Input((3,))))
    parts = layers.BatchNormalization(momentum=0.5)(layers.Reshape((2, 2))(keras.ops.tanh(hidden)))
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(parts)))
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def recurrent():
    inputs = keras.Input((4, 3), batch_size=8)
    model = keras.Model(inputs, layers.Dense(1)(layers.GRU(3, stateful=True)(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def with_codebook():
    model = keras.Sequential([keras.Input((3,)), layers.Dropout(0.5), Codebook(name="book"), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


SEQUENCES = _random.normal(size=(32, 4, 3)).astype(np.float32), _random.normal(size=(32, 1)).astype(np.float32)
CASES = {
    "metered": (metered, (X, Y)),
    "metered, own step": (lambda: metered(own_step=True), (X, Y)),
    "normalisation": (normalised, (X, Y)),
    "masked normalisation": (masked, (TOKENS, _random.normal(size=(32, 1)).astype(np.float32))),
}


def seeded(build):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    return build()


def weights_of(model):
    return {one.path: one.numpy() for one in model.weights}


def of_launcher(build, data, folder, replicas=2, **settings):
    devices = [f"CPU:{number}" for number in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    settings = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0, "strategy": strategy} | settings
    return launcher.fit(build, data, model_dir=str(folder), **settings).model


@pytest.mark.parametrize(
    ("name", "settings"),
    repeated_but(
        [
            ("metered", {"replicas": 2}),
            ("metered", {"replicas": 1, "jit_compile": True}),
            ("masked normalisation", {"replicas": 2, "batch_size": 7}),
        ],
        [
            *((name, {"replicas": replicas}) for name in CASES for replicas in (1, 2)),
            ("metered", {"replicas": 1, "jit_compile": True}),
            ("metered", {"replicas": 1, "microbatches": 2}),
            ("metered", {"replicas": 2, "microbatches": 2}),
            # Replicas have 2 rows and 1, and of the last batch one has none.
            ("normalisation", {"replicas": 2, "batch_size": 3}),
            ("masked normalisation", {"replicas": 2, "batch_size": 7}),
        ],
    ),
)
def test_states_are_those_of_one_device(name, settings, tmp_path):
    build, (x, y) = CASES[name]
    model = eager(seeded(build))
    model.fit(x, y, batch_size=settings.get("batch_size", 8), epochs=2, shuffle=False, verbose=0)
    expected = weights_of(model)
    found = weights_of(of_launcher(build, (x, y), tmp_path, **settings))
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=2e-5, atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    ("build", "data", "message"),
    [
        (with_codebook, (X, Y), "book/codes: .*is no mean, sum, maximum or minimum over the rows"),
        (recurrent, SEQUENCES, "layer 'gru' is stateful: .*one replica with train.microbatches = 1"),
    ],
)
def test_a_state_that_parts_of_a_batch_cannot_share_is_refused_by_name(build, data, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        of_launcher(build, data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_stateful_layer_goes_on_from_the_batch_before_also_after_a_restart(tmp_path):
    model = eager(seeded(recurrent))
    model.fit(*SEQUENCES, batch_size=8, epochs=2, shuffle=False, verbose=0)
    for epochs in (1, 2):
        found = of_launcher(recurrent, SEQUENCES, tmp_path, replicas=1, epochs=epochs)
    for one, other in zip(model.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(found.layers[1].states[0], model.layers[1].states[0], atol=1e-5)


def test_an_input_that_is_optional_may_be_none(tmp_path):
    class Sum(layers.Layer):
        def call(self, one, other=None):
            return one if other is None else one + other

    def build():
        inputs = [keras.Input((3,), optional=True), keras.Input((3,))]
        model = keras.Model(inputs, layers.Dense(1)(Sum()(inputs[1], inputs[0])))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.metrics.R2Score()])
        return model

    model = eager(seeded(build))
    model.fit([None, X], Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    found = of_launcher(build, ([None, X], Y), tmp_path, epochs=1)
    for one, other in zip(model.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


def test_a_weight_that_is_frozen_by_itself_stays_so_where_states_are_tried():
    normal, meter = layers.BatchNormalization(), Meter()
    model = keras.Sequential([keras.Input((3,)), normal, meter])
    normal.gamma.trainable = False
    batch = {"x": tf.constant(X[:8]), "weight": tf.ones([8])}
    found = statistics.tried(model, [meter.rows], batch, lambda part: model(part["x"], training=True))
    assert [one.fold for one in found] == ["sum"]
    assert (normal.trainable, normal.beta.trainable, normal.gamma.trainable) == (True, True, False)

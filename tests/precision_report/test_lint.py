"""Every rule of the precision report's lint, where it must speak and where it must be silent."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_run import GivenTask, build, linear_batches, negative_sum

from launcher.precision_report import lint
from launcher.precision_report.probe import Probe
from launcher.run import layer_lint
from launcher.step.precision import DynamicLossScale, FixedLossScale

pytestmark = pytest.mark.slow

BATCHES = linear_batches([np.ones((8, 16))])


def model(body, inputs=16, **last) -> keras.Model:
    start = keras.Input((inputs,))
    return keras.Model(start, keras.layers.Dense(1, name="out", **last)(body(start)))


def lint_of(make, *, policy="mixed_float16", loss=negative_sum, batches=BATCHES, **recipe) -> dict[str, list]:
    """Findings by rule."""
    made = build(GivenTask(batches, make, loss), precision=policy, **recipe)
    probe = Probe(made)
    batch = next(made.trainer.batches(made.plan.data))
    counts = probe.run(batch).shadow.counts
    seen = [
        one.path for one, count in zip(probe.tensors, counts, strict=True) if one.kind == "activation" and np.sum(count)
    ]
    found = lint.lint(made, probe.graph(batch), seen)
    by_rule: dict[str, list] = {}
    for one in found:
        by_rule.setdefault(one.rule, []).append(one)
    return by_rule


def own_variance(values):
    """A normalisation that is written out, in the dtype of its inputs."""
    mean = tf.reduce_mean(values, axis=-1, keepdims=True)
    return tf.reduce_mean(tf.math.squared_difference(values, mean), axis=-1, keepdims=True)


class Normed(keras.layers.Layer):
    def call(self, inputs):
        return inputs / (own_variance(inputs) + 1)


def classify(model, batch, training):
    """A loss in the dtype of the model's outputs, cast when it has been summed."""
    logits = model(batch["x"], training=training)
    losses = tf.nn.softmax_cross_entropy_with_logits(labels=tf.ones_like(logits), logits=logits)
    return tf.cast(tf.reduce_sum(losses), tf.float32), tf.reduce_sum(batch["weight"]), {}


def careless() -> keras.Model:
    """Everything that a graph can show, at once."""

    def body(values):
        values = keras.layers.Dense(12, name="odd")(values)
        values = Normed(name="normed")(values)
        return keras.layers.Softmax(name="shares")(values)

    return model(body)


def careful() -> keras.Model:
    def body(values):
        values = keras.layers.Dense(16, name="even")(values)
        values = keras.layers.BatchNormalization(name="norm")(values)
        values = keras.layers.LayerNormalization(name="layer_norm")(values)
        return keras.layers.Softmax(name="shares", dtype="float32")(values)

    start = keras.Input((16,))
    return keras.Model(start, keras.layers.Dense(8, name="out", dtype="float32")(body(start)))


@pytest.fixture(scope="module")
def bad():
    return lint_of(careless, loss=classify)


@pytest.fixture(scope="module")
def good():
    return lint_of(careful, loss=classify)


@pytest.mark.parametrize(
    ("rule", "path"),
    [
        ("outputs in 16 bits", ""),
        ("softmax in 16 bits", "shares"),
        ("statistics in 16 bits", "normed"),
        ("loss in 16 bits", ""),
    ],
)
def test_names_the_layer(bad, good, rule, path):
    assert any(path in one.path for one in bad[rule])
    assert all(one.fix and one.level == "warn" for one in bad[rule])
    assert rule not in good


class Recomputed(keras.layers.Layer):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = keras.layers.Dense(16, name="inner")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return keras.remat(self.inner)(inputs)


@pytest.mark.skipif(not hasattr(keras, "remat"), reason="this Keras has no remat")
def test_layers_whose_gradients_stay_hidden_are_told():
    (found,) = lint_of(lambda: model(Recomputed(name="block")))["not seen"]
    assert found.path == "block/inner"
    made = careful()

    assert {one.path for one in lint.unseen(made, ["even", "norm"])} == {"layer_norm", "out"}
    assert not list(lint.unseen(made, ["even", "norm", "layer_norm", "out"]))


def test_layers_of_another_dtype_are_told(good, bad):
    assert {one.path for one in good["dtype override"]} == {"shares", "out"}
    assert "dtype override" not in bad


@pytest.mark.parametrize("scale", [DynamicLossScale(), FixedLossScale(scale=1024.0)])
def test_a_loss_scale_under_bfloat16_is_needless(scale):
    assert list(lint.needless_scale(scale, "mixed_bfloat16"))
    assert not list(lint.needless_scale(scale, "mixed_float16"))
    assert not list(lint.needless_scale(FixedLossScale(scale=1.0), "mixed_bfloat16"))


def test_variables_made_outside_of_the_scope():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    outside = careful()
    with strategy.scope():
        inside = careful()

    assert {one.path for one in lint.outside_scope(strategy, outside)} >= {"even/kernel", "out/bias"}
    assert not list(lint.outside_scope(strategy, inside))


def test_weights_and_statistics_stored_in_16_bits():
    def narrow() -> keras.Model:
        return model(lambda values: keras.layers.BatchNormalization(name="norm", dtype="float16")(values))

    found = {one.rule: one.path for one in layer_lint.of_run(narrow(), GivenTask(BATCHES, narrow, negative_sum))}
    assert found == {"weights in 16 bits": "norm", "statistics in 16 bits": "norm"}


def test_what_is_drawn_in_16_bits_is_told_as_it_blurs_the_comparison():
    class Noisy(keras.layers.Layer):
        def call(self, inputs):
            return inputs * keras.random.uniform(inputs.shape[1:], dtype=inputs.dtype, seed=1)

    found = lint_of(lambda: model(Noisy(name="noisy")))
    assert any("noisy" in one.path for one in found["draws in 16 bits"])
    assert "draws in 16 bits" not in lint_of(lambda: model(keras.layers.Dropout(0.5)))

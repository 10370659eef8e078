"""Probes of gradients against values known by construction, on one replica and on several."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, build, copies, linear_batches, negative_sum, state_copies

from launcher.errors import UsageError
from launcher.models.transformer.layers import Dropout
from launcher.precision_report.probe import Probe
from launcher.watch import float16_losses

pytestmark = pytest.mark.slow


def _bins(values) -> np.ndarray:
    """The table of exponents, by NumPy."""
    values = np.abs(np.asarray(values, np.float32)).ravel()
    _, exponent = np.frexp(values)
    places = np.where(values == 0, 0, np.where(np.isfinite(values), exponent - 1 + float16_losses.BIAS, 255))
    return np.bincount(places, minlength=256)


def _probe(task, replicas=1, scale=None, **recipe):
    made = build(task, replicas, **recipe)
    probe = Probe(made)
    return made, probe, probe.run(next(made.trainer.batches(made.plan.data)), scale)


def _rows(probe, table, kind):
    """Those of a table's rows that are of one kind."""
    return np.asarray(table)[[one.kind == kind for one in probe.tensors]]


def _paths(probe, kind):
    return [one.path for one in probe.tensors if one.kind == kind]


X = np.array([[1.0, 2.0], [3.0, 0.0], [0.5, -1.0], [8.0, 4.0]], np.float32)
FIRST = np.array([[1.0, 0.0], [0.25, 2.0]], np.float32)
SECOND = np.array([[2.0**-10], [2.0**-20]], np.float32)


def _two_layers() -> keras.Model:
    """y = (x A) b in the policy's dtype, with the mean in float32 after it; its gradients are products of the rows."""
    inputs = keras.Input((2,))
    hidden = keras.layers.Dense(2, use_bias=False, name="first", kernel_initializer=_constant(FIRST))(inputs)
    outputs = keras.layers.Dense(1, use_bias=False, name="second", kernel_initializer=_constant(SECOND))(hidden)
    return keras.Model(inputs, outputs)


def _constant(value):
    return lambda shape, dtype=None: tf.constant(value, dtype)


@pytest.fixture
def two_layers() -> GivenTask:
    return GivenTask(linear_batches([X]), _two_layers, negative_sum)


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_counts_gradients_of_weights_and_of_activations_before_the_reduction(two_layers, replicas):
    _, probe, found = _probe(two_layers, replicas)

    parts = np.split(X, replicas)
    upstream = -1 / len(X)
    by_first = [sum(upstream * np.outer(row, SECOND) for row in part) for part in parts]
    by_second = [sum(upstream * (row @ FIRST) for row in part) for part in parts]
    by_hidden = np.tile(upstream * SECOND.T, (len(X), 1))
    by_output = np.full(len(X), upstream)
    assert _paths(probe, "weight") == ["first/kernel", "second/kernel"]
    assert _paths(probe, "activation") == ["first", "second"]
    np.testing.assert_array_equal(_rows(probe, found.shadow.counts, "weight"), [_bins(by_first), _bins(by_second)])
    np.testing.assert_array_equal(_rows(probe, found.shadow.counts, "activation"), [_bins(by_hidden), _bins(by_output)])
    largest = np.stack([np.abs(by_first).max(axis=(1, 2)), np.abs(by_second).max(axis=1)], axis=1)
    np.testing.assert_array_equal(_rows(probe, found.shadow.maxima.T, "weight").T, largest)
    np.testing.assert_array_equal(_rows(probe, found.shadow.maxima.T, "activation").T, [[2.0**-12, 0.25]] * replicas)
    np.testing.assert_allclose(found.shadow.loss, -(X @ FIRST @ SECOND).mean())


def test_shadow_of_a_float32_run_is_the_run_itself(two_layers):
    _, _, found = _probe(two_layers, 2)

    for one, other in zip(tf.nest.flatten(found.shadow), tf.nest.flatten(found.real), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found.compared.cosine, [1, 1])
    np.testing.assert_array_equal(found.compared.relative_error, [0, 0])


def test_a_float16_pass_shows_what_the_scale_saves(two_layers):
    _, probe, lost = _probe(two_layers, precision="mixed_float16", scale=2.0**-5)
    _, _, saved = _probe(two_layers, precision="mixed_float16", scale=2.0**10)

    assert {one.dtype for one in probe.tensors} == {"float16"}
    hidden = [0, 1]
    # Of the activation gradients 2^-12 and 2^-22, the scale 2^-5 takes the second below 2^-25.
    assert lost.real.counts[2][0] == 4
    assert saved.real.counts[2][0] == 0
    np.testing.assert_array_equal(lost.shadow.counts, saved.shadow.counts)
    assert (lost.shadow.counts[2][[float16_losses.BIAS - 12, float16_losses.BIAS - 22]] == 4).all()
    assert lost.compared.relative_error[hidden].max() > saved.compared.relative_error[hidden].max()
    np.testing.assert_allclose(saved.compared.cosine, 1, atol=1e-6)


def test_overflow_is_counted_and_has_no_direction(two_layers):
    _, _, found = _probe(two_layers, precision="mixed_float16", scale=2.0**20)

    assert found.real.counts[3][float16_losses.NON_FINITE_BIN] == 4
    assert np.isnan(found.compared.cosine[0])
    assert found.shadow.counts[2:, float16_losses.NON_FINITE_BIN].sum() == 0


class _Drawn(keras.layers.Layer):
    """Dropout whose seed is drawn apart from its use, as the Transformers have it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drop = Dropout(0.5, name="drop")

    def call(self, inputs, training=None):
        return self.drop.with_seed(self.drop.draw(training))(inputs)


def _with_state() -> keras.Model:
    """Dropout, moving statistics, a layer that is called twice, one before all weights, a recurrent one, a nested."""
    inputs = keras.Input((6, 4))
    values = keras.layers.Rescaling(2.0, name="before")(inputs)
    shared = keras.layers.Dense(4, name="shared")
    values = keras.layers.Dropout(0.5, name="drop")(shared(shared(values)))
    values = keras.layers.BatchNormalization(name="norm")(values)
    values = keras.layers.MultiHeadAttention(2, 2, dropout=0.5, name="attention")(values, values)
    values = _Drawn(name="drawn")(values)
    values = keras.layers.LSTM(3, name="lstm")(values)
    inner = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="deep")], name="inner")
    return keras.Model(inputs, keras.layers.Dense(1, dtype="float32", name="out")(inner(values)))


@pytest.mark.nightly  # many layers, a long trace
def test_a_model_with_state_is_left_as_it_was_and_counted_whole_and_its_shadow_drops_the_same_in_float32():
    random = np.random.default_rng(0)
    arrays = {"x": random.normal(size=(2, 8, 6, 4)).astype(np.float32), "weight": np.ones((2, 8), np.float32)}
    made = build(GivenTask(arrays, _with_state, negative_sum), 2, microbatches=2, precision="mixed_float16")
    probe = Probe(made)
    batches = made.trainer.batches(made.plan.data)
    before = state_copies(made)
    calls = {layer.name: layer.call for layer in made.model.layers}
    found = probe.run(next(batches))

    # The run is as it was.
    for name, values in state_copies(made).items():
        np.testing.assert_array_equal(values, before[name], err_msg=name)
    assert {layer.name: layer.call for layer in made.model.layers} == calls
    assert made.model.get_layer("drop").dtype_policy.name == "mixed_float16"
    assert keras.config.dtype_policy().name == "mixed_float16"

    # Both passes drop the same. A softmax over keys does not notice what is added to all of them: that gradient is
    # rounding alone.
    told = [not one.path.endswith("key/bias") for one in probe.tensors if one.kind == "weight"]
    assert found.compared.cosine[told].min() > 0.99
    np.testing.assert_allclose(found.real.loss, found.shadow.loss, rtol=0.02)

    # Every leaf layer behind the first weights is counted.
    totals = _rows(probe, found.shadow.counts, "activation").sum(axis=1)
    counts = dict(zip(_paths(probe, "activation"), totals, strict=True))
    examples = 2 * 8 // 2 // 2  # the first microbatch of each replica, of which there are two
    assert counts["before"] == 0
    assert counts["shared"] == 2 * examples * 6 * 4
    assert counts["drop"] == examples * 6 * 4
    assert counts["lstm"] == examples * 3
    assert counts["out"] == examples
    assert any(path.endswith("deep") and count == examples * 4 for path, count in counts.items())
    assert any("attention" in path and count for path, count in counts.items())

    # The shadow computes in float32 throughout.
    assert {layer.compute_dtype for layer in probe.shadow.layers} == {"float32"}
    assert {one.dtype for one in probe.tensors if one.kind == "activation"} == {"float16", "float32"}
    for one, other in zip(probe.model.weights, probe.shadow.weights, strict=True):
        np.testing.assert_array_equal(copies(one), copies(other))


def test_a_model_that_is_another_each_time_is_refused():
    widths = iter([3, 4])

    def model():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(next(widths)), keras.layers.Dense(1)])

    made = build(GivenTask(linear_batches([X]), model, negative_sum))
    with pytest.raises(UsageError, match=r"dense/kernel \(2, 4\) and before it .*dense/kernel \(2, 3\)"):
        Probe(made)

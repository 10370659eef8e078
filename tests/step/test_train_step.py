"""The whole step against NumPy in float64: loss, weight, metrics, norm and the weights, on any topology."""

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
    descent,
    linear_batches,
    linear_model,
    negative_sum,
    train,
)

from launcher import optimizers
from launcher.errors import UsageError
from launcher.step.clipping import Clipping
from launcher.step.precision import DynamicLossScale, FixedLossScale

pytestmark = pytest.mark.slow

STEPS, BATCH, FEATURES, HIDDEN, CLASSES = 5, 16, 6, 8, 4
LEARNING_RATE, MOMENTUM = 0.5, 0.9
TOPOLOGIES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (2, 2), (4, 4)]  # replicas, microbatches

# ------------------------------------------------------------------------------------------------------ what is trained


def initial_weights() -> list[np.ndarray]:
    source = np.random.default_rng(3)
    shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    return [source.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]


def network() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, "tanh", name="hidden"),
            keras.layers.Dense(CLASSES, name="logits"),
        ]
    )
    model.set_weights(initial_weights())
    return model


class ByPython(keras.layers.Dense):
    """A layer that a Python function computes, with its gradients; they have no static shapes."""

    def call(self, x):
        outputs = tf.py_function(lambda *parts: parts[0] @ parts[1] + parts[2], [x, self.kernel, self.bias], tf.float32)
        return self.activation(tf.ensure_shape(outputs, [x.shape[0], self.units]))


def network_by_python() -> keras.Model:
    layers = [ByPython(HIDDEN, "tanh", name="hidden"), keras.layers.Dense(CLASSES, name="logits")]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers])
    model.set_weights(initial_weights())
    return model


def cross_entropy(model, batch, training):
    logits = model(batch["x"], training=training)
    weight = batch["weight"]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
    correct = tf.cast(tf.argmax(logits, -1, tf.int32) == batch["label"], tf.float32)
    metrics = {"accuracy": tf.reduce_sum(correct * weight), "examples": tf.reduce_sum(tf.ones_like(weight))}
    return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), metrics


def weights_of_examples(scenario: str) -> np.ndarray:
    source = np.random.default_rng(5)
    weight = np.ones((STEPS, BATCH), np.float32)
    if scenario == "padding":
        return (source.random(weight.shape) > 0.4).astype(np.float32)
    if scenario == "a replica and a microbatch of only padding":
        weight[0, 12:] = weight[1, :8] = weight[2, 4:8] = weight[3, 1:] = 0
    if scenario == "fractions":
        return source.choice([0.0, 0.125, 0.3, 1.0, 2.5], weight.shape).astype(np.float32)
    if scenario == "a step of only padding":
        weight[2] = 0
    return weight


def batches(scenario: str = "ones") -> dict[str, np.ndarray]:
    source = np.random.default_rng(4)
    x = source.normal(size=(STEPS, BATCH, FEATURES)).astype(np.float32)
    label = source.integers(0, CLASSES, (STEPS, BATCH)).astype(np.int32)
    return {"x": x, "label": label, "weight": weights_of_examples(scenario)}


# ----------------------------------------------------------------------------------------------------------- the oracle


def numpy_gradients(weights, x, label, weight):
    """Sums over the batch: loss, correct predictions, gradients; nothing in it knows of replicas."""
    first, bias, second, offset = weights
    hidden = np.tanh(x @ first + bias)
    logits = hidden @ second + offset
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    loss = -(logs[np.arange(len(x)), label] * weight).sum()
    correct = ((logits.argmax(-1) == label) * weight).sum()
    by_logits = (np.exp(logs) - np.eye(CLASSES)[label]) * weight[:, np.newaxis]
    by_hidden = by_logits @ second.T * (1 - hidden**2)
    return loss, correct, [x.T @ by_hidden, by_hidden.sum(0), hidden.T @ by_logits, by_logits.sum(0)]


@functools.cache
def numpy_run(scenario: str, clip: float | None = None):
    """Loss sums, weights, correct predictions and norms of each step, and the weights after the last."""
    weights = [weight.astype(np.float64) for weight in initial_weights()]
    velocity = [np.zeros_like(weight) for weight in weights]
    given, rows = batches(scenario), []
    for step in range(STEPS):
        x, label, weight = (given[key][step] for key in ("x", "label", "weight"))
        total = weight.astype(np.float64).sum()
        loss, correct, sums = numpy_gradients(weights, x.astype(np.float64), label, weight.astype(np.float64))
        mean = [gradient / total if total else gradient for gradient in sums]
        norm = np.sqrt(sum((gradient**2).sum() for gradient in mean))
        shrink = min(1.0, clip / norm) if clip and norm else 1.0
        if total:  # else nothing is learnt, and the velocity carries the weights no further
            velocity = [MOMENTUM * v + LEARNING_RATE * g * shrink for v, g in zip(velocity, mean, strict=True)]
            weights = [weight - v for weight, v in zip(weights, velocity, strict=True)]
        rows.append((loss, total, correct, norm))
    return np.array(rows).T, weights


def assert_equals_numpy(made, records, scenario, clip=None):
    (loss, weight, correct, norm), weights = numpy_run(scenario, clip)
    np.testing.assert_allclose(records.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(records.weight, weight, rtol=1e-6)
    np.testing.assert_allclose(records.metrics["accuracy"], correct, rtol=1e-6)
    np.testing.assert_array_equal(records.metrics["examples"], np.full(STEPS, BATCH))
    np.testing.assert_allclose(records.gradient_norm, norm, rtol=2e-5)
    np.testing.assert_array_equal(records.finite, weight > 0)
    for variable, expected in zip(made.model.weights, weights, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-5, err_msg=variable.path)
    assert_replicas_equal(made)


def built(replicas, microbatches, scenario="ones", **recipe):
    def optimizer():
        return descent(LEARNING_RATE, MOMENTUM)

    task = GivenTask(batches(scenario), network, cross_entropy)
    return build(task, replicas, microbatches, **{"optimizer": optimizer, "loss_scale": "none", **recipe})


@functools.cache
def built_once(replicas, microbatches, **recipe):
    """A session that is traced once for all cases, and its first state."""
    made = built(replicas, microbatches, **recipe)
    return made, made.trainer.state.snapshot()


def train_from_the_start(replicas, microbatches, scenario, **recipe):
    made, start = built_once(replicas, microbatches, **recipe)
    made.trainer.state.restore(start)
    given = GivenTask(batches(scenario), network, cross_entropy).data()
    return made, made.trainer.train(made.trainer.batches(given), STEPS)


SCENARIOS = ["ones", "padding", "a replica and a microbatch of only padding", "fractions", "a step of only padding"]


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], TOPOLOGIES))
def test_five_steps_equal_numpy_whatever_the_weights_of_the_examples(replicas, microbatches):
    for scenario in SCENARIOS:
        made, records = train_from_the_start(replicas, microbatches, scenario)
        assert_equals_numpy(made, records, scenario)


def test_the_scenarios_are_told_apart_by_the_oracle():
    ends = [numpy_run(scenario)[1][0] for scenario in SCENARIOS]
    for index, one in enumerate(ends):
        assert all(np.abs(one - other).max() > 1e-3 for other in ends[index + 1 :])


@pytest.mark.parametrize(
    ("replicas", "microbatches", "scenario"),
    repeated_but(
        [(4, 1, "a step of only padding")],  # fractions: below, with a loss scale
        [
            (*topology, scenario)
            for topology in [(1, 1), (4, 1), (2, 2)]
            for scenario in ("fractions", "a step of only padding")
        ],
    ),
)
def test_the_mean_gradient_is_clipped_once_by_its_global_norm(replicas, microbatches, scenario):
    norms = numpy_run("fractions")[0][3]
    clip = float(np.median(norms))  # some steps are clipped and some are not
    made, records = train_from_the_start(replicas, microbatches, scenario, clipping=Clipping(global_norm=clip))
    assert_equals_numpy(made, records, scenario, clip)


SCALES = {
    "3": FixedLossScale(scale=3.0),
    "2^-10": FixedLossScale(scale=2.0**-10),
    "dynamic": DynamicLossScale(initial_scale=2.0**23, growth_interval=2),
}


@pytest.mark.parametrize(
    ("replicas", "microbatches", "scale"),
    repeated_but(
        [(4, 1, "dynamic")],
        [(*topology, scale) for topology in [(1, 2), (4, 1)] for scale in SCALES],
    ),
)
def test_a_loss_scale_leaves_the_update_as_it_is(replicas, microbatches, scale):
    made = built(replicas, microbatches, "fractions", loss_scale=SCALES[scale], clipping={"global_norm": 0.3})
    records = train(made)
    assert_equals_numpy(made, records, "fractions", clip=0.3)
    if scale == "dynamic":
        np.testing.assert_array_equal(records.loss_scale, 2.0 ** np.array([23, 23, 24, 24, 24]))


@pytest.mark.parametrize("bucket_bytes", repeated_but([1], [1, 40]))
def test_the_size_of_the_buckets_changes_no_bit(bucket_bytes):
    small = built(2, 2, "fractions", bucket_bytes=bucket_bytes)
    large, records = train_from_the_start(2, 2, "fractions")
    for one, other in zip(train(small)[:-1], records[:-1], strict=True):
        np.testing.assert_equal(one, other)
    for one, other in zip(small.model.weights, large.model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_a_step_compiled_by_xla_equals_numpy():
    made = built(2, 2, "fractions", jit_compile=True)
    assert_equals_numpy(made, train(made), "fractions")


# ------------------------------------------------------------------------------------------------------------- the wire


WIRE = {"float16": np.float16, "bfloat16": tf.bfloat16.as_numpy_dtype, "float32": np.float32}


@pytest.mark.parametrize(
    ("replicas", "reduce_dtype"),
    repeated_but(
        [(1, "float16"), *((2, wire) for wire in WIRE)], [(replicas, wire) for replicas in (1, 2) for wire in WIRE]
    ),
)
def test_gradients_are_rounded_to_the_reduce_dtype_before_and_by_the_sum(replicas, reduce_dtype):
    """Inputs are small integers and sizes powers of two, so that all but the wire is exact, bit for bit."""
    x = np.random.default_rng(0).integers(-5000, 5000, (1, 4, 5)).astype(np.float32)
    task = GivenTask(linear_batches(x), lambda: linear_model(5), negative_sum)
    made = build(task, replicas, 1, reduce_dtype=reduce_dtype, loss_scale=FixedLossScale(scale=8.0))
    train(made)
    parts = x[0].reshape(replicas, -1, 5).sum(1) * np.float32(8 / 4)
    wire = [part.astype(WIRE[reduce_dtype]) for part in parts]
    expected = functools.reduce(lambda one, other: (one + other).astype(WIRE[reduce_dtype]), wire)
    np.testing.assert_array_equal(made.model.weights[0].numpy()[:, 0], expected.astype(np.float32) / 8)
    exact = x[0].sum(0) / 4
    assert np.array_equal(expected.astype(np.float32) / 8, exact) == (reduce_dtype == "float32")


def test_microbatches_add_up_in_float32_under_mixed_float16():
    """2048 + 1 + 1 + 1 is 2048 when it is added up in float16, whose next number is 2050."""
    x = np.array([2048.0, 1.0, 1.0, 1.0], np.float32).reshape(1, 4, 1)
    task = GivenTask(linear_batches(x), lambda: linear_model(1), negative_sum)
    made = build(task, 1, 4, precision="mixed_float16", reduce_dtype="float32", loss_scale="none")
    train(made)
    np.testing.assert_array_equal(made.model.weights[0].numpy(), [[2051 / 4]])


@pytest.mark.parametrize("per_example", repeated_but([30.0], [0.01, 30.0]))
def test_the_nominal_weight_of_an_example_cancels_out(per_example):
    task = GivenTask(batches("fractions"), network, cross_entropy)
    task.nominal_weight_per_example = per_example
    made = build(task, 2, 2, optimizer=lambda: descent(LEARNING_RATE, MOMENTUM), loss_scale=FixedLossScale(scale=8.0))
    assert_equals_numpy(made, train(made), "fractions")


@pytest.mark.parametrize("replicas", repeated_but([4], [1, 2, 4]))
def test_an_evaluation_is_the_mean_over_the_weight_that_is_there(replicas):
    made = built(replicas, 1, "a replica and a microbatch of only padding")
    given = batches("a replica and a microbatch of only padding")
    rows = [
        numpy_gradients([weight.astype(np.float64) for weight in initial_weights()], *step)[:2]
        for step in zip(given["x"].astype(np.float64), given["label"], given["weight"], strict=True)
    ]
    loss, correct = np.sum(rows, 0) / given["weight"].sum()
    found = made.evaluator.evaluate()
    assert found["examples"] == given["weight"].sum()
    np.testing.assert_allclose([found["loss"], found["accuracy"]], [loss, correct], rtol=1e-5)


# --------------------------------------------------------------------------------------------- variables of other kinds


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], [(1, 1), (2, 2), (4, 1)]))
def test_a_variable_that_the_loss_does_not_reach_stays_and_disturbs_nothing(replicas, microbatches):
    def model():
        inputs = keras.Input((2,))
        line = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="line")(inputs)
        loose = keras.layers.Dense(3, kernel_initializer="ones", name="loose")(inputs)
        return keras.Model(inputs, [line, loose])

    def loss(model, batch, training):
        outputs = model(batch["x"], training=training)[0][:, 0]
        return -tf.reduce_sum(outputs * batch["weight"]), tf.reduce_sum(batch["weight"]), {}

    task = GivenTask(linear_batches(np.ones((2, 4, 2))), model, loss)
    made = build(task, replicas, microbatches)
    records = train(made)
    np.testing.assert_allclose(records.gradient_norm, np.full(2, np.sqrt(2)), rtol=1e-6)
    line, kernel, bias = (weight.numpy() for weight in made.model.weights)
    np.testing.assert_array_equal(line, [[2.0], [2.0]])
    np.testing.assert_array_equal(kernel, np.ones((2, 3)))
    np.testing.assert_array_equal(bias, np.zeros(3))


@pytest.mark.parametrize(
    ("replicas", "microbatches", "precision"),
    repeated_but(
        [(2, 2, "mixed_float16")],
        [
            (*topology, precision)
            for topology in [(1, 1), (2, 1), (2, 2)]
            for precision in ("float32", "mixed_float16", "mixed_bfloat16")
        ],
    ),
)
def test_rows_of_an_embedding_that_come_twice_are_added_up(replicas, microbatches, precision):
    ids = np.array([[[0, 2], [2, 2], [1, 0], [4, 2]]], np.int32)

    def model():
        inputs = keras.Input((2,), dtype="int32")
        return keras.Model(inputs, keras.layers.Embedding(6, 3, embeddings_initializer="zeros")(inputs))

    def loss(model, batch, training):
        outputs = tf.cast(model(batch["id"], training=training), tf.float32)
        return -tf.reduce_sum(outputs), tf.reduce_sum(batch["weight"]), {}

    arrays = {"id": ids, "weight": np.ones((1, 4), np.float32)}
    made = build(GivenTask(arrays, model, loss), replicas, microbatches, precision=precision)
    train(made)
    counts = np.bincount(ids.ravel(), minlength=6)[:, np.newaxis]
    np.testing.assert_array_equal(made.model.weights[0].numpy(), np.broadcast_to(counts / 4, (6, 3)))


PARTS = {
    "plain": {},
    "average": {"ema_decay": 0.5},
    "clip_layer_norm": {"clipping": {"layer_norm": 1e6}},
    "clip_adaptive": {"clipping": {"adaptive": 1e6}},
}


@pytest.mark.parametrize(
    ("dtype", "part"),
    repeated_but(
        [("float64", "average"), ("float16", "clip_layer_norm")],
        [(dtype, part) for dtype in ("float16", "float64") for part in PARTS],
    ),
)
def test_a_layer_may_keep_its_weights_in_a_dtype_of_its_own(dtype, part):
    task = GivenTask(linear_batches(np.ones((2, 4, 2))), lambda: linear_model(2, dtype=dtype), negative_sum)
    made = build(task, 2, 2, **PARTS[part])
    assert train(made).finite.tolist() == [1, 1]
    np.testing.assert_array_equal(made.model.weights[0].numpy(), [[2], [2]])
    assert_replicas_equal(made)


def test_a_frozen_layer_stays_as_it_is():
    def model():
        made = network()
        made.layers[0].trainable = False
        return made

    made = build(GivenTask(batches(), model, cross_entropy), 2, 2, loss_scale="none")
    train(made)
    for index in (0, 1):
        np.testing.assert_array_equal(made.model.layers[0].weights[index].numpy(), initial_weights()[index])
    assert np.any(made.model.layers[1].weights[0].numpy() != initial_weights()[2])


# --------------------------------------------------------------------------------- nothing to learn from, nothing to do


def network_with_a_spare_layer() -> keras.Model:
    model = network()
    spare = keras.layers.Dense(CLASSES, name="spare")(model.layers[0].output)
    return keras.Model(model.inputs, [model.outputs[0], spare])


def of_the_first_output(model, batch, training):
    return cross_entropy(lambda x, training: model(x, training=training)[0], batch, training)


@pytest.mark.parametrize(
    ("replicas", "microbatches", "make"),
    repeated_but(
        [(2, 2, "adamw")],
        [(*topology, make) for topology in [(1, 1), (2, 1), (1, 2), (2, 2)] for make in ("adamw", "lamb", "momentum")],
    ),
)
def test_a_weight_that_the_loss_does_not_use_is_named_and_neither_updated_nor_decayed(replicas, microbatches, make):
    task = GivenTask(batches(), network_with_a_spare_layer, of_the_first_output)

    def optimizer():
        return getattr(optimizers, make)(learning_rate=0.1, weight_decay=0.1, exclude_from_decay=())

    made = build(task, replicas, microbatches, optimizer=optimizer)
    before = made.trainer.state.snapshot()
    train(made)
    after = made.trainer.state.snapshot()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert not [name for name in moved if "spare" in name]
    assert {"hidden", "logits"} <= {name.split("/")[-2] for name in moved if name.endswith("/kernel")}
    (note,) = made.trainer.notes
    assert "spare/kernel" in note and "spare/bias" in note and "logits" not in note
    assert_replicas_equal(made)


def test_a_loss_that_uses_no_weight_is_refused():
    def loss(model, batch, training):
        return tf.reduce_sum(batch["x"]), tf.reduce_sum(batch["weight"]), {}

    made = build(GivenTask(batches(), network, loss))
    with pytest.raises(UsageError, match="depends on no trained variable"):
        train(made)


@functools.cache
def adaptive_session(replicas, microbatches):
    made = build(
        GivenTask(batches(), network, cross_entropy),
        replicas,
        microbatches,
        optimizer=lambda: optimizers.adamw(learning_rate=0.1, weight_decay=0.1),
        loss_scale=DynamicLossScale(growth_interval=3),
        ema_decay=0.5,
    )
    return made, made.trainer.state.snapshot()


@pytest.mark.parametrize(
    ("replicas", "microbatches", "padding"),
    repeated_but(
        [(2, 2, np.nan), (2, 2, np.inf)],
        [(*topology, padding) for topology in [(1, 1), (2, 1), (2, 2)] for padding in (0.0, np.nan, np.inf)],
    ),
)
def test_a_batch_without_weight_moves_nothing_but_the_count_of_steps(replicas, microbatches, padding):
    given = batches("a step of only padding")
    given["x"][2] = padding
    made, start = adaptive_session(replicas, microbatches)
    made.trainer.state.restore(start)
    source = made.trainer.batches(GivenTask(given, network, cross_entropy).data())
    made.trainer.train(source, 2)
    before = made.trainer.state.snapshot()
    records = made.trainer.train(source, 1)
    after = made.trainer.state.snapshot()
    assert (records.weight.tolist(), records.finite.tolist()) == ([0], [0])
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {
        "counters/step",
        "counters/skipped",
    }
    assert after["loss_scale/finite_steps"] == 2
    made.trainer.train(source, 1)
    assert made.trainer.loss_scale == 2 * DynamicLossScale().initial_scale, "the third finite step makes it grow"


@pytest.mark.parametrize(("replicas", "microbatches"), repeated_but([(2, 2)], [(1, 1), (2, 2)]))
def test_a_gradient_without_a_static_shape_has_its_variables(replicas, microbatches):
    task = GivenTask(batches(), network_by_python, cross_entropy)
    made = build(task, replicas, microbatches, optimizer=lambda: descent(LEARNING_RATE, MOMENTUM), loss_scale="none")
    assert_equals_numpy(made, train(made), "ones")


def test_no_steps_leave_no_records_and_change_nothing():
    made = built(1, 1)
    batches_of = made.trainer.batches(made.plan.data)
    nothing = made.trainer.train(batches_of, 0)
    assert nothing.loss.shape == nothing.metrics["accuracy"].shape == (0,)
    assert nothing.non_finite.shape == (0, len(made.model.trainable_variables))
    assert (made.trainer.step, made.trainer.last_seen) == (0, None)
    assert_equals_numpy(made, made.trainer.train(batches_of, STEPS), "ones")

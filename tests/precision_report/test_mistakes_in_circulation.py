"""What is true of common statements about mixed precision, shown by running it."""

from __future__ import annotations

import inspect

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, build, copies, linear_batches, linear_model, negative_sum, train

from launcher.machine import strategy as strategy_lib
from launcher.models.transformer import layers
from launcher.run.loading import Machine
from launcher.run.plan import RunPlan
from launcher.run.recipe import Recipe
from launcher.step import precision


def rounding_error(dtype) -> float:
    """Largest relative error over random numbers of magnitude one."""
    values = np.random.default_rng(0).uniform(1.0, 2.0, 4096).astype(np.float32)
    rounded = tf.cast(tf.cast(values, dtype), tf.float32).numpy()
    return float(np.max(np.abs(rounded - values) / values))


def test_bfloat16_has_two_bytes():
    assert tf.bfloat16.size == tf.float16.size == 2
    assert len(tf.io.serialize_tensor(tf.zeros([1000], tf.bfloat16)).numpy()) > 2000


def test_bfloat16_is_less_precise_than_float16_and_reaches_as_far_as_float32():
    float16, bfloat16 = rounding_error(tf.float16), rounding_error(tf.bfloat16)
    assert 2.0**-12 < float16 <= 2.0**-11
    assert 2.0**-9 < bfloat16 <= 2.0**-8
    assert tf.bfloat16.max > 0.99 * tf.float32.max
    assert float(tf.cast(1e-37, tf.bfloat16)) > 0 == float(tf.cast(1e-37, tf.float16))


def test_float16_reaches_65504_and_down_to_two_to_the_minus_24():
    assert tf.float16.max == 65504
    assert float(tf.cast(65504.0, tf.float16)) == 65504
    assert float(tf.cast(200.0, tf.float16)) == 200, "past 2^7"
    assert np.isinf(tf.cast(65520.0, tf.float16).numpy())
    assert float(tf.cast(2.0**-24, tf.float16)) == 2.0**-24
    assert float(tf.cast(2.0**-25, tf.float16)) == 0


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("activation", "oracle"),
    [
        ("relu", lambda x: np.maximum(x, 0)),
        ("sigmoid", lambda x: 1 / (1 + np.exp(-x))),
        ("tanh", np.tanh),
    ],
)
def test_relu_sigmoid_and_tanh_work_in_16_bits(activation, oracle, policy):
    layer = keras.layers.Activation(activation, dtype=policy)
    wide = ml_dtypes.bfloat16 if policy == "mixed_bfloat16" else np.float16
    x = np.linspace(-20, 20, 401).astype(wide)
    tensor = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        found = layer(tensor)
    gradient = tape.gradient(found, tensor)
    assert found.dtype == layer.compute_dtype == tensor.dtype
    resolution = float(ml_dtypes.finfo(wide).eps)
    # The absolute term is float16's smallest normal number: below, digits are lost in either format.
    np.testing.assert_allclose(
        tf.cast(found, tf.float64), oracle(x.astype(np.float64)), rtol=2 * resolution, atol=2.0**-14
    )
    assert np.all(np.isfinite(tf.cast(gradient, tf.float32)))


def test_layer_normalisation_of_bfloat16_loses_digits_where_the_mean_is_hundreds_of_deviations():
    def error(policy: str, mean: float) -> float:
        layer = layers.LayerNormalization(name="norm")
        layer.dtype_policy = keras.DTypePolicy(policy)
        layer.build((None, 1024))
        noise = np.random.default_rng(0).normal(size=(64, 1024))
        x = tf.cast(tf.cast(mean + noise, tf.bfloat16), layer.compute_dtype)
        values = tf.cast(x, tf.float64).numpy()
        expected = (values - values.mean(-1, keepdims=True)) / values.std(-1, keepdims=True)
        return float(np.max(np.abs(tf.cast(tf.cast(layer(x), tf.bfloat16), tf.float64) - expected)))

    means = (0, 100, 1000)
    one_pass, two_passes = ([error(policy, mean) for mean in means] for policy in ("mixed_bfloat16", "float32"))
    assert one_pass[:2] == pytest.approx(two_passes[:2], abs=1e-3)
    assert one_pass[2] > 5 * two_passes[2]


def test_mixed_precision_is_off_until_it_is_asked_for():
    assert keras.config.dtype_policy().name == "float32"
    assert keras.layers.Dense(2).compute_dtype == "float32"
    assert not tf.config.optimizer.get_experimental_options().get("auto_mixed_precision", False)
    made = build(GivenTask(linear_batches([[[1.0]]]), lambda: linear_model(1), negative_sum), precision="auto")
    assert made.plan.policy == "float32", "no accelerator"


@pytest.fixture
def on_tpu():
    """A plan of a run on a TPU of 8 cores, with what the recipe binds; nothing is connected to."""
    devices = strategy_lib.StrategyPlan(
        kind="tpu", num_replicas=8, local_replicas=8, why="a test", devices=("TPU:0",), accelerator="tpu", tpu="local"
    )
    task = GivenTask(linear_batches([[[1.0]] * 8]), lambda: linear_model(1), negative_sum)

    def resolve(**bindings) -> RunPlan:
        recipe = Recipe(task=task, optimizer=lambda: None, steps=1, global_batch_size=8, **bindings)
        return Machine(environ={}, on=devices).plan_of(recipe)

    return resolve


def test_bfloat16_is_for_tpus_and_mixed_float16_there_is_warned_of(on_tpu):
    assert on_tpu().policy == "mixed_bfloat16"
    assert on_tpu().notes == ()
    assert on_tpu().loss_scale == precision.FixedLossScale(scale=1.0), "bfloat16 needs no scale"
    (note,) = on_tpu(precision="mixed_float16").notes
    assert "multiplies in bfloat16" in note and "train.precision = 'mixed_bfloat16'" in note


def test_memory_growth_is_a_switch_and_a_memory_limit_another_setting():
    growth = inspect.signature(tf.config.experimental.set_memory_growth).parameters
    assert list(growth) == ["device", "enable"], "yes or no; nowhere to put a size"
    limited = tf.config.LogicalDeviceConfiguration(memory_limit=1024)
    assert limited.memory_limit == 1024
    # This process has split its CPU into logical devices: a device has the one setting or the other.
    (cpu,) = tf.config.list_physical_devices("CPU")
    with pytest.raises(ValueError, match="virtual devices configured"):
        tf.config.experimental.set_memory_growth(cpu, True)


def test_a_softmax_in_float16_loses_the_classes_that_a_loss_is_about():
    logits = tf.constant([[0.0, 20.0]])
    label = tf.constant([0])
    low = tf.nn.softmax(tf.cast(logits, tf.float16))
    assert float(low[0, 0]) == 0.0, "the probability of the right class"
    assert float(-tf.math.log(tf.cast(low[0, 0], tf.float32))) == np.inf
    right = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits)
    assert float(right[0]) == pytest.approx(20.0, rel=1e-6)


def test_a_model_built_outside_the_scope_is_one_copy_for_all_replicas():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    outside = keras.Variable(0.0)
    with strategy.scope():
        inside = keras.Variable(0.0)
    assert len(copies(inside)) == 2
    assert len(copies(outside)) == 1

    def step():
        # As Launcher's optimizers do: each replica updates what it holds, without any collective.
        outside.value.assign_add(1.0)

    strategy.run(step)
    assert float(outside) == 2.0, "every replica has updated the one copy"


def test_launcher_builds_every_model_inside_the_scope():
    made = build(GivenTask(linear_batches([[[1.0], [3.0]]]), lambda: linear_model(1), negative_sum), replicas=2)
    assert [len(copies(weight)) for weight in made.model.weights] == [2]
    train(made)
    assert [float(copy[0, 0]) for copy in copies(made.model.weights[0])] == [2.0, 2.0], "the mean, once"


@pytest.mark.parametrize("value", repeated_but([0.0], [0.0, 1.0]))
def test_the_loss_scale_rises_after_finite_steps_whether_gradients_are_zeros_or_not(value):
    batches = linear_batches([[[value]]] * 7)
    made = build(
        GivenTask(batches, lambda: linear_model(1), negative_sum),
        precision="mixed_float16",
        loss_scale=precision.DynamicLossScale(initial_scale=4.0, growth_interval=3),
    )
    records = train(made)
    assert records.loss_scale.tolist() == [4, 4, 4, 8, 8, 8, 16]
    assert np.all(records.gradient_norm == value)

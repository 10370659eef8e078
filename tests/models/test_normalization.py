"""Batch normalisation against NumPy in float64, and one topology against another."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but

from launcher.models.normalization import BatchNormalization, PooledBatchNormalization

EPSILON = 1e-3


def normal(*shape, mean=1.0, seed=0):
    return np.random.default_rng(seed).normal(mean, 2.0, shape).astype(np.float32)


def oracle(x, gamma, beta, group_size):
    """Outputs, and mean over the groups of mean and biased variance, in float64."""
    groups = x.astype(np.float64).reshape(-1, group_size, *x.shape[1:])
    axes = tuple(range(1, groups.ndim - 1))
    mean, variance = groups.mean(axes, keepdims=True), groups.var(axes, keepdims=True)
    y = (groups - mean) / np.sqrt(variance + EPSILON) * gamma + beta
    return y.reshape(x.shape), mean.mean(0).ravel(), variance.mean(0).ravel()


def numeric_gradient(function, x, delta=1e-5):
    """Central differences of a scalar float64 function."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[index] = delta
        gradient[index] = (function(x + step) - function(x - step)) / (2 * delta)
    return gradient


def layer_for(x, *, gamma=None, beta=None, **arguments):
    layer = BatchNormalization(**{"epsilon": EPSILON, "name": "norm"} | arguments)
    layer.build((None, *x.shape[1:]))
    if gamma is not None:
        layer.gamma.assign(gamma)
    if beta is not None:
        layer.beta.assign(beta)
    return layer


def train(layer, x, weight):
    """Outputs and the gradients of sum(weight * outputs) for inputs, gamma and beta."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * weight)
    return y, *tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])


GAMMA, BETA = np.array([0.5, 1.0, -2.0]), np.array([1.0, 0.0, 0.3])


@pytest.mark.parametrize("shape", [(8, 4, 5, 3), (8, 3), (8, 6, 3), (8, 2, 3, 2, 3)])
@pytest.mark.parametrize("group_size", [None, 8, 4, 2])
def test_training_equals_numpy(shape, group_size):
    x = normal(*shape)
    layer = layer_for(x, gamma=GAMMA, beta=BETA, group_size=group_size, momentum=0.75)
    expected, mean, variance = oracle(x, GAMMA, BETA, group_size or 8)
    actual = layer(x, training=True)
    assert actual.shape == shape
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.25 * mean, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.75 + 0.25 * variance, atol=1e-5)


@pytest.mark.parametrize("group_size", [None, 2])
def test_gradients_equal_finite_differences(group_size):
    x, weight = normal(4, 2, 2, 3), normal(4, 2, 2, 3, seed=1)
    layer = layer_for(x, gamma=GAMMA, beta=BETA, group_size=group_size)

    def loss(x, gamma, beta):
        return np.sum(weight * oracle(x, gamma, beta, group_size or 4)[0])

    _, by_x, by_gamma, by_beta = train(layer, x, weight)
    expected = numeric_gradient(lambda value: loss(value, GAMMA, BETA), x.astype(np.float64))
    np.testing.assert_allclose(by_x, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(by_gamma, numeric_gradient(lambda value: loss(x, value, BETA), GAMMA), rtol=1e-4)
    np.testing.assert_allclose(by_beta, numeric_gradient(lambda value: loss(x, GAMMA, value), BETA), rtol=1e-4)


@pytest.mark.parametrize("shape", [(36, 2, 1, 3), (36, 3), (36, 4, 3)])
def test_many_groups_equal_numpy_and_finite_differences(shape):
    x, weight = normal(*shape), normal(*shape, seed=1)
    layer = layer_for(x, gamma=GAMMA, beta=BETA, group_size=2, momentum=0.75)
    expected, mean, variance = oracle(x, GAMMA, BETA, 2)

    def loss(x, gamma, beta):
        return np.sum(weight * oracle(x, gamma, beta, 2)[0])

    actual, by_x, by_gamma, by_beta = train(layer, x, weight)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.25 * mean, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.75 + 0.25 * variance, atol=1e-5)
    numeric = numeric_gradient(lambda value: loss(value, GAMMA, BETA), x.astype(np.float64))
    np.testing.assert_allclose(by_x, numeric, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(by_gamma, numeric_gradient(lambda value: loss(x, value, BETA), GAMMA), rtol=1e-4)
    np.testing.assert_allclose(by_beta, numeric_gradient(lambda value: loss(x, GAMMA, value), BETA), rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "compiling"),
    [
        ("float32", False),
        ("float32", True),
        ("mixed_float16", False),
        ("mixed_float16", True),
        ("mixed_bfloat16", True),
    ],
)
def test_many_groups_equal_few(dtype, compiling):
    x, weight = normal(40, 5, 5, 3).astype(keras.DTypePolicy(dtype).compute_dtype), normal(40, 5, 5, 3, seed=1)
    many = layer_for(x, gamma=GAMMA, beta=BETA, group_size=2, momentum=0.5, dtype=dtype)
    many.compiling = lambda: compiling
    many.moving_mean.assign(0.5 * BETA)
    y, by_x, *_ = train(many, x, weight)
    few = [layer_for(x, gamma=GAMMA, beta=BETA, group_size=2, momentum=0.5, dtype=dtype) for _ in range(5)]
    parts = [train(layer, x[at : at + 8], weight[at : at + 8]) for layer, at in zip(few, range(0, 40, 8), strict=True)]
    assert y.dtype == parts[0][0].dtype
    tolerance = {"float32": 1e-5, "mixed_float16": 1e-2, "mixed_bfloat16": 6e-2}[dtype]
    np.testing.assert_allclose(np.float32(y), np.float32(np.concatenate([p[0] for p in parts])), atol=tolerance)
    np.testing.assert_allclose(np.float32(by_x), np.float32(np.concatenate([p[1] for p in parts])), atol=tolerance)
    moved = np.mean([layer.moving_variance.numpy() for layer in few], 0)
    np.testing.assert_allclose(many.moving_variance.numpy(), moved, rtol=1e-5)


def test_moving_statistics_take_one_plain_step_a_call():
    x = normal(3, 1, 1, 3)  # three values a channel: a correction for the sample size would show
    layer = layer_for(x, momentum=0.9)
    mean, variance = np.zeros(3), np.ones(3)
    for call in range(3):
        layer(x + call, training=True)
        mean = 0.9 * mean + 0.1 * (x + call).mean((0, 1, 2))
        variance = 0.9 * variance + 0.1 * x.var((0, 1, 2))
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-5)


def test_a_single_value_a_channel_has_no_variance():
    layer = layer_for(normal(1, 3), beta=BETA, momentum=0.5)
    np.testing.assert_allclose(layer(normal(1, 3), training=True), BETA[np.newaxis], atol=1e-6)
    np.testing.assert_array_equal(layer.moving_variance.numpy(), [0.5, 0.5, 0.5])


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_groups_in_one_call_equal_separate_calls(dtype):
    x, weight = normal(16, 5, 5, 3).astype(keras.DTypePolicy(dtype).compute_dtype), normal(16, 5, 5, 3, seed=1)
    together = layer_for(x, gamma=GAMMA, beta=BETA, group_size=4, momentum=0.5, dtype=dtype)
    y, *gradients = train(together, x, weight)
    parts, means, variances = [], [], []
    for start in range(0, 16, 4):
        alone = layer_for(x, gamma=GAMMA, beta=BETA, group_size=4, momentum=0.5, dtype=dtype)
        parts.append(train(alone, x[start : start + 4], weight[start : start + 4]))
        means.append(alone.moving_mean.numpy())
        variances.append(alone.moving_variance.numpy())
    ys, by_x, by_gamma, by_beta = zip(*parts, strict=True)
    np.testing.assert_array_equal(y, np.concatenate(ys))
    np.testing.assert_array_equal(gradients[0], np.concatenate(by_x))
    np.testing.assert_allclose(gradients[1], np.sum(by_gamma, 0), rtol=1e-5)
    np.testing.assert_allclose(gradients[2], np.sum(by_beta, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together.moving_mean.numpy(), np.mean(means, 0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(together.moving_variance.numpy(), np.mean(variances, 0), rtol=1e-6)


@pytest.mark.parametrize("batch_size", [48, 16])
def test_batch_that_is_no_multiple_of_the_group_says_both_numbers(batch_size):
    layer = layer_for(normal(1, 3), group_size=32)
    message = rf"norm: a batch of {batch_size} examples .* group_size=32\. Make the batch .* such as 16, or to None"
    with pytest.raises(ValueError, match=message):
        layer(normal(batch_size, 3), training=True)
    layer(normal(batch_size, 3), training=False)  # evaluation has no groups


def test_a_batch_of_unknown_size_is_one_group():
    inputs = keras.Input((2, 2, 3))
    model = keras.Model(inputs, BatchNormalization(group_size=4, epsilon=EPSILON)(inputs))
    x = normal(6, 2, 2, 3)
    unknown = tf.function(
        lambda x: model(x, training=True), input_signature=[tf.TensorSpec([None, 2, 2, 3], tf.float32)]
    )
    np.testing.assert_allclose(unknown(x), oracle(x, 1.0, 0.0, 6)[0], atol=1e-5)
    with pytest.raises(ValueError, match="a batch of 6 examples"):
        model(x, training=True)


@pytest.mark.parametrize("frozen", [False, True])
def test_outside_training_the_moving_statistics_normalise(frozen):
    x = normal(8, 4, 4, 3)
    layer = layer_for(x, gamma=GAMMA, beta=BETA, group_size=4)
    layer.moving_mean.assign([1.0, 2.0, 3.0])
    layer.moving_variance.assign([4.0, 1.0, 0.25])
    layer.trainable = not frozen
    expected = (x - [1.0, 2.0, 3.0]) / np.sqrt(np.array([4.0, 1.0, 0.25]) + EPSILON) * GAMMA + BETA
    np.testing.assert_allclose(layer(x, training=frozen), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(layer.moving_mean.numpy(), [1.0, 2.0, 3.0])


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_statistics_and_weights_are_float32_under_16_bit_policies(dtype):
    compute_dtype = keras.DTypePolicy(dtype).compute_dtype
    x = normal(8, 4, 4, 3, mean=300.0).astype(compute_dtype)  # the square of 300 overflows float16
    layer = layer_for(x, dtype=dtype, momentum=0.0)
    y = layer(x, training=True)
    expected, mean, variance = oracle(np.asarray(x, np.float32), 1.0, 0.0, 8)
    assert y.dtype == compute_dtype
    assert layer(x, training=False).dtype == compute_dtype
    np.testing.assert_allclose(tf.cast(y, tf.float32), expected, atol=0.02)
    assert {weight.name: weight.dtype for weight in layer.weights} == dict.fromkeys(
        ["gamma", "beta", "moving_mean", "moving_variance"], "float32"
    )
    assert [weight.name for weight in layer.trainable_weights] == ["gamma", "beta"]
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-4)


@pytest.mark.parametrize("group_size", [None, 2])
def test_compiled_by_xla_equals_numpy(group_size):
    x, weight = normal(8, 4, 4, 3), normal(8, 4, 4, 3, seed=1)
    plain = layer_for(x, gamma=GAMMA, beta=BETA, group_size=group_size)
    compiled = layer_for(x, gamma=GAMMA, beta=BETA, group_size=group_size)
    expected = train(plain, x, weight)
    actual = tf.function(lambda x: train(compiled, x, weight), jit_compile=True)(x)
    np.testing.assert_allclose(actual[0], oracle(x, GAMMA, BETA, group_size or 8)[0], atol=1e-5)
    for ours, reference in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(compiled.moving_mean.numpy(), plain.moving_mean.numpy(), atol=1e-6)
    np.testing.assert_allclose(compiled.moving_variance.numpy(), plain.moving_variance.numpy(), rtol=1e-5)


def pooled_oracle(x, gamma, beta, group_size):
    """Highest of each 3x3 with stride 2 of what is normalised and not negative, float64; even sizes."""
    y = np.maximum(oracle(x, gamma, beta, group_size)[0], 0)
    y = np.pad(y, [(0, 0), (0, 1), (0, 1), (0, 0)], constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(y, (3, 3), (1, 2))
    return windows[:, ::2, ::2].max((-2, -1))


POOLED = [("float32", True, 1e-6), ("mixed_float16", False, 2e-3), ("mixed_float16", True, 2e-3)]


@pytest.mark.parametrize(
    ("dtype", "compiling", "tolerance", "group_size"),
    repeated_but(
        [(*POOLED[0], 2), (*POOLED[1], 2), (*POOLED[2], None)], [(*one, size) for one in POOLED for size in (None, 2)]
    ),
)
def test_pooled_equals_numpy_and_finite_differences(dtype, compiling, tolerance, group_size):
    compute_dtype = keras.DTypePolicy(dtype).compute_dtype
    x, weight = normal(4, 6, 8, 3).astype(compute_dtype), normal(4, 3, 4, 3, seed=1)
    layer = PooledBatchNormalization(epsilon=EPSILON, group_size=group_size, momentum=0.75, dtype=dtype)
    layer.build((None, *x.shape[1:]))
    layer.gamma.assign(GAMMA)
    layer.beta.assign(BETA)
    layer.compiling = lambda: compiling
    actual = tf.function(lambda x: train(layer, x, weight), jit_compile=compiling)(x)
    exact = x.astype(np.float64)

    def loss(x, gamma, beta):
        return np.sum(weight * pooled_oracle(x, gamma, beta, group_size or 4))

    _, mean, variance = oracle(exact, GAMMA, BETA, group_size or 4)
    expected = (
        pooled_oracle(exact, GAMMA, BETA, group_size or 4),
        numeric_gradient(lambda value: loss(value, GAMMA, BETA), exact),
        numeric_gradient(lambda value: loss(exact, value, BETA), GAMMA),
        numeric_gradient(lambda value: loss(exact, GAMMA, value), BETA),
    )
    for ours, wanted in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.float64(ours) - wanted) < tolerance * np.linalg.norm(wanted)
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.25 * mean, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.75 + 0.25 * variance, rtol=1e-5)


def test_pooled_without_training_and_in_many_groups_is_normalisation_then_relu_then_pooling():
    x = normal(12, 5, 7, 3)
    pool = keras.layers.MaxPooling2D(3, strides=2, padding="same")
    for training, group_size in ((False, None), (True, 2), (True, 4)):
        layers = [
            kind(epsilon=EPSILON, group_size=group_size, dtype="float32")
            for kind in (BatchNormalization, PooledBatchNormalization)
        ]
        plain, pooled = (layer(x, training=training) for layer in layers)
        np.testing.assert_array_equal(pooled, pool(tf.nn.relu(plain)))
        assert layers[1].compute_output_shape((None, 5, 7, 3)) == (None, 3, 4, 3)


def mirrored(num_replicas):
    if len(tf.config.list_logical_devices("CPU")) < num_replicas:
        pytest.skip("needs logical CPU devices, configured before TensorFlow starts")
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(num_replicas)])


def run_replicas(strategy, function, *wholes):
    """The results of `function(replica's part of each whole)` as [replica][result]."""
    num_replicas = strategy.num_replicas_in_sync

    def replica():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return function(*(tf.gather(np.stack(np.split(whole, num_replicas)), index) for whole in wholes))

    results = tf.function(lambda: strategy.run(replica))()
    local = [strategy.experimental_local_results(result) for result in results]
    return [[result[index].numpy() for result in local] for index in range(num_replicas)]


def test_each_replica_moves_its_own_statistics_inside_a_loop():
    strategy, x = mirrored(2), normal(8, 2, 2, 3)
    with strategy.scope():
        layer = layer_for(x, momentum=0.5)

    def microbatches(shard):
        parts = tf.reshape(shard, [2, 2, 2, 2, 3])
        tf.while_loop(
            lambda part, total: part < 2,
            lambda part, total: (part + 1, total + tf.reduce_sum(layer(parts[part], training=True))),
            [0, 0.0],
        )
        return (tf.identity(layer.moving_mean.value),)

    for shard, (moving,) in zip(np.split(x, 2), run_replicas(strategy, microbatches, x), strict=True):
        expected = 0.25 * shard[:2].mean((0, 1, 2)) + 0.5 * shard[2:].mean((0, 1, 2))
        np.testing.assert_allclose(moving, expected, atol=1e-6)


@pytest.mark.parametrize("mean", [1.0, 1000.0])
def test_synchronized_replicas_equal_one_replica_with_the_whole_batch(mean):
    strategy, x, weight = mirrored(2), normal(8, 4, 4, 3, mean=mean), normal(8, 4, 4, 3, seed=1)
    with strategy.scope():
        layer = layer_for(x, gamma=GAMMA, beta=BETA, synchronized=True, momentum=0.5)
        layer.moving_mean.assign([mean] * 3)
    whole = layer_for(x, gamma=GAMMA, beta=BETA, momentum=0.5)
    whole.moving_mean.assign([mean] * 3)
    y, by_x, by_gamma, by_beta = train(whole, x, weight)

    def step(shard, weight):
        results = train(layer, shard, weight)
        return *results, tf.identity(layer.moving_mean.value), tf.identity(layer.moving_variance.value)

    first, second = run_replicas(strategy, step, x, weight)
    np.testing.assert_allclose(np.concatenate([first[0], second[0]]), oracle(x, GAMMA, BETA, 8)[0], atol=1e-5)
    np.testing.assert_allclose(np.concatenate([first[0], second[0]]), y, atol=1e-5 * mean)
    np.testing.assert_allclose(np.concatenate([first[1], second[1]]), by_x, atol=1e-5 * mean)
    np.testing.assert_allclose(first[2] + second[2], by_gamma, rtol=1e-4 if mean == 1.0 else 1e-2)
    np.testing.assert_allclose(first[3] + second[3], by_beta, rtol=1e-4)
    for replica in (first, second):
        np.testing.assert_allclose(replica[4], whole.moving_mean.numpy(), rtol=1e-6)
        np.testing.assert_allclose(replica[5], whole.moving_variance.numpy(), rtol=1e-5)
    np.testing.assert_array_equal(first[4], second[4])


def test_synchronized_statistics_cost_one_collective_each_way(monkeypatch):
    strategy, x = mirrored(2), normal(4, 2, 2, 3)
    with strategy.scope():
        layer = layer_for(x, synchronized=True)
    sizes = []
    all_reduce = tf.distribute.ReplicaContext.all_reduce
    monkeypatch.setattr(
        tf.distribute.ReplicaContext,
        "all_reduce",
        lambda context, op, value, *rest: sizes.append(value) or all_reduce(context, op, value, *rest),
    )
    run_replicas(strategy, lambda shard: train(layer, shard, 1.0), x)
    flat = [tensor for value in sizes for tensor in tf.nest.flatten(value)]
    assert len(sizes) == len(flat) == 2 * strategy.num_replicas_in_sync  # forward and backward on each replica
    assert {(tensor.shape, tensor.dtype) for tensor in flat} == {((7,), tf.float32)}


def test_synchronized_on_one_replica_is_local():
    x = normal(8, 4, 4, 3)
    layer = layer_for(x, synchronized=True)
    np.testing.assert_array_equal(layer(x, training=True), layer_for(x)(x, training=True))
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():  # no replica context in here
        layer = layer_for(x, synchronized=True)
        np.testing.assert_array_equal(layer(x, training=True), layer_for(x)(x, training=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"synchronized": True, "group_size": 32}, "synchronized or in groups of group_size=32"),
        ({"group_size": 0}, "group_size must be at least 1, .* and is 0"),
        ({"momentum": 1.5}, "momentum must lie between 0 and 1, and is 1.5"),
        ({"epsilon": 0.0}, "epsilon must be greater than 0, and is 0.0"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BatchNormalization(**arguments)


def test_a_layer_comes_back_from_its_configuration():
    layer = BatchNormalization(momentum=0.8, epsilon=0.1, gamma_initializer="zeros", group_size=4, name="norm")
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert again.get_config() == layer.get_config()
    assert (again.momentum, again.epsilon, again.group_size, again.synchronized) == (0.8, 0.1, 4, False)

"""Attention, its masks, positions and normalisations against NumPy."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import transformer_oracle as oracle

from launcher.models.transformer import attention, layers, positions
from launcher.models.transformer.attention_form import Form


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keeps_axes", [False, True])
def test_attention_equals_numpy_for_shared_and_unshared_key_heads(kv_heads, masked, keeps_axes):
    query, key, value = normal(2, 5, 4, 6), normal(2, 7, kv_heads, 6, seed=1), normal(2, 7, kv_heads, 6, seed=2)
    allowed = np.random.default_rng(3).random((2, 5, 7)) < 0.5 if masked else np.ones((2, 5, 7), bool)
    actual = attention.attend(
        query, key, value, allowed=tf.constant(allowed) if masked else None, keeps_axes=keeps_axes
    )
    for row in range(2):
        for head in range(4):
            shared = head * kv_heads // 4
            expected = oracle.attention(query[row, :, head], key[row, :, shared], value[row, :, shared], allowed[row])
            np.testing.assert_allclose(actual[row, :, head], expected, atol=1e-6)


def test_a_query_that_may_look_nowhere_gets_zeros_and_finite_gradients():
    query, key, value = (tf.constant(normal(1, 3, 2, 4, seed=seed)) for seed in range(3))
    allowed = tf.constant([[[True, True, False], [False, False, False], [False, True, True]]])
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        outputs = attention.attend(query, key, value, allowed=allowed)
        total = tf.reduce_sum(outputs**2)
    np.testing.assert_array_equal(outputs[0, 1], np.zeros((2, 4)))
    assert np.abs(outputs[0, 0]).min() > 0
    by_query, by_key, by_value = tape.gradient(total, [query, key, value])
    np.testing.assert_array_equal(by_query[0, 1], np.zeros((2, 4)))
    assert all(np.isfinite(gradient).all() for gradient in (by_query, by_key, by_value))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_softmax_is_float32_under_16_bits(dtype, monkeypatch):
    seen = []
    softmax = tf.nn.softmax
    monkeypatch.setattr(tf.nn, "softmax", lambda scores: seen.append(scores.dtype) or softmax(scores))
    query, key, value = (tf.cast(normal(2, 5, 4, 6, seed=seed), dtype) for seed in range(3))
    assert attention.attend(query, key, value, allowed=positions.no_later(5)).dtype == dtype
    assert seen == [tf.float32]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_that_fit_16_bits_only_after_the_scale_are_finite(dtype):
    large = tf.fill([1, 1, 1, 8], tf.constant(120.0, dtype))  # 8 * 120 * 120 is past float16, times 8 ** -0.5 it is not
    np.testing.assert_array_equal(attention.attend(large, large, large).numpy().astype(np.float32), 120.0)


def test_tokens_see_their_own_segment_and_padding_sees_and_shows_nothing():
    query, key = np.array([[1, 1, 2, 3, 0]]), np.array([[1, 2, 2, 0, 0, 1]])
    expected = [[[q == k and k != 0 for k in key[0]] for q in query[0]]]
    np.testing.assert_array_equal(positions.same_segment(tf.constant(query), tf.constant(key)), expected)


def test_no_token_sees_a_later_one():
    np.testing.assert_array_equal(positions.no_later(5), oracle.causal(5)[None])


@pytest.mark.parametrize("width", [2, 6, 64])
def test_sinusoids_equal_the_papers_formula(width):
    places = np.array([[0, 1, 2, 500], [7, 3, 1023, 5]])
    actual = positions.sinusoids(tf.constant(places), width)
    assert actual.dtype == tf.float32
    for row in range(2):
        np.testing.assert_allclose(actual[row], oracle.sinusoids(places[row], width), atol=2e-4)
        near = places[row] < 10
        np.testing.assert_allclose(actual[row][near], oracle.sinusoids(places[row][near], width), atol=1e-6)


def test_rotation_equals_complex_numbers():
    vectors, places = normal(2, 4, 3, 8), np.array([[0, 1, 2, 3], [5, 0, 1, 9]])
    actual = positions.rotate(tf.constant(vectors), tf.constant(places))
    for row in range(2):
        for head in range(3):
            expected = oracle.rotate(vectors[row, :, head].astype(np.float64), places[row])
            np.testing.assert_allclose(actual[row, :, head], expected, atol=1e-5)


def test_rotated_products_depend_on_the_distance_only():
    query, key = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)

    def product(at_query, at_key):
        turned = [positions.rotate(each, tf.constant([[at]])) for each, at in ((query, at_query), (key, at_key))]
        return float(tf.reduce_sum(turned[0] * turned[1]))

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-4)
    assert abs(product(3, 1) - product(3, 2)) > 1e-2


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_normalisation_equals_numpy(kind):
    x, gamma, beta = normal(2, 3, 8, scale=3.0) + 1.0, normal(8, seed=1), normal(8, seed=2)
    layer = layers.NORMALIZATIONS[kind](name="norm")
    layer.build(x.shape)
    layer.gamma.assign(gamma)
    weights = {"norm/gamma": gamma, "norm/beta": beta if kind == "layer" else None}
    if kind == "layer":
        layer.beta.assign(beta)
    expected = oracle.normalize(x.astype(np.float64), weights, "norm")
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_normalisation_statistics_are_float32_under_16_bits(kind, policy):
    keras.config.set_dtype_policy(policy)
    layer = layers.NORMALIZATIONS[kind](name="norm")
    layer.build((None, 512))
    dtype = keras.DTypePolicy(policy).compute_dtype
    x = tf.cast(300.0 + normal(4, 512), dtype)  # 300 ** 2 overflows float16; its mean leaves no digits in bfloat16
    outputs = layer(x)
    assert outputs.dtype == dtype
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    values = tf.cast(x, tf.float32).numpy().astype(np.float64)
    beta = np.zeros(512) if kind == "layer" else None
    expected = oracle.normalize(values, {"norm/gamma": np.ones(512), "norm/beta": beta}, "norm")
    np.testing.assert_allclose(tf.cast(outputs, tf.float32), expected, atol=0.02)


def test_a_mean_of_many_standard_deviations_leaves_bfloat16_its_variance():
    """Of E[x^2] - E[x]^2 in float32 nothing would be left, or less than nothing, before bfloat16 has none."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    layer = layers.LayerNormalization(name="norm")
    layer.build((None, 1024))
    x = tf.cast(np.stack([mean + normal(1024, scale=0.5) for mean in (0.0, 100.0, -1000.0)]), tf.bfloat16)
    values = tf.cast(x, tf.float64).numpy()
    weights = {"norm/gamma": np.ones(1024), "norm/beta": np.zeros(1024)}
    np.testing.assert_allclose(tf.cast(layer(x), tf.float64), oracle.normalize(values, weights, "norm"), atol=0.05)
    equal = tf.fill([1, 1024], tf.constant(4096.0 + 32.0, tf.bfloat16))
    assert np.isfinite(tf.cast(layer(equal), tf.float32)).all()


@pytest.mark.parametrize("accelerator", ["cpu", "gpu", "tpu"])
def test_for_a_tpu_alone_an_attention_layer_moves_no_axes(accelerator):
    layer = attention.Attention(width=8, heads=2, name="attention")
    layer.form = Form(accelerator=accelerator, compiling=lambda: True)
    layer.build()
    seen = positions.Visibility(query_segments=tf.ones([2, 3], tf.int32), key_segments=tf.ones([2, 3], tf.int32))
    traced = tf.function(lambda x: layer(x, x, visible=seen), autograph=False).get_concrete_function(
        tf.zeros([2, 3, 8])
    )
    operations = {operation.type for operation in traced.graph.get_operations()}
    assert ("Einsum" in operations) == (accelerator == "tpu")
    assert bool(operations & {"Transpose", "MatMul", "BatchMatMulV2"}) == (accelerator != "tpu")


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_projection_that_keeps_the_axes_computes_the_same(policy):
    keras.config.set_dtype_policy(policy)
    keeps = []
    layer = layers.projection(6, name="query", keeps_axes=lambda: bool(keeps))
    layer.build((None, None, 8))

    def both():
        x = tf.constant(normal(2, 5, 8))
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x)
            total = tf.reduce_sum(tf.cast(outputs, tf.float32) ** 2)
        return outputs, *tape.gradient(total, [x, layer.kernel.value])

    folded = both()
    keeps.append(True)
    for one, other in zip(folded, both(), strict=True):
        assert one.dtype == other.dtype
        rounding = 1e-5 if policy == "float32" else 0.05
        np.testing.assert_allclose(tf.cast(one, tf.float32), tf.cast(other, tf.float32), atol=rounding, rtol=rounding)


def test_dropout_with_a_seed_is_a_function_of_the_seed():
    layer = layers.Dropout(0.5, name="dropout")
    assert layer.draw(training=False) is None
    ones = tf.ones([64])
    seeds = layer.draw(training=True), layer.draw(training=True)
    first, again, other = (layer.with_seed(seed)(ones).numpy() for seed in (seeds[0], seeds[0], seeds[1]))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(first) == {0.0, 2.0}
    np.testing.assert_array_equal(layer.with_seed(None)(ones), ones)


@pytest.mark.parametrize(("kind", "products"), [("joined", 2), ("watched", 3), ("overridden", 3)])
def test_a_gated_network_multiplies_by_both_matrices_at_once_and_has_the_same_gradients(kind, products):
    network = layers.FeedForward(width=6, hidden=10, activation="swiglu", name="network")
    if kind == "overridden":
        network.up.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    network.build((None, None, 6))
    inputs, upstream = tf.constant(normal(2, 5, 6)), tf.constant(normal(2, 5, 6, seed=1))

    def found():
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = network(inputs)
        of = [inputs, *(weight.value for weight in network.trainable_weights)]
        return outputs, *tape.gradient(outputs, of, upstream)

    plain = tf.function(found, jit_compile=True)()
    network.joined = lambda: True
    if kind == "watched":
        network.gate.call = network.gate.call
    joined = tf.function(found, jit_compile=True)
    for ours, wanted in zip(joined(), plain, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)
    operations = [one.type for one in joined.get_concrete_function().graph.get_operations()]
    assert operations.count("MatMul") == 3 * products, "forward, for the inputs, for the matrices"


def test_attention_to_itself_on_a_gpu_multiplies_by_three_matrices_at_once_and_is_the_same():
    segments = tf.constant([[1, 1, 1, 2, 2, 0]])
    visible = positions.Visibility(query_segments=segments, key_segments=segments, causal=True)
    inputs, places = tf.constant(normal(1, 6, 8)), tf.constant([[0, 1, 2, 0, 1, 0]])
    layer = attention.Attention(width=8, heads=4, kv_heads=2, rotary=True, smeared_keys=True, name="attention")
    layer.build()

    def found(accelerator):
        layer.form = Form(accelerator=accelerator, compiling=lambda: True)
        function = tf.function(lambda: graded(), jit_compile=True)
        operations = [one.type for one in function.get_concrete_function().graph.get_operations()]
        return operations.count("MatMul"), function()

    def graded():
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, inputs, visible=visible, positions=places)
        return outputs, *tape.gradient(outputs, [inputs, *(weight.value for weight in layer.trainable_weights)])

    (apart, wanted), (joined, ours) = found("cpu"), found("gpu")
    assert (apart, joined) == (3 * 4, 3 * 2), "forward, for the inputs, for the matrices: of q, k, v and of the output"
    for one, other in zip(ours, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

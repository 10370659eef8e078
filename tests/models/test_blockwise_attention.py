"""Attention in blocks against NumPy in float64, and against attention of all positions at once."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.models.transformer import language_model, transformer
from launcher.models.transformer.attention import Attention, attend
from launcher.models.transformer.attention_form import Form
from launcher.models.transformer.blockwise_attention import Blocks, attend_in_blocks
from launcher.models.transformer.positions import Visibility
from launcher.step.layers import walk

pytestmark = pytest.mark.slow

# Of the largest value, or of 1, as inputs are. Those of 16 bits are some roundings of what goes into a product.
TOLERANCES = {"float64": 1e-13, "float32": 3e-6, "float16": 3e-3, "bfloat16": 2e-2}


def normal(*shape, seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).normal(size=shape)


def packed(batch, length, seed):
    """Segments of rows that hold several texts and padding; the last row is all padding."""
    segments = -np.sort(-np.random.default_rng(seed).integers(0, 4, (batch, length)), axis=1)
    segments[-1] = 0
    return segments.astype(np.int32)


def expected(query, key, value, upstream, allowed, factors=1.0):
    """Outputs and gradients, float64; `factors` [batch, heads, queries, keys] multiply the attention weights."""
    shared, scale = query.shape[2] // key.shape[2], query.shape[3] ** -0.5
    keys, values = (np.repeat(each, shared, axis=2) for each in (key, value))
    scores = np.where(allowed[:, None], np.einsum("bqhd,bkhd->bhqk", query, keys) * scale, -np.inf)
    highest = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    weights = powers / np.maximum(powers.sum(-1, keepdims=True), np.finfo(float).tiny)
    by_weight = np.einsum("bqhd,bkhd->bhqk", upstream, values) * factors
    by_score = weights * (by_weight - (by_weight * weights).sum(-1, keepdims=True)) * scale

    def of_groups(gradient):
        return gradient.reshape(*key.shape[:3], shared, -1).sum(3)

    return (
        np.einsum("bhqk,bkhd->bqhd", weights * factors, values),
        np.einsum("bhqk,bkhd->bqhd", by_score, keys),
        of_groups(np.einsum("bhqk,bqhd->bkhd", by_score, query)),
        of_groups(np.einsum("bhqk,bqhd->bkhd", weights * factors, upstream)),
    )


def computed(blocks, segments, arrays, dtype="float64", jit_compile=None, **dropout):
    """Outputs and gradients in float64, eagerly or (jit_compile True or False) in a graph; no gradients of nothing."""
    query, key, value, upstream = (each if each is None else tf.cast(each, dtype) for each in arrays)
    visible = dict(zip(("query_segments", "key_segments"), map(tf.constant, segments), strict=True))

    def both(query, key, value, upstream):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            seen = Visibility(**visible, causal=blocks.causal)
            outputs = attend_in_blocks(query, key, value, seen, blocks, compiling=bool(jit_compile), **dropout)
        return outputs, *(() if upstream is None else tape.gradient(outputs, [query, key, value], upstream))

    function = both if jit_compile is None else tf.function(both, jit_compile=jit_compile)
    return [tf.cast(each, tf.float64).numpy() for each in function(query, key, value, upstream)]


def rounded(arrays, dtype):
    return [tf.cast(tf.cast(each, dtype), tf.float64).numpy() for each in arrays]


def assert_near(actual, wanted, share, least=1.0):
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=share * max(np.abs(other).max(), least))


def allowed_by(segments, causal):
    query, key = segments
    allowed = (query[:, :, None] == key[:, None, :]) & (key[:, None, :] != 0)
    return allowed & np.tril(np.ones(allowed.shape[1:], bool)) if causal else allowed


@st.composite
def cases(draw):
    batch, queries, groups, shared = (draw(st.integers(1, most)) for most in (4, 21, 2, 3))
    causal = draw(st.booleans())
    keys = queries if causal else draw(st.integers(1, 21))
    blocks = Blocks(
        batch=batch,
        queries=queries,
        keys=keys,
        rows=draw(st.sampled_from([rows for rows in range(1, batch + 1) if batch % rows == 0])),
        query_block=-(-queries // draw(st.integers(1, min(queries, 4)))),
        key_block=-(-keys // draw(st.integers(1, min(keys, 4)))),
        causal=causal,
    )
    return blocks, groups, shared, draw(st.sampled_from(sorted(TOLERANCES))), draw(st.integers(0, 99))


@settings(max_examples=12)
@given(case=cases())
def test_outputs_and_gradients_equal_numpy(case):
    blocks, groups, shared, dtype, seed = case
    of_query = (blocks.batch, blocks.queries, groups * shared, 4)
    of_key = (blocks.batch, blocks.keys, groups, 4)
    arrays = rounded([normal(*shape, seed=seed) for shape in (of_query, of_key, of_key, of_query)], dtype)
    segments = packed(*of_query[:2], seed), packed(*of_key[:2], seed if blocks.causal else seed + 1)
    wanted = expected(*arrays, allowed_by(segments, blocks.causal))
    # Where a query sees few keys, products of that size cancel in the gradients of scores.
    assert_near(computed(blocks, segments, arrays, dtype), wanted, TOLERANCES[dtype], least=8.0)


LONG = Blocks(batch=4, queries=100, keys=100, rows=2, query_block=32, key_block=48, causal=True)


def long_case():
    segments = packed(4, 100, 0)
    shapes = [(4, 100, heads, 16) for heads in (6, 2, 2, 6)]  # a width whose scale, 1 / 4, rounds nothing
    return (segments, segments), [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


# XLA in 32 bits and in bfloat16; in float16 it is below.
@pytest.mark.parametrize(
    ("jit_compile", "dtype"),
    repeated_but(
        [(True, "bfloat16")],  # a graph: test_a_model_has_the_same_loss_and_gradients_in_both_forms
        itertools.product([False, True], TOLERANCES),
    ),
)
def test_a_graph_and_xla_compute_the_same(jit_compile, dtype):
    segments, arrays = long_case()
    arrays = rounded(arrays, dtype)
    wanted = expected(*arrays, allowed_by(segments, True))
    assert_near(computed(LONG, segments, arrays, dtype, jit_compile), wanted, TOLERANCES[dtype])


# As a GPU's plain attention has them, scores are rounded, and the gradient is made of weights that are.
@pytest.mark.parametrize(
    ("form", "scale"), [("blocks", 30), ("rounded", 1), pytest.param("plain", 30, marks=pytest.mark.nightly)]
)
def test_under_xla_16_bits_are_rounded_no_more_than_need_be(form, scale):
    segments, (query, key, value, upstream) = long_case()
    arrays = rounded([scale * query, key, value, upstream], "float16")
    seen = Visibility(query_segments=tf.constant(segments[0]), key_segments=tf.constant(segments[0]), causal=True)

    @tf.function(jit_compile=True)
    def both(query, key, value, upstream):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            if form != "blocks":
                kind = {"unrounded" if form == "plain" else form: True}
                outputs = attend(query, key, value, allowed=seen.allowed(), **kind)
            else:
                outputs = attend_in_blocks(query, key, value, seen, LONG, compiling=True)
        return outputs, *tape.gradient(outputs, [query, key, value], upstream)

    actual = [tf.cast(each, tf.float64).numpy() for each in both(*(tf.cast(each, tf.float16) for each in arrays))]
    # Large scores, rounded to 16 bits, are wrong by 1e-2 here.
    assert_near(actual, expected(*arrays, allowed_by(segments, True)), 2e-3)


def test_what_is_not_a_number_stays_so():
    segments, arrays = long_case()
    arrays[0][0, 5] = np.nan
    outputs = computed(LONG, segments, [*arrays[:3], None])[0]
    assert np.isnan(outputs[0, 5]).all()
    assert np.isfinite(outputs[1]).all()


def test_blocks_above_the_diagonal_are_not_computed():
    whole = Blocks(batch=2, queries=64, keys=64, rows=1, query_block=16, key_block=16)
    assert len(whole.turns()) == 2 * 16
    assert len(dataclasses.replace(whole, causal=True).turns()) == 2 * 10


# --------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    ("causal", "jit_compile"),
    repeated_but([(False, None), (True, None), (False, True)], itertools.product([False, True], [None, True])),
)
def test_dropout_drops_its_share_and_the_same_weights_in_the_backward_pass(causal, jit_compile):
    batch, heads, length, rate = 2, 3, 32, 0.3
    blocks = Blocks(batch=batch, queries=length, keys=length, rows=1, query_block=16, key_block=16, causal=causal)
    segments = (np.ones((batch, length), np.int32),) * 2
    query, upstream = (normal(batch, length, heads, length, seed=seed) for seed in (0, 1))
    key, value = (normal(batch, length, heads, length, seed=seed) for seed in (2, 3))
    dropout = {"rate": rate, "seed": tf.constant([3, 4]), "jit_compile": jit_compile}
    # The values of a key are 1 at its own place: the outputs are the weights, dropped and scaled.
    ones = np.broadcast_to(np.eye(length)[None, :, None], value.shape)
    weights = [
        computed(blocks, segments, (query, key, ones, None), **kept)[0].transpose(0, 2, 1, 3)
        for kept in (dropout, {"jit_compile": jit_compile})
    ]
    allowed = allowed_by(segments, causal)
    factors = np.where(weights[1] > 0, weights[0] / np.where(weights[1] > 0, weights[1], 1.0), 0.0)
    np.testing.assert_allclose(np.minimum(np.abs(factors), np.abs(factors - 1 / (1 - rate))), 0.0, atol=1e-12)
    seen = np.broadcast_to(allowed[:, None], factors.shape)
    assert np.mean(factors[seen] > 0) == pytest.approx(1 - rate, abs=0.03)
    kept = factors > 0
    if not causal:
        halves = (kept[0], kept[1]), (kept[:, 0], kept[:, 1]), (kept[..., :16, :16], kept[..., 16:, 16:])
        assert all((one != other).any() for one, other in halves), "the same draws in two rows, heads or blocks"
    arrays = (query, key, value, upstream)
    assert_near(computed(blocks, segments, arrays, **dropout), expected(*arrays, allowed, factors), 1e-12)


def test_dropout_is_a_function_of_the_seed():
    segments, arrays = long_case()
    first, again, other = (
        computed(LONG, segments, [*arrays[:3], None], rate=0.5, seed=tf.constant(seed))[0]
        for seed in ([1, 2], [1, 2], [1, 3])
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


# --------------------------------------------------------------------------------------------------------- in models


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small(Form):
    """Blocks of a few positions whatever the shapes."""

    def blocks(self, *, batch, queries, keys, heads, causal=False):
        sizes = {"batch": batch, "queries": queries, "keys": keys}
        return Blocks(**sizes, rows=1, query_block=min(4, queries), key_block=min(3, keys), causal=causal)


TINY = {"vocab_size": 16, "layers": 1, "width": 8, "heads": 2, "hidden": 16, "max_length": 16}
MODELS = {
    "language_model": functools.partial(language_model, **TINY, kv_heads=1, smeared_keys=True),
    "transformer": functools.partial(transformer, **TINY, dropout=0.0),
}


def tokens(length, seed):
    made = np.random.default_rng(seed).integers(1, 16, (4, length)).astype(np.int32)
    return tf.constant(np.where(np.arange(length) < np.array([[length], [5], [1], [0]]), made, 0))


@pytest.mark.parametrize(
    ("kind", "rematerialize"),
    repeated_but([("language_model", True)], itertools.product(MODELS, [False, True])),
)
def test_a_model_has_the_same_loss_and_gradients_in_both_forms(kind, rematerialize):
    keras.utils.set_random_seed(0)
    model = MODELS[kind](rematerialize=rematerialize)
    batch = {"tokens": tokens(11, 0), "source": tokens(7, 1), "target_in": tokens(11, 2)}
    weights = [weight.value for weight in model.trainable_weights]
    layers = [layer for layer, *_ in walk(model) if isinstance(layer, Attention)]
    found = []
    for form in (Form(), Small()):
        for layer in layers:
            layer.form = form

        @tf.function
        def gradients():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.log_softmax(model(batch, training=True))[..., 3])
            return loss, [tf.convert_to_tensor(each) for each in tape.gradient(loss, weights)]

        found.append(gradients())
    (loss, expected), (other, actual) = found
    np.testing.assert_allclose(other, loss, rtol=1e-5)
    for one, wanted, weight in zip(actual, expected, model.trainable_weights, strict=True):
        np.testing.assert_allclose(one, wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=weight.path)


# ------------------------------------------------------------------------------------------------------- the choice


def test_auto_goes_by_the_shapes_and_the_device():
    def chosen(accelerator, length, batch=4, **more):
        form = Form(requested="auto", accelerator=accelerator)
        return form.blocks(**{"batch": batch, "queries": length, "keys": length, "heads": 6} | more)

    assert chosen("cpu", 512) is None
    assert chosen("cpu", 2048).query_block == 512
    assert chosen("tpu", 256) is None
    assert (chosen("tpu", 512).query_block, chosen("tpu", 512).rows) == (512, 4)
    assert (chosen("tpu", 8192).query_block, chosen("tpu", 8192).rows) == (1024, 1)
    assert chosen("tpu", 8192, heads=12).query_block == 512, "more would leave the vector memory"
    assert chosen("tpu", 1100).query_block == 640, "padded to 1,280 and not to 2,048"
    assert chosen("tpu", None) is None
    assert chosen("tpu", 8192, batch=None) is None
    assert chosen("gpu", 8192) is not None


def test_a_layer_that_nobody_told_is_plain():
    assert Form().blocks(batch=1, queries=8192, keys=8192, heads=1) is None

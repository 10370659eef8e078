"""The decoder-only transformer: NumPy, packing, decoding, policies, notes on sizes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import transformer_oracle as oracle
from cases import repeated_but

from launcher.models.transformer import language_model

pytestmark = pytest.mark.slow

TINY = {"vocab_size": 19, "layers": 2, "width": 16, "heads": 4, "hidden": 24, "max_length": 12}
KINDS = {
    "llama": {},
    "grouped": {"kv_heads": 2, "tie_embeddings": False},
    "one_kv_head": {"kv_heads": 1},
    "smeared": {"kv_heads": 2, "smeared_keys": True},
    "gpt2": {"norm": "layer", "activation": "gelu", "positions": "learned"},
    "sinusoidal": {"activation": "relu", "positions": "sinusoidal"},
}


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(4, 19, shape).astype(np.int32)


def build(kind="llama", **changes):
    """A tiny model whose weights all matter: biases and normalisations start as zeros and ones."""
    model = language_model(**TINY | KINDS[kind] | changes)
    generator = np.random.default_rng(5)
    for weight in model.weights:
        if len(weight.shape) == 1:
            weight.assign(weight.numpy() + 0.3 * generator.normal(size=weight.shape))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_forward_pass_equals_numpy(kind):
    model, rows = build(kind), tokens(2, 7)
    logits = model({"tokens": tf.constant(rows)})
    assert logits.dtype == tf.float32
    arguments = {name: KINDS[kind][name] for name in ("kv_heads", "activation", "positions") if name in KINDS[kind]}
    for row in range(2):
        expected = oracle.language_model(oracle.Weights(model), rows[row], layers=2, heads=4, **arguments)
        np.testing.assert_allclose(logits[row], expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "smeared"])
def test_packed_texts_equal_texts_alone(kind):
    model = build(kind)
    texts = [tokens(length, seed=length) for length in (5, 1, 4)]
    filling = np.zeros(2, np.int32)
    batch = {
        "tokens": [*texts, filling],
        "segments": [np.full(len(text), number) for number, text in enumerate(texts, start=1)] + [filling],
        "positions": [np.arange(len(text)) for text in texts] + [filling],
    }
    logits = model({name: tf.constant(np.concatenate(parts)[None], tf.int32) for name, parts in batch.items()})[0]
    start = 0
    for text in texts:
        alone = model({"tokens": tf.constant(text[None])})[0]
        np.testing.assert_allclose(logits[start : start + len(text)], alone, atol=1e-5)
        start += len(text)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("kind", repeated_but(["llama", "one_kv_head", "smeared"], KINDS))
def test_cached_decoding_equals_the_forward_pass(kind):
    model, rows = build(kind), tf.constant(tokens(3, 6))
    expected = model({"tokens": rows})
    cache = model.start_decoding(None, 3, 9)
    assert {tensor.shape[0] for tensor in tf.nest.flatten(cache)} == {3}
    for index in range(6):
        logits, cache = model.decode_step(rows[:, index], tf.constant(index), cache)
        np.testing.assert_allclose(logits, expected[:, index], atol=1e-5)


@pytest.mark.nightly  # eagerly: above; in a graph: run/test_decoding_evaluator.py
@pytest.mark.parametrize("jit_compile", [False, True])
def test_cached_greedy_decoding_in_a_graph_loop_writes_what_uncached_does(jit_compile):
    model, steps = build("grouped"), 8
    first = tokens(3)

    @tf.function(jit_compile=jit_compile)
    def cached(first):
        def body(index, current, written, cache):
            logits, cache = model.decode_step(current, index, cache)
            chosen = tf.argmax(logits, -1, output_type=tf.int32)
            return index + 1, chosen, tf.where(tf.range(steps)[None] == index, chosen[:, None], written), cache

        state = (tf.constant(0), first, tf.zeros([3, steps], tf.int32), model.start_decoding(None, 3, steps))
        return tf.while_loop(lambda index, *_: index < steps, body, state)[2]

    begun = first[:, None]
    for _ in range(steps):
        logits = model({"tokens": tf.constant(begun), "segments": tf.ones(begun.shape, tf.int32)})
        begun = np.concatenate([begun, np.argmax(logits[:, -1], -1)[:, None].astype(np.int32)], 1)
    np.testing.assert_array_equal(cached(tf.constant(first)), begun[:, 1:])


def test_grouped_heads_make_the_cache_smaller():
    sizes = {}
    for kv_heads in (4, 1):
        cache = language_model(**TINY, kv_heads=kv_heads).start_decoding(None, 2, 10)
        sizes[kv_heads] = sum(tf.size(tensor).numpy() for tensor in tf.nest.flatten(cache))
    assert sizes[4] == 4 * sizes[1] == 2 * 2 * 2 * 10 * 16  # layers, keys and values, rows, length, width


def test_parameters_of_gpt2_and_llama_7b_are_the_published_ones():
    with keras.StatelessScope(initialize_variables=False):  # counts without memory for the weights
        gpt2 = language_model(
            vocab_size=50_257, layers=12, width=768, heads=12, max_length=1024,
            norm="layer", activation="gelu", positions="learned",
        )  # fmt: skip
        llama = language_model(
            vocab_size=32_000, layers=32, width=4096, heads=32, hidden=11_008, tie_embeddings=False, max_length=2048
        )
        llama2_70b = language_model(
            vocab_size=32_000, layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672, tie_embeddings=False
        )
    # GPT-2 has 124,439,808 with biases in its attention: 4 * 768 a block.
    assert gpt2.count_params() == 124_439_808 - 12 * 4 * 768
    assert llama.count_params() == 6_738_415_616
    assert llama2_70b.count_params() == 68_976_648_192


def test_default_width_of_swiglu_has_the_parameters_of_four_widths():
    model = language_model(**{**TINY, "width": 768, "heads": 12, "layers": 1, "hidden": None})
    assert model.get_layer("block1").feed_forward.up.kernel.shape == (768, 2048)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_logits_and_weights_are_float32_under_16_bits(policy, tie_embeddings):
    keras.config.set_dtype_policy(policy)
    model = language_model(**TINY, tie_embeddings=tie_embeddings)
    logits = model({"tokens": tf.constant(tokens(2, 5))})
    assert logits.dtype == tf.float32
    assert {weight.dtype for weight in model.weights} == {"float32"}
    logits, cache = model.decode_step(tf.constant(tokens(2)), tf.constant(0), model.start_decoding(None, 2, 4))
    assert logits.dtype == tf.float32
    assert {tensor.dtype.name for tensor in tf.nest.flatten(cache)} == {keras.DTypePolicy(policy).compute_dtype}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_heads": 3}, "kv_heads must divide heads = 4, and is 3"),
        ({"width": 12}, "the width of a head must be even for these positions, and is 3"),
        ({"positions": "alibi"}, "There is no positions 'alibi'. Known: rotary, learned, sinusoidal"),
        ({"hidden": 0}, "hidden must be at least 1, and is 0"),
        ({"max_length": 0}, "max_length must be at least 1, and is 0"),
        ({"heads": 0}, "heads must be at least 1, and is 0"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        language_model(**TINY | arguments)

"""The encoder-decoder: published sizes, NumPy, packing, decoding, policies."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import transformer_oracle as oracle
from cases import repeated_but

from launcher.models.transformer import transformer

pytestmark = pytest.mark.slow

TINY = {"vocab_size": 23, "layers": 2, "width": 16, "heads": 4, "hidden": 24, "max_length": 12}


def tokens(*shape, seed=0, vocab_size=23):
    return np.random.default_rng(seed).integers(4, vocab_size, shape).astype(np.int32)


def pairs(batch=3, source=6, target=5):
    """Pairs of different lengths, padded."""
    rows = {"source": tokens(batch, source), "target_in": tokens(batch, target, seed=1)}
    for row in range(1, batch):
        rows["source"][row, source - row :] = 0
        rows["target_in"][row, target - row :] = 0
    return rows


def tensors(rows):
    return {name: tf.constant(array) for name, array in rows.items()}


def shuffled(model, seed=0):
    """Weights that all matter: biases and normalisations start as zeros and ones."""
    generator = np.random.default_rng(seed)
    for weight in model.weights:
        if len(weight.shape) == 1:
            weight.assign(weight.numpy() + 0.3 * generator.normal(size=weight.shape))
    return model


def num_parameters(**arguments):
    with keras.StatelessScope(initialize_variables=False):  # counts without memory for the weights
        return transformer(**arguments).count_params()


def formula(vocab_size, layers, width, hidden):
    """Attention 4 d^2; feed-forward 2 d f + f + d; each sublayer's normalisation 2 d; one matrix of embeddings."""
    attention, feed_forward, norm = 4 * width**2, 2 * width * hidden + hidden + width, 2 * width
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    return vocab_size * width + layers * (encoder + decoder)


TABLE_3 = [
    ({}, 65),
    ({"layers": 2}, 36),
    ({"layers": 4}, 50),
    ({"layers": 8}, 80),
    ({"width": 256}, 28),
    ({"width": 1024}, 168),
    ({"hidden": 1024}, 53),
    ({"hidden": 4096}, 90),
]


@pytest.mark.parametrize(("changes", "published"), repeated_but(TABLE_3[1::4] + TABLE_3[6:7], TABLE_3))
def test_sizes_are_those_of_the_papers_table_3(changes, published):
    """In millions, Vaswani et al. 2017, table 3, base and rows (C).

    The paper says "about 37000" tokens. Its numbers agree among themselves, and with this network to half a million,
    for 41000 rows of embeddings (each further thousand is another half a million at width 512).
    """
    count = num_parameters(vocab_size=41_000, **changes)
    assert count == formula(41_000, **{"layers": 6, "width": 512, "hidden": 2048} | changes)
    assert abs(count / 1e6 - published) < 0.9


def test_sizes_for_the_papers_vocabulary():
    base = num_parameters(vocab_size=37_000)
    big = num_parameters(vocab_size=37_000, width=1024, heads=16, hidden=4096)
    assert base == formula(37_000, 6, 512, 2048) == 63_045_632  # published: 65 million
    assert big == formula(37_000, 6, 1024, 4096) == 214_171_648  # published: 213 million
    assert base / 65e6 == pytest.approx(1.0, abs=0.031)
    assert big / 213e6 == pytest.approx(1.0, abs=0.006)


@pytest.mark.parametrize(
    ("norm", "shared"),
    repeated_but(
        [("post", True), ("pre", False)], [(norm, shared) for norm in ("post", "pre") for shared in (True, False)]
    ),
)
def test_forward_pass_equals_numpy(norm, shared):
    model = shuffled(transformer(**TINY, norm=norm, share_embeddings=shared))
    rows = {"source": tokens(2, 6), "target_in": tokens(2, 5, seed=1)}
    logits = model(tensors(rows))
    assert logits.dtype == tf.float32
    weights = oracle.Weights(model)
    for row in range(2):
        expected = oracle.encoder_decoder(
            weights,
            rows["source"][row],
            rows["target_in"][row],
            layers=2,
            heads=4,
            norm_first=norm == "pre",
            shared=shared,
        )
        np.testing.assert_allclose(logits[row], expected, atol=2e-5)


def test_padding_changes_no_real_logit():
    model, rows = shuffled(transformer(**TINY)), pairs()
    logits = model(tensors(rows))
    assert np.isfinite(logits).all()
    for row in range(3):
        source, target = (rows[key][row][rows[key][row] != 0] for key in ("source", "target_in"))
        alone = model({"source": tf.constant(source[None]), "target_in": tf.constant(target[None])})
        np.testing.assert_allclose(logits[row, : len(target)], alone[0], atol=1e-5)


@pytest.mark.parametrize("norm", repeated_but(["pre"], ["post", "pre"]))
def test_packed_pairs_equal_pairs_alone(norm):
    model = shuffled(transformer(**TINY, norm=norm))
    lengths = [(5, 3), (2, 4), (3, 2)]  # of source and target
    rows = [(tokens(s, seed=10 + s), tokens(t, seed=20 + t)) for s, t in lengths]

    def packed(side):
        parts = [row[side] for row in rows]
        filling = np.zeros(12 - sum(map(len, parts)), np.int32)
        arrays = (
            parts,
            [np.full(len(part), number, np.int32) for number, part in enumerate(parts, start=1)],
            [np.arange(len(part), dtype=np.int32) for part in parts],
        )
        return [tf.constant(np.concatenate([*array, filling])[None]) for array in arrays]

    batch = {}
    batch["source"], batch["source_segments"], batch["source_positions"] = packed(0)
    batch["target_in"], batch["target_segments"], batch["target_positions"] = packed(1)
    logits = model(batch)[0]
    start = 0
    for source, target in rows:
        alone = model({"source": tf.constant(source[None]), "target_in": tf.constant(target[None])})[0]
        np.testing.assert_allclose(logits[start : start + len(target)], alone, atol=1e-5)
        start += len(target)
    assert np.isfinite(logits[start:]).all()


@pytest.mark.parametrize("norm", repeated_but(["post"], ["post", "pre"]))
def test_cached_decoding_equals_the_forward_pass(norm):
    model, rows = shuffled(transformer(**TINY, norm=norm)), tensors(pairs())
    expected = model(rows)
    cache = model.start_decoding({"source": rows["source"]}, 3, 7)
    assert {tensor.shape[0] for tensor in tf.nest.flatten(cache)} == {3}
    for index in range(5):
        logits, cache = model.decode_step(rows["target_in"][:, index], tf.constant(index), cache)
        assert logits.dtype == tf.float32
        real = rows["target_in"][:, index] != 0
        np.testing.assert_allclose(logits[real], expected[:, index][real], atol=1e-5)


@pytest.mark.nightly  # eagerly: above; in a graph: run/test_decoding_evaluator.py
@pytest.mark.parametrize("jit_compile", [False, True])
def test_cached_greedy_decoding_in_a_graph_loop_writes_what_uncached_does(jit_compile):
    model, source = shuffled(transformer(**TINY)), tf.constant(pairs()["source"])
    steps = 4

    @tf.function(jit_compile=jit_compile)
    def cached(source):
        cache = model.start_decoding({"source": source}, None, steps)

        def body(index, current, written, cache):
            logits, cache = model.decode_step(current, index, cache)
            chosen = tf.argmax(logits, -1, output_type=tf.int32)
            here = tf.range(steps)[None] == index
            return index + 1, chosen, tf.where(here, chosen[:, None], written), cache

        state = (tf.constant(0), tf.fill([3], 2), tf.zeros([3, steps], tf.int32), cache)
        return tf.while_loop(lambda index, *_: index < steps, body, state)[2]

    begun = np.full((3, 1), 2, np.int32)
    for _ in range(steps):
        logits = model(
            {"source": source, "target_in": tf.constant(begun)}
            | {
                "target_segments": tf.ones(begun.shape, tf.int32)  # what it writes may be token 0, which is no padding
            }
        )
        begun = np.concatenate([begun, np.argmax(logits[:, -1], -1)[:, None].astype(np.int32)], 1)
    np.testing.assert_array_equal(cached(source), begun[:, 1:])


def test_several_rows_a_source_decode_like_repeated_sources():
    model, source = shuffled(transformer(**TINY)), tf.constant(pairs()["source"])
    inputs = tf.constant(tokens(6, seed=3))
    beams, _ = model.decode_step(inputs, tf.constant(0), model.start_decoding({"source": source}, 6, 4))
    repeated = model.start_decoding({"source": tf.repeat(source, 2, axis=0)}, 6, 4)
    np.testing.assert_allclose(beams, model.decode_step(inputs, tf.constant(0), repeated)[0], atol=1e-6)


@pytest.mark.parametrize("policy", repeated_but(["mixed_bfloat16"], ["mixed_float16", "mixed_bfloat16"]))
def test_logits_and_weights_are_float32_under_16_bits_and_near_float32(policy):
    rows = tensors(pairs())
    keras.utils.set_random_seed(0)
    expected = transformer(**TINY)(rows)
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = transformer(**TINY)
    logits = model(rows)
    assert logits.dtype == tf.float32
    assert {weight.dtype for weight in model.weights} == {"float32"}
    real = rows["target_in"] != 0
    np.testing.assert_allclose(logits[real], expected[real], atol=0.15)
    assert np.abs(logits[real] - expected[real]).max() > 1e-5  # it did compute in 16 bits
    cache = model.start_decoding({"source": rows["source"]}, 3, 5)
    assert model.decode_step(rows["target_in"][:, 0], tf.constant(0), cache)[0].dtype == tf.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 3}, "width must be a multiple of heads, and is 16 with heads = 3"),
        ({"width": 15, "heads": 5}, "width must be even for these positions, and is 15"),
        ({"layers": 0}, "layers must be at least 1, and is 0"),
        ({"vocab_size": 3}, "vocab_size must be at least 4, and is 3"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), and is 1.0"),
        ({"norm": "rms"}, "There is no norm 'rms'. Known: post, pre"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        transformer(**TINY | arguments)


def test_rows_and_decoding_past_the_models_length_are_refused():
    model = transformer(**TINY)
    with pytest.raises(ValueError, match="Rows of 13 tokens are longer than the model's max_length = 12"):
        model({"source": tf.constant(tokens(1, 13)), "target_in": tf.constant(tokens(1, 2))})
    with pytest.raises(ValueError, match="1 to 12 steps"):
        model.start_decoding({"source": tf.constant(tokens(1, 3))}, 1, 13)

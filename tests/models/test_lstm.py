"""The LSTM language model: Keras's own layer, packing, decoding, policies."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.models.lstm import Lstm, lstm_language_model

TINY = {"vocab_size": 17, "layers": 2, "width": 8}


def tokens(*shape, seed=0):
    return np.random.default_rng(seed).integers(4, 17, shape).astype(np.int32)


def test_layer_equals_kerass():
    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype(np.float32)
    ours, reference = Lstm(width=8, name="lstm"), keras.layers.LSTM(8, return_sequences=True)
    ours.build()
    reference.build(x.shape)
    np.testing.assert_array_equal(ours.bias.numpy(), reference.cell.bias.numpy())
    for weight, other in zip(ours.weights, reference.weights, strict=True):
        assert weight.name == other.name
        weight.assign(other.numpy() + 0.1)
        other.assign(weight)
    starts = np.zeros((3, 6), bool)
    np.testing.assert_allclose(ours(x, starts=tf.constant(starts)), reference(x), atol=1e-6)
    starts[1, 2] = True
    outputs = ours(x, starts=tf.constant(starts))
    np.testing.assert_allclose(outputs[1, 2:], reference(x[1:2, 2:])[0], atol=1e-6)
    np.testing.assert_allclose(outputs[0], reference(x)[0], atol=1e-6)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_parameters_are_counted(tie_embeddings):
    model = lstm_language_model(vocab_size=17, layers=3, width=8, tie_embeddings=tie_embeddings)
    assert model.count_params() == 17 * 8 * (1 if tie_embeddings else 2) + 3 * (2 * 8 * 32 + 32)


def test_packed_texts_equal_texts_alone():
    model = lstm_language_model(**TINY)
    texts = [tokens(length, seed=length) for length in (4, 1, 3)]
    filling = np.zeros(2, np.int32)
    batch = {
        "tokens": [*texts, filling],
        "segments": [np.full(len(text), number) for number, text in enumerate(texts, start=1)] + [filling],
    }
    logits = model({name: tf.constant(np.concatenate(parts)[None], tf.int32) for name, parts in batch.items()})[0]
    start = 0
    for text in texts:
        alone = model({"tokens": tf.constant(text[None])})[0]
        np.testing.assert_allclose(logits[start : start + len(text)], alone, atol=1e-6)
        start += len(text)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_decoding_step_by_step_equals_the_forward_pass(tie_embeddings):
    model, rows = lstm_language_model(**TINY, tie_embeddings=tie_embeddings), tf.constant(tokens(3, 6))
    expected = model({"tokens": rows})
    assert expected.dtype == tf.float32
    cache = model.start_decoding(None, 3, 6)
    assert {tensor.shape[0] for tensor in tf.nest.flatten(cache)} == {3}
    for index in range(6):
        logits, cache = model.decode_step(rows[:, index], tf.constant(index), cache)
        np.testing.assert_allclose(logits, expected[:, index], atol=1e-5)


def test_decoding_runs_in_a_compiled_loop():
    model = lstm_language_model(**TINY)

    @tf.function(jit_compile=True)
    def greedy(first):
        def body(index, current, cache):
            logits, cache = model.decode_step(current, index, cache)
            return index + 1, tf.argmax(logits, -1, output_type=tf.int32), cache

        state = (tf.constant(0), first, model.start_decoding(None, 2, 5))
        return tf.while_loop(lambda index, *_: index < 5, body, state)[1]

    written = tokens(2, 1)
    for _ in range(5):
        logits = model({"tokens": tf.constant(written), "segments": tf.ones(written.shape, tf.int32)})
        written = np.concatenate([written, np.argmax(logits[:, -1], -1)[:, None].astype(np.int32)], 1)
    np.testing.assert_array_equal(greedy(tf.constant(written[:, 0])), written[:, -1])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_logits_weights_and_cell_are_float32_under_16_bits(policy):
    rows = {"tokens": tf.constant(tokens(2, 5))}
    keras.utils.set_random_seed(0)
    expected = lstm_language_model(**TINY)(rows)
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    model = lstm_language_model(**TINY)
    logits = model(rows)
    assert logits.dtype == tf.float32
    assert {weight.dtype for weight in model.weights} == {"float32"}
    np.testing.assert_allclose(logits, expected, atol=0.05)
    assert np.abs(logits - expected).max() > 1e-6  # it did compute in 16 bits
    state = model.start_decoding(None, 2, 5)["layers"][0]
    assert state["cell"].dtype == tf.float32
    assert state["output"].dtype == keras.DTypePolicy(policy).compute_dtype


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"layers": 0}, "layers must be at least 1, and is 0"), ({"dropout": -0.1}, r"dropout must lie in \[0, 1\)")],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lstm_language_model(**TINY | arguments)

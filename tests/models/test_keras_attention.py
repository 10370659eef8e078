"""Keras's own attention layers by cuDNN's kernel, which a CPU cannot run: plain products stand in for it here."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but

from launcher.machine import xla
from launcher.models.transformer import cudnn_attention
from launcher.tasks import keras_private

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH = 3, 6, 16
TOLERANCES = {"mixed_float16": 3e-3, "mixed_bfloat16": 2e-2}  # of the largest value: some roundings
PADDED = np.arange(LENGTH) < np.array([[6], [4], [0]])  # the last row has nothing to look at
SOME = np.random.default_rng(0).random((ROWS, 4, LENGTH, LENGTH)) < 0.5


@pytest.fixture
def calls(monkeypatch):
    """What the kernel is called with, in the place of which the same is computed as cuDNN computes it."""
    seen = []

    def attend(query, key, value, allowed, causal, scale):
        seen.append(("mask", *allowed.shape) if allowed is not None else ("causal",) if causal else ())
        scores = tf.einsum("bqhd,bkhd->bhqk", *(tf.cast(one, tf.float32) for one in (query, key))) * scale
        if allowed is not None:
            scores += tf.where(allowed, 0.0, cudnn_attention._DTYPES[value.dtype][1])
        if causal:
            scores = tf.where(tf.linalg.band_part(tf.ones_like(scores), -1, 0) > 0, scores, -np.inf)
        return tf.einsum("bhqk,bkhd->bqhd", tf.cast(tf.nn.softmax(scores), value.dtype), value)

    monkeypatch.setattr(cudnn_attention, "attend", attend)
    keras_private.attend_by_kernel(True)
    yield seen
    keras_private.attend_by_kernel(False)


def computed(layer, inputs, *, compiling=True, **given):
    """Outputs, and gradients of the inputs and weights."""
    inputs = tf.constant(inputs, layer.compute_dtype)

    with xla.compiling(compiling), tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = layer(inputs, inputs, **given)
        weighted = outputs * tf.cast(tf.reshape(tf.range(tf.size(outputs)) % 5, tf.shape(outputs)), outputs.dtype)
    found = outputs, *tape.gradient(weighted, [inputs, *layer.trainable_variables])
    return [tf.cast(one, tf.float32).numpy() for one in found]


def of_heads(policy, **more):
    return keras.layers.MultiHeadAttention(4, 8, dtype=policy, **more)


def of_groups(policy, **more):
    return keras.layers.GroupQueryAttention(8, 4, 2, dtype=policy, **more)


@pytest.mark.parametrize(
    ("make", "policy"),
    repeated_but(
        [(of_heads, "mixed_float16"), (of_groups, "mixed_bfloat16")],
        [(make, policy) for make in (of_heads, of_groups) for policy in TOLERANCES],
    ),
)
def test_outputs_and_gradients_are_keras_own_whatever_the_mask(calls, make, policy):
    masks = {
        "none": {},
        "causal": {"use_causal_mask": True},
        "of each query": {"attention_mask": SOME[:, 0]},
        "of all rows": {"attention_mask": SOME[0, 0]},
        "numbers": {"attention_mask": SOME[:, 0].astype(np.float32)},
        "of heads": {"attention_mask": SOME},
        "padding": {"query_mask": PADDED, "value_mask": PADDED},
        "padding of keys, causal": {"value_mask": PADDED, "use_causal_mask": True},
    }
    layer = make(policy)
    inputs = np.random.default_rng(1).normal(size=(ROWS, LENGTH, WIDTH))
    computed(layer, inputs)
    for name, given in masks.items():
        calls.clear()
        found, wanted = computed(layer, inputs, **given), computed(layer, inputs, compiling=False, **given)
        assert len(calls) == 1, name
        largest = max(np.abs(one).max() for one in wanted)  # a key's bias has no gradient but rounding
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=largest * TOLERANCES[policy], err_msg=name)


def test_what_is_no_such_attention_stays_keras_own(calls):
    inputs = np.random.default_rng(1).normal(size=(ROWS, LENGTH, WIDTH))
    whole, odd = of_heads("mixed_bfloat16"), inputs[:, :-1]
    for layer, given in (
        (of_heads("float32"), {}),
        (of_heads("mixed_bfloat16", dropout=0.5), {"training": True}),
        (of_heads("mixed_bfloat16", value_dim=16), {}),
        (keras.layers.MultiHeadAttention(2, 4, dtype="mixed_bfloat16"), {}),
    ):
        computed(layer, inputs, **given)
    computed(whole, odd, attention_mask=SOME[:, 0, :-1, :-1])
    computed(whole, inputs, compiling=False)
    assert whole(inputs, inputs, return_attention_scores=True)[1].shape == (ROWS, 4, LENGTH, LENGTH)
    assert not calls
    computed(whole, odd)
    assert calls == [()], "without a mask, any length will do"

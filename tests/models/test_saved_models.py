"""Subclassed models are saved and loaded by Keras with their weights and the policy of their layers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but

from launcher.models.lstm import lstm_language_model
from launcher.models.transformer import language_model, transformer

TOKENS = np.arange(1, 13, dtype=np.int32).reshape(2, 6)


@pytest.mark.parametrize("policy", repeated_but(["mixed_bfloat16"], ["float32", "mixed_bfloat16"]))
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (transformer, {"heads": 2, "hidden": 16, "norm": "pre", "share_embeddings": False}),
        (language_model, {"heads": 2, "kv_heads": 1, "positions": "learned", "tie_embeddings": False}),
        (lstm_language_model, {"tie_embeddings": False}),
    ],
)
def test_a_saved_model_is_the_same_when_it_is_loaded(make, sizes, policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    model = make(vocab_size=20, layers=1, width=8, **sizes)
    for number, weight in enumerate(model.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape) / 4)
    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert keras.config.dtype_policy().name == "float32"
    batch = {"tokens": TOKENS, "source": TOKENS, "target_in": TOKENS}
    batch = {name: tf.constant(tokens) for name, tokens in batch.items()}
    np.testing.assert_array_equal(loaded(batch, training=False), model(batch, training=False))

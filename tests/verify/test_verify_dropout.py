"""What --mode=verify turns off before it compares: every random mask and noise of a built model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from launcher.models.lstm import lstm_language_model
from launcher.models.transformer.decoder import language_model
from launcher.models.transformer.encoder_decoder import transformer
from launcher.step import layers


class Attention(keras.layers.Layer):
    """Holds a layer that is not among any `layers`."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 4, dropout=0.5)

    def call(self, inputs, training=False):
        return self.attention(inputs, inputs, training=training)


KERAS = {
    "dropout": lambda: keras.layers.Dropout(0.5),
    "spatial": lambda: keras.layers.SpatialDropout1D(0.5),
    "alpha": lambda: keras.layers.AlphaDropout(0.5),
    "gaussian": lambda: keras.layers.GaussianDropout(0.5),
    "noise": lambda: keras.layers.GaussianNoise(0.5),
    "lstm": lambda: keras.layers.LSTM(4, dropout=0.5, recurrent_dropout=0.5),
    "gru": lambda: keras.layers.GRU(4, dropout=0.5),
    "attention": Attention,
}


def outputs(model, inputs):
    return [np.asarray(model(inputs, training=training)) for training in (True, False)]


@pytest.mark.parametrize("kind", KERAS)
def test_layers_of_keras_train_as_they_evaluate(kind):
    model = keras.Sequential([keras.Input((6, 8)), KERAS[kind](), keras.layers.Flatten()])
    inputs = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    trained, evaluated = outputs(model, inputs)
    assert not np.array_equal(trained, evaluated), "else this test shows nothing"
    layers.turn_off_dropout(model)
    trained, evaluated = outputs(model, inputs)
    np.testing.assert_array_equal(trained, evaluated)


def batch(*names):
    tokens = np.random.default_rng(0).integers(1, 16, (4, 6), np.int32)
    return dict.fromkeys(names, tokens)


MODELS = {
    "transformer": lambda: transformer(
        vocab_size=16, layers=1, width=8, heads=2, hidden=16, dropout=0.5, attention_dropout=0.5, max_length=8
    ),
    "language_model": lambda: language_model(
        vocab_size=16, layers=1, width=8, heads=2, dropout=0.5, attention_dropout=0.5, max_length=8
    ),
    "lstm": lambda: lstm_language_model(vocab_size=16, layers=2, width=8, dropout=0.5),
}


@pytest.mark.parametrize("name", MODELS)
def test_our_models_train_as_they_evaluate(name):
    model = MODELS[name]()
    inputs = batch("source", "target_in", "tokens")
    trained, evaluated = outputs(model, inputs)
    assert not np.array_equal(trained, evaluated), "else this test shows nothing"
    layers.turn_off_dropout(model)
    trained, evaluated = outputs(model, inputs)
    np.testing.assert_array_equal(trained, evaluated)

"""Dropout and noise, turned off in a model that is built: what each replica draws for itself cannot be compared."""

from __future__ import annotations

import keras

from launcher.step.layers import walk

_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
_RANDOM = (
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.GRUCell,
    keras.layers.LSTMCell,
    keras.layers.SimpleRNNCell,
)


def turn_off(model: keras.Model) -> None:
    """Makes the model's layers drop nothing and add no noise; before it is traced."""
    for layer, *_ in walk(model):
        if isinstance(layer, _RANDOM):
            for name in _RATES:
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)

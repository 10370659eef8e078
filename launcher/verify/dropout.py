"""Dropout and noise, turned off in a model that is built: what each replica draws for itself cannot be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import keras

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
    for layer in _nested(model, set()):
        if isinstance(layer, _RANDOM):
            for name in _RATES:
                if isinstance(getattr(layer, name, None), float):
                    setattr(layer, name, 0.0)


def _nested(layer: keras.layers.Layer, seen: set[int]) -> Iterator[keras.layers.Layer]:
    """A layer and what it holds, also what is not among its `layers`, such as the dropout of an attention layer."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield layer
    for value in [*vars(layer).values(), getattr(layer, "layers", ())]:
        held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for one in _layers(held):
            yield from _nested(one, seen)


def _layers(values: Iterable[object]) -> Iterator[keras.layers.Layer]:
    return (value for value in values if isinstance(value, keras.layers.Layer))

"""What a Keras model answers an example before it trains."""

import inspect
import math
from typing import Any

import keras
import tensorflow as tf

from launcher.tasks.keras_weights import each_tensor

_LARGE = 2**22  # elements


def call(model: keras.Model, x: Any, training: bool) -> Any:
    return model(x, training=training) if "training" in inspect.signature(model.call).parameters else model(x)


def answers(model: keras.Model, x: Any, *, training: bool = False) -> Any:
    """What a model answers; zeros of that form where weights are large, which may have no values yet.

    Eight billion of them would take minutes to multiply by.
    """
    traced: list[Any] = []
    if any(math.prod(one.shape) >= _LARGE for one in model.weights):
        tf.function(lambda: traced.append(call(model, x, training)), autograph=False).get_concrete_function()
    if not traced or any(tf.is_symbolic_tensor(one) for one in model.losses):
        return call(model, x, training)
    return each_tensor(traced[0], lambda one: tf.zeros(one.shape, one.dtype))

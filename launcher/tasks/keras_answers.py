"""What a Keras model answers an example before it trains."""

import contextlib
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
        with contextlib.suppress(Exception):  # which a call that computes will raise, too, if it is a mistake
            tf.function(lambda: traced.append(call(model, x, training))).get_concrete_function()
    is_known = all(one.shape.is_fully_defined() for one in tf.nest.flatten(traced) if tf.is_tensor(one))
    if not (traced and is_known) or any(tf.is_symbolic_tensor(one) for one in model.losses):
        return call(model, x, training)
    return each_tensor(traced[0], lambda one: tf.zeros(one.shape, one.dtype))

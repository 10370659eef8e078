"""First values of variables from the host, whatever device the variables are on.

TensorFlow computes them where the variable will be. On a TPU that would be another generator of random numbers than on
CPUs and GPUs (`tf.random.Algorithm.AUTO_SELECT`), so other weights from one seed, and a compilation for each shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def scope(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """`strategy.scope()`, in which first values for a TPU are computed by the CPU of this process."""
    with strategy.scope():
        if not isinstance(strategy, tf.distribute.TPUStrategy):
            yield
            return
        with tf.variable_creator_scope(_from_host):
            yield


def _from_host(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    initial_value = kwargs.get("initial_value")
    if callable(initial_value):
        # Here and now, as the strategy would otherwise call it in the scope of its first device.
        with tf.init_scope(), tf.device(None), tf.device("CPU:0"):
            kwargs["initial_value"] = initial_value()
    return next_creator(**kwargs)

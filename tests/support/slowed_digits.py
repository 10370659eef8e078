"""A worker that is slower than the others, for recipes: it sleeps in each step's forward pass, or for each batch."""

from __future__ import annotations

import os
import time

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.images import ImageData
from launcher.machine.cluster import resolve


def _nap(seconds: float) -> tf.Tensor:
    def sleep() -> np.int32:
        time.sleep(seconds)
        return np.int32(0)

    return tf.numpy_function(sleep, [], tf.int32)


class _Slowed(keras.layers.Layer):
    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def call(self, inputs):
        with tf.control_dependencies([_nap(self._seconds)]):
            return tf.identity(inputs)


@gin.configurable(module="slowed")
def perceptron(*, image_shape: tuple[int, int, int], num_classes: int, worker: int, seconds: float) -> keras.Model:
    """One layer, on a worker that needs so long for it."""
    inputs = keras.Input(image_shape)
    slowed = _Slowed(seconds if resolve(os.environ).index == worker else 0.0)(inputs)
    return keras.Model(inputs, keras.layers.Dense(num_classes, dtype="float32")(keras.layers.Flatten()(slowed)))


@gin.configurable(module="slowed")
class Batches:
    """Another data set, whose batches one worker needs so long for."""

    def __init__(self, *, data: ImageData, worker: int, seconds: float):
        self._data = data
        self._seconds = seconds if resolve(os.environ).index == worker else 0.0

    def __getattr__(self, name):
        return getattr(self._data, name)

    def train_batches(self, shard):
        def late(batch):
            with tf.control_dependencies([_nap(self._seconds)]):
                return tf.nest.map_structure(tf.identity, batch)

        return self._data.train_batches(shard).map(late)

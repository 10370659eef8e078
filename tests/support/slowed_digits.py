"""Workers that are slow, for recipes: one sleeps in each step's forward pass, or for each batch; or all are held up."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.images.image_data import ImageData
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


@gin.configurable(module="slowed")
class HeldBatches:
    """Another data set, whose batches after the first few come when there is a file; FILE.held, with the number
    of a process that waits, once they are held.

    Those of training, or of the evaluation instead, on all workers or on one.
    """

    def __init__(self, *, data: ImageData, first: int, file: str, evaluation: bool = False, worker: int | None = None):
        self._data, self._first, self._file = data, first, file
        self._evaluation = evaluation
        if worker is not None and resolve(os.environ).index != worker:
            self._first = 10**9

    def __getattr__(self, name):
        return getattr(self._data, name)

    def train_batches(self, shard):
        return self._data.train_batches(shard) if self._evaluation else self._held(self._data.train_batches(shard))

    def eval_batches(self, shard):
        return self._held(self._data.eval_batches(shard)) if self._evaluation else self._data.eval_batches(shard)

    def _held(self, batches):
        numbers = itertools.count()

        def wait() -> np.int32:
            while next(numbers) >= self._first and not os.path.exists(self._file):
                held = Path(f"{self._file}.held")
                if not held.exists():
                    mine = Path(f"{held}.{os.getpid()}")
                    mine.write_text(str(os.getpid()))
                    mine.rename(held)
                time.sleep(0.01)
            return np.int32(0)

        def held(batch):
            with tf.control_dependencies([tf.numpy_function(wait, [], tf.int32)]):
                return tf.nest.map_structure(tf.identity, batch)

        return batches.map(held)

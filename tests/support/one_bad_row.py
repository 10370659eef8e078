"""Two layers in the run's precision on given batches; one row of one batch is too large for float16; for recipes."""

from __future__ import annotations

import gin
import keras
import numpy as np
import small_run
import tensorflow as tf

BAD_STEP, BAD_ROW = 4, 5


def arrays() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1)
    x = numbers.standard_normal((40, 8, 3)).astype(np.float32)
    x[BAD_STEP - 1, BAD_ROW] *= 1e5
    return {"x": x, "y": x.sum(axis=-1), "weight": np.ones((40, 8), np.float32)}


def model() -> keras.Model:
    layers = [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dense(1),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    return keras.Sequential([keras.Input((3,)), *layers])


def squared_error(model: keras.Model, batch: dict[str, tf.Tensor], training: bool):
    error = model(batch["x"], training=training)[:, 0] - batch["y"]
    return tf.reduce_sum(tf.square(error) * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


@gin.configurable(module="one_bad_row")
def task() -> small_run.GivenTask:
    return small_run.GivenTask(arrays(), model, squared_error)

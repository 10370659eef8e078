"""Two layers that learn a noisy line from given batches, some of which are poisoned; for recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import gin
import keras
import numpy as np
import small_run
import tensorflow as tf

BATCHES, EXAMPLES, FEATURES = 80, 8, 3


def arrays(poison: Mapping[int, float], noise: float) -> dict[str, np.ndarray]:
    """Batches [BATCHES, EXAMPLES, ...]; `poison`: what multiplies the inputs of a batch, counted from 1."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((BATCHES, EXAMPLES, FEATURES))
    y = x @ numbers.standard_normal(FEATURES) + noise * np.exp(numbers.standard_normal((BATCHES, EXAMPLES)))
    for batch, factor in poison.items():
        x[batch - 1] *= factor
    weight = np.ones((BATCHES, EXAMPLES), np.float32)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32), "weight": weight}


def without(given: Mapping[str, np.ndarray], left_out: Sequence[int]) -> dict[str, np.ndarray]:
    """The arrays without some batches, counted from 1."""
    return {key: np.delete(value, np.array(left_out, int) - 1, axis=0) for key, value in given.items()}


def model() -> keras.Model:
    layers = [keras.layers.Dense(4, activation="elu", name="one"), keras.layers.Dense(1, name="two")]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def squared_error(model: keras.Model, batch: Mapping[str, tf.Tensor], training: bool):
    error = model(batch["x"], training=training)[:, 0] - batch["y"]
    return tf.reduce_sum(tf.square(error) * batch["weight"]), tf.reduce_sum(batch["weight"]), {}


@gin.configurable(module="poisoned")
def task(
    poison: Mapping[int, float] = {}, noise: float = 0.1, left_out: Sequence[int] = ()  # noqa: B006
) -> small_run.GivenTask:
    return small_run.GivenTask(without(arrays(poison, noise), left_out), model, squared_error)

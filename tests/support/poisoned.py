"""Two layers that learn a noisy line from given batches, some of which are poisoned; for recipes."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

import gin
import keras
import numpy as np
import small_run
import tensorflow as tf

BATCHES, EXAMPLES, FEATURES = 400, 8, 3


def arrays(poison: Mapping[int, float], weightless: Sequence[int] = ()) -> dict[str, np.ndarray]:
    """Batches [BATCHES, EXAMPLES, ...], counted from 1.

    Args:
      poison: what the inputs of a batch are multiplied by.
      weightless: batches whose weights are 0, which the launcher skips.
    """
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((BATCHES, EXAMPLES, FEATURES))
    # The noise has a long tail, as losses have.
    y = x @ numbers.standard_normal(FEATURES) + 0.1 * np.exp(numbers.standard_normal((BATCHES, EXAMPLES)))
    weight = np.ones((BATCHES, EXAMPLES))
    for batch, factor in poison.items():
        x[batch - 1] *= factor
    weight[np.array(weightless, int) - 1] = 0
    return {name: value.astype(np.float32) for name, value in {"x": x, "y": y, "weight": weight}.items()}


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
    *,
    poison: Mapping[int, float] = types.MappingProxyType({}),
    weightless: Sequence[int] = (),
    left_out: Sequence[int] = (),
) -> small_run.GivenTask:
    """The task on the batches that are left; it evaluates on the first few, none of which are poisoned."""
    given = arrays(poison, weightless)
    made = small_run.GivenTask(without(given, left_out), model, squared_error)
    evaluated = small_run.GivenBatches({name: value[:2] for name, value in arrays({}).items()})
    made.data().num_eval_examples = evaluated.num_eval_examples
    made.data().eval_batches = evaluated.eval_batches
    return made

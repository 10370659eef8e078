"""LAMB: Adam whose update is rescaled layer by layer, for very large batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.optimizers.parts import Part, norms


class LAMB(keras.optimizers.Optimizer):
    """Layer-wise adaptive moments (You et al. 2019, arXiv 1904.00962, algorithm 2, with phi the identity).

        m = beta_1 m + (1 - beta_1) g            v = beta_2 v + (1 - beta_2) g^2
        u = m / (1 - beta_1^t) / (sqrt(v / (1 - beta_2^t)) + epsilon) + layer_decay w
        w = w - learning_rate * (|w| / |u|) * u

    The trust ratio |w| / |u| is 1 where either norm is 0. Excluded variables get neither decay nor the ratio.
    `keras.optimizers.Lamb` differs: it decays outside the ratio and cannot exclude variables from it.

    Args:
      learning_rate: as in Keras.
      beta_1, beta_2: decay rates of the moments.
      epsilon: added to the root of the second moment.
      layer_decay: weight decay, inside the trust ratio.
      exclude: regular expressions searched for in variables' paths.
      name: prefix of the slots' names.
    """

    takes_norms_of_parts = True

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        layer_decay: float = 0.0,
        exclude: Sequence[str] = (),
        name: str = "lamb",
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.layer_decay = layer_decay
        self.exclude = tuple(exclude)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates both moments of every variable."""
        if self.built:
            return
        super().build(variables)
        self._adapted = [not any(re.search(pattern, v.path) for pattern in self.exclude) for v in variables]
        self._first, self._second = self.add_optimizer_variables(variables, ["first_moment", "second_moment"])

    def update_step(self, gradient: tf.Tensor, variable: keras.Variable | Part, learning_rate: tf.Tensor) -> None:
        """Updates one variable and its moments."""
        index = self._get_variable_index(variable)
        first, second = self._first[index], self._second[index]
        weight = tf.convert_to_tensor(variable)
        gradient = tf.cast(gradient, weight.dtype)
        count = tf.cast(tf.convert_to_tensor(self.iterations), weight.dtype) + 1.0
        new_first = self.beta_1 * tf.convert_to_tensor(first) + (1.0 - self.beta_1) * gradient
        new_second = self.beta_2 * tf.convert_to_tensor(second) + (1.0 - self.beta_2) * tf.square(gradient)
        unbiased_first = new_first / (1.0 - tf.pow(tf.cast(self.beta_1, weight.dtype), count))
        unbiased_second = new_second / (1.0 - tf.pow(tf.cast(self.beta_2, weight.dtype), count))
        update = unbiased_first / (tf.sqrt(unbiased_second) + self.epsilon)
        if self._adapted[index]:
            update += self.layer_decay * weight
            update *= _trust_ratio(*norms(variable, weight, update))
        self.assign(first, new_first)
        self.assign(second, new_second)
        self.assign_sub(variable, tf.cast(learning_rate, weight.dtype) * update)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config = super().get_config()
        for key in ("beta_1", "beta_2", "epsilon", "layer_decay", "exclude"):
            config[key] = getattr(self, key)
        return config


def _trust_ratio(weight_norm: tf.Tensor, update_norm: tf.Tensor) -> tf.Tensor:
    usable = tf.logical_and(weight_norm > 0.0, update_norm > 0.0)
    return tf.where(usable, tf.math.divide_no_nan(weight_norm, update_norm), tf.ones_like(weight_norm))

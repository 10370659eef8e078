"""LARS: momentum whose rate is rescaled layer by layer, for very large batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.optimizers.parts import Part, norms


class LARS(keras.optimizers.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv 1708.03888, algorithm 1).

        trust = eeta |w| / (|g| + layer_decay |w| + epsilon)
        v = momentum v + learning_rate * trust * (g + layer_decay w)
        w = w - v

    The velocity holds updates already multiplied by the learning rate, as in the paper and in MLPerf's reference for
    TensorFlow; PyTorch's form, which multiplies afterwards, differs whenever the rate changes. The trust ratio is 1
    where |w| or |g| is 0. With Nesterov, `w = w - (momentum v + learning_rate * trust * (g + layer_decay w))`. Excluded
    variables get neither decay nor the ratio.

    Args:
      learning_rate: as in Keras.
      momentum: decay rate of the velocity.
      nesterov: whether to look ahead.
      eeta: the trust coefficient, eta in the paper.
      epsilon: added to the denominator.
      layer_decay: weight decay, inside the trust ratio.
      exclude: regular expressions searched for in variables' paths.
      name: prefix of the slots' names.
    """

    takes_norms_of_parts = True

    def __init__(
        self,
        learning_rate: Any = 0.1,
        momentum: float = 0.9,
        nesterov: bool = False,
        eeta: float = 0.001,
        epsilon: float = 0.0,
        layer_decay: float = 0.0,
        exclude: Sequence[str] = (),
        name: str = "lars",
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.momentum = momentum
        self.nesterov = nesterov
        self.eeta = eeta
        self.epsilon = epsilon
        self.layer_decay = layer_decay
        self.exclude = tuple(exclude)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the velocity of every variable."""
        if self.built:
            return
        super().build(variables)
        self._adapted = [not any(re.search(pattern, v.path) for pattern in self.exclude) for v in variables]
        self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: tf.Tensor, variable: keras.Variable | Part, learning_rate: tf.Tensor) -> None:
        """Updates one variable and its velocity."""
        index = self._get_variable_index(variable)
        velocity = self._velocities[index]
        weight = tf.convert_to_tensor(variable)
        gradient = tf.cast(gradient, weight.dtype)
        rate = tf.cast(learning_rate, weight.dtype)
        if self._adapted[index]:
            rate *= self._trust(*norms(variable, weight, gradient))
            gradient += self.layer_decay * weight
        step = rate * gradient
        new_velocity = self.momentum * tf.convert_to_tensor(velocity) + step
        self.assign(velocity, new_velocity)
        self.assign_sub(variable, self.momentum * new_velocity + step if self.nesterov else new_velocity)

    def _trust(self, weight_norm: tf.Tensor, gradient_norm: tf.Tensor) -> tf.Tensor:
        usable = tf.logical_and(weight_norm > 0.0, gradient_norm > 0.0)
        denominator = gradient_norm + self.layer_decay * weight_norm + self.epsilon
        return tf.where(usable, self.eeta * tf.math.divide_no_nan(weight_norm, denominator), tf.ones_like(weight_norm))

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config = super().get_config()
        for key in ("momentum", "nesterov", "eeta", "epsilon", "layer_decay", "exclude"):
            config[key] = getattr(self, key)
        return config

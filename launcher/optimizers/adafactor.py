"""Adafactor: second moments of a matrix from those of its rows and columns, so that they take next to no memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


class Adafactor(keras.optimizers.Optimizer):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235, algorithms 4 and 5) without momentum.

        beta = 1 - t ** -decay                       t counts updates from 1
        s = g ^ 2 + epsilon
        R = beta R + (1 - beta) mean of s over columns        C = beta C + (1 - beta) mean of s over rows
        V = R C / mean(R)                            of a matrix; V = beta V + (1 - beta) s of a vector
        u = g / sqrt(V),    u = u / max(1, rms(u) / clip_threshold)
        w = w - learning_rate * (max(scale_epsilon, rms(w)) * u + layer_decay * w)

    Of tensors with more axes, the last two are those of the matrix. With means in place of the paper's sums the factors
    are the same. The learning rate is the paper's rho, a relative step: its own choice is `min(1e-2, 1 / sqrt(t))`.

    `keras.optimizers.Adafactor` differs: it keeps the whole of V of every matrix as a slot, which is the memory that
    this method is there to save, and it never lets the rate be more than `1 / sqrt(t)`, whatever the schedule says.

    Args:
      learning_rate: as in Keras.
      decay: how fast the decay rate of the second moments rises to 1.
      epsilon: added to squared gradients.
      scale_epsilon: the least root mean square that a variable counts for, so that zeros can move.
      clip_threshold: the largest root mean square of an update, before the learning rate.
      layer_decay: weight decay. Not the paper's; as in its implementations, rms(w) is taken before it.
      exclude: regular expressions searched for in variables' paths; a match is not decayed.
      name: prefix of the slots' names.
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        decay: float = 0.8,
        epsilon: float = 1e-30,
        scale_epsilon: float = 1e-3,
        clip_threshold: float = 1.0,
        layer_decay: float = 0.0,
        exclude: Sequence[str] = (),
        name: str = "adafactor",
        **kwargs: Any,
    ):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.decay = decay
        self.epsilon = epsilon
        self.scale_epsilon = scale_epsilon
        self.clip_threshold = clip_threshold
        self.layer_decay = layer_decay
        self.exclude = tuple(exclude)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the moments: of rows and of columns, or of each element of a vector."""
        if self.built:
            return
        super().build(variables)
        self._decayed = [not any(re.search(pattern, v.path) for pattern in self.exclude) for v in variables]
        self._moments = [self._made(variable) for variable in variables]

    def _made(self, variable: keras.Variable) -> list[keras.Variable]:
        shape = tuple(variable.shape)
        shapes = {"second_moment": shape}
        if len(shape) >= 2:
            shapes = {"row_moment": shape[:-1], "column_moment": (*shape[:-2], shape[-1])}
        path = variable.path.replace("/", "_")
        return [
            self.add_variable(shape=part, initializer="zeros", dtype=variable.dtype, name=f"{path}_{name}")
            for name, part in shapes.items()
        ]

    def update_step(self, gradient: tf.Tensor, variable: keras.Variable, learning_rate: tf.Tensor) -> None:
        """Updates one variable and its moments."""
        index = self._get_variable_index(variable)
        moments = self._moments[index]
        weight = tf.convert_to_tensor(variable)
        gradient = tf.cast(gradient, weight.dtype)
        count = tf.cast(tf.convert_to_tensor(self.iterations), weight.dtype) + 1.0
        beta = 1.0 - tf.pow(count, -self.decay)
        squares = tf.square(gradient) + self.epsilon
        means = [squares] if len(moments) == 1 else [tf.reduce_mean(squares, -1), tf.reduce_mean(squares, -2)]
        new = [beta * tf.convert_to_tensor(old) + (1.0 - beta) * mean for old, mean in zip(moments, means, strict=True)]
        if len(new) == 1:
            update = gradient * tf.math.rsqrt(new[0])
        else:
            rows, columns = new
            # Two roots instead of one of the product, which could be too small for a float.
            shares = rows / tf.reduce_mean(rows, -1, keepdims=True)
            update = gradient * tf.math.rsqrt(shares)[..., :, None] * tf.math.rsqrt(columns)[..., None, :]
        update /= tf.maximum(1.0, _rms(update) / self.clip_threshold)
        for moment, value in zip(moments, new, strict=True):
            self.assign(moment, value)
        update *= tf.maximum(_rms(weight), self.scale_epsilon)
        if self._decayed[index] and self.layer_decay:
            update += self.layer_decay * weight
        self.assign_sub(variable, tf.cast(learning_rate, weight.dtype) * update)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        config = super().get_config()
        for key in ("decay", "epsilon", "scale_epsilon", "clip_threshold", "layer_decay", "exclude"):
            config[key] = getattr(self, key)
        return config


def _rms(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(tensor)))

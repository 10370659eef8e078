"""One step of a model, and what all ways to decode share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Cache = Any
Step = Callable[[tf.Tensor, tf.Tensor, Cache], tuple[tf.Tensor, Cache]]
"""(tokens int32 [rows], index int32 [], cache) -> (logits float32 [rows, vocabulary], cache)"""

NEVER = -1e9
"""Below the log-probability of any text, and finite: sums and quotients of it stay so."""


def without(step: Step, tokens: Sequence[int]) -> Step:
    """The same step of a model that never writes these tokens."""

    def masked(inputs: tf.Tensor, index: tf.Tensor, cache: Cache) -> tuple[tf.Tensor, Cache]:
        logits, cache = step(inputs, index, cache)
        forbidden = tf.reduce_any(tf.range(logits.shape[-1])[:, None] == tf.constant(list(tokens), tf.int32), axis=1)
        return tf.where(forbidden, NEVER, logits), cache

    return masked


def written(ids: tf.Tensor, place: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
    """`ids` [..., length] with `tokens` [...] at one place of every row; out of place is nowhere."""
    return tf.where(tf.range(ids.shape[-1]) == place, tokens[..., None], ids)

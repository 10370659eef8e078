"""Dropout of 16-bit floats that drops the share it is told.

TensorFlow draws in the dtype that it drops from, and bfloat16 has 128 numbers to draw: rate 0.01 drops 0.0157. Here the
numbers are float32, and so are masks those of a float32 run; XLA draws 32 bits in any case.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_REAL = tf.nn.experimental.stateless_dropout
_inside = 0


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """What drops by `tf.nn.experimental.stateless_dropout`, as all layers of Keras do, drops so in this block.

    Replicas' threads may take turns inside.
    """
    global _inside
    _inside += 1
    # Leans on Keras: its backend looks this name up at each call. Noticed by tests/tasks/test_dropout.py. Then: replace
    # what it calls instead.
    tf.nn.experimental.stateless_dropout = _dropout
    try:
        yield
    finally:
        _inside -= 1
        if not _inside:
            tf.nn.experimental.stateless_dropout = _REAL


def _dropout(
    x: Any, rate: Any, seed: Any, rng_alg: str = "auto_select", noise_shape: Any = None, name: str | None = None
) -> tf.Tensor:
    """As TensorFlow's, whose arguments these are."""
    x = tf.convert_to_tensor(x)
    if x.dtype not in (tf.float16, tf.bfloat16) or (
        isinstance(noise_shape, list | tuple) and any(size is None for size in noise_shape)
    ):
        return _REAL(x, rate, seed, rng_alg, noise_shape, name)
    drawn = tf.random.stateless_uniform(tf.shape(x) if noise_shape is None else noise_shape, seed, alg=rng_alg)
    rate = tf.cast(rate, tf.float32)
    return tf.where(drawn >= rate, x * tf.cast(1 / (1 - rate), x.dtype), tf.zeros([], x.dtype), name=name)

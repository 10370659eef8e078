"""Dropout of 16-bit floats that drops the share it is told.

TensorFlow draws in the dtype that it drops from, and bfloat16 has 128 numbers to draw: rate 0.01 drops 0.0157. Here it
drops from float32, so that masks are those of a float32 run. XLA draws 32 bits in any case, and fuses the casts.
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


def _dropout(x: Any, *args: Any, **named: Any) -> tf.Tensor:
    """As TensorFlow's, whose arguments these are."""
    x = tf.convert_to_tensor(x)
    dtype = tf.float32 if x.dtype in (tf.float16, tf.bfloat16) else x.dtype
    return tf.cast(_REAL(tf.cast(x, dtype), *args, **named), x.dtype)

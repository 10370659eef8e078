"""Dropout of 16-bit floats that drops the share it is told.

TensorFlow draws in the dtype that it drops from, and bfloat16 has 128 numbers to draw: rate 0.01 drops 0.0157. Here it
drops from float32, so that masks are those of a float32 run. XLA draws 32 bits in any case, and fuses the casts.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from launcher.machine.replaced import Shared, put

_REAL = tf.nn.experimental.stateless_dropout
_exact = Shared()


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """A block in which what drops by `tf.nn.experimental.stateless_dropout`, as all layers of Keras do, drops so."""
    # Leans on Keras: its backend looks this name up at each call. Noticed by tests/tasks/test_dropout.py. Then: replace
    # what it calls instead.
    with _exact.standing(lambda undo: put(undo, tf.nn.experimental, "stateless_dropout", _dropout)):
        yield


def _dropout(x: Any, *args: Any, **named: Any) -> tf.Tensor:
    """Dropout with the arguments of TensorFlow's."""
    x = tf.convert_to_tensor(x)
    dtype = tf.float32 if x.dtype in (tf.float16, tf.bfloat16) else x.dtype
    return tf.cast(_REAL(tf.cast(x, dtype), *args, **named), x.dtype)

"""Where the magnitudes of a tensor lie: counts of float32 exponents, on the device and in a form that adds up.

Multiplying by a power of two moves such a table by whole bins, so one pass over a tensor tells what every loss scale
would lose of it.
"""

from __future__ import annotations

import tensorflow as tf

NUM_BINS = 256
BIAS = 127
ZERO_BIN = 0
NON_FINITE_BIN = 255


def count(tensor: tf.Tensor) -> tf.Tensor:
    """Counts the exponents of a tensor, for use inside a graph and on any device.

    Args:
      tensor: floating-point, any static shape; 16-bit values are exact in float32.

    Returns:
      float32 [256] that adds up over tensors and replicas, exact up to 2^24 a bin. Bin e, for 1 to 254, counts
      magnitudes in [2^(e - 127), 2^(e - 126)); bin 0 counts zeros and what float32 itself holds only as subnormal;
      bin 255 counts infinities and NaNs.
    """
    bits = tf.bitcast(tf.reshape(tf.cast(tensor, tf.float32), [-1]), tf.int32)
    exponents = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 23), 0xFF)
    return tf.math.unsorted_segment_sum(tf.ones_like(exponents, tf.float32), exponents, NUM_BINS)

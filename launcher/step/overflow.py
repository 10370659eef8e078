"""Flags of gradients that are not finite: told in the step's report at no cost to a finite step, named afterwards."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from launcher.machine.no_autograph import no_autograph
from launcher.reporting.units import first

# Whole numbers below 2^24 are exact in float32, in which everything in a step's report travels.
_FLAGS_A_SCALAR = 24


@no_autograph
def flags(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """float32 [len(tensors)]: 1 where a tensor holds a value that is not finite."""
    return 1.0 - tf.cast(tf.stack([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]), tf.float32)


@no_autograph
def of_scalars(values: tf.Tensor) -> tf.Tensor:
    """float32 of the same shape: 1 where a value is not finite."""
    return 1.0 - tf.cast(tf.math.is_finite(values), tf.float32)


@no_autograph
def num_scalars(num_gradients: int) -> int:
    """Number of scalars that `pack` makes."""
    return -(-num_gradients // _FLAGS_A_SCALAR)


@no_autograph
def pack(flags: tf.Tensor) -> tf.Tensor:
    """Flags float32 [n], 0 or 1, as whole numbers float32 [num_scalars(n)]; bit i of number j is flag 24 j + i."""
    count = num_scalars(flags.shape[0])
    padded = tf.pad(flags, [[0, count * _FLAGS_A_SCALAR - flags.shape[0]]])
    bits = tf.constant([2.0**bit for bit in range(_FLAGS_A_SCALAR)])
    return tf.reduce_sum(tf.reshape(padded, [count, _FLAGS_A_SCALAR]) * bits, axis=1)


def unpack(packed: np.ndarray, num_gradients: int) -> np.ndarray:
    """bool [steps, num_gradients] from what `pack` made in each step, [steps, num_scalars(num_gradients)]."""
    bits = (packed.astype(np.int64)[:, :, None] >> np.arange(_FLAGS_A_SCALAR)) & 1
    return bits.reshape(len(packed), packed.shape[1] * _FLAGS_A_SCALAR)[:, :num_gradients] > 0


def describe(paths: Sequence[str], flagged: np.ndarray) -> str:
    """Names the layers of the flagged weights, bool [weights] in the order of the model, nearest to the loss first:
    there the backward pass overflowed first.
    """

    def layers_of(chosen: Sequence[str]) -> list[str]:
        return list(dict.fromkeys(path.rpartition("/")[0] or path for path in chosen))[::-1]

    found = layers_of([path for path, flag in zip(paths, flagged, strict=True) if flag])
    if not found:
        return "no single gradient, only their norm"
    every = ", which is every layer" if len(found) == len(layers_of(paths)) else ""
    return f"{first(found)}{every}"

"""NumPy arrays as tensors in the host's memory: `tf.constant` takes twice their memory for a while."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

_ALIGNMENT = 64  # bytes: what TensorFlow's operations want of a tensor's memory on a CPU


def shared_tensor(array: np.ndarray) -> tf.Tensor:
    """The array as a tensor, in the same memory where that is possible.

    Good for writing alone: other operations want memory that is aligned as TensorFlow aligns it.
    """
    is_bfloat16 = array.dtype.name == "bfloat16"  # which NumPy does not know by itself
    bits = array.view(np.uint16) if is_bfloat16 else array
    shareable = bits.dtype.kind in "fiu" and bits.dtype.isnative and bits.flags.c_contiguous and bits.flags.writeable
    if not shareable or not array.nbytes:
        return tf.convert_to_tensor(array)
    # Leans on TensorFlow: dlpack shares an array's memory and copies nothing. Noticed by
    # tests/machine/test_host_arrays.py, tests/step_program/test_lowering.py. Then: use `tf.convert_to_tensor`; a
    # checkpoint then takes its memory twice, and models larger than the host's memory are not compiled.
    tensor = tf.experimental.dlpack.from_dlpack(bits.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if is_bfloat16 else tensor


def copied_tensor(array: np.ndarray) -> tf.Tensor:
    """The array's numbers as a tensor for any operation, in memory of its own, on the device of the scope."""
    if array.dtype.kind not in "fiu" or not array.nbytes:
        return tf.constant(array)
    own = aligned(array.shape, array.dtype.newbyteorder("="))
    own[...] = array
    return tf.identity(shared_tensor(own))


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
    """An array that nobody has written, which takes no memory before, and is good for any operation."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)

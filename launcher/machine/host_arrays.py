"""NumPy arrays as tensors in the host's memory: `tf.constant` takes twice their memory for a while."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.machine.no_autograph import no_autograph

_ALIGNMENT = 64  # bytes: what TensorFlow's operations want of a tensor's memory on a CPU
_SHARED_BYTES = 2**26  # from here on, arrays of examples are not copied


def shared_tensor(array: np.ndarray) -> tf.Tensor:
    """The array as a tensor, in the same memory where that is possible.

    Good for writing alone: other operations want memory that is aligned as TensorFlow aligns it.
    """
    is_bfloat16 = array.dtype.name == "bfloat16"  # which NumPy does not know by itself
    bits = array.view(np.uint16) if is_bfloat16 else array
    if not _is_shareable(bits):
        return tf.convert_to_tensor(array)
    if not bits.flags.writeable:
        bits = np.asarray(_Lent(bits))
    # Leans on TensorFlow: dlpack shares an array's memory and copies nothing. Noticed by
    # tests/machine/test_host_arrays.py, tests/step_program/test_lowering.py. Then: use `tf.convert_to_tensor`; a
    # checkpoint then takes its memory twice, and models larger than the host's memory are not compiled.
    tensor = tf.experimental.dlpack.from_dlpack(bits.__dlpack__())
    return tf.bitcast(tensor, tf.bfloat16) if is_bfloat16 else tensor


class _Lent:
    """Memory of an array that may only be read, as NumPy hands it to dlpack, which knows no such arrays."""

    def __init__(self, array: np.ndarray):
        self._array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _is_shareable(array: np.ndarray) -> bool:
    """Whether a tensor can have the memory of an array."""
    return array.dtype.kind in "fiu" and array.dtype.isnative and array.flags.c_contiguous and array.size > 0


def copied_tensor(array: np.ndarray) -> tf.Tensor:
    """The array's numbers as a tensor for any operation, in memory of its own, on the device of the scope."""
    if array.dtype.kind not in "fiu" or not array.nbytes:
        return tf.constant(array)
    own = aligned(array.shape, array.dtype.newbyteorder("="))
    own[...] = array
    return tf.identity(shared_tensor(own))


def aligned(shape: Sequence[int], dtype: npt.DTypeLike) -> np.ndarray:
    """An array of zeros, good for any operation; a large one takes no memory before it is written."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def rows_of(array: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function that gives rows of an array by their indices, on the device of the scope.

    A large array is read where it lies, from the first of its rows at which a tensor can begin; NumPy puts large arrays
    16 bytes behind such a place. Rows that never meet one, such as those of 64 bytes each, are copied.
    """
    head = _rows_before_a_tensor(array)
    if head is None:
        whole = copied_tensor(array)
        return lambda indices: tf.gather(whole, indices)
    first, rest = copied_tensor(array[: head + 1]), shared_tensor(array[head:])

    @no_autograph
    def rows(indices: tf.Tensor) -> tf.Tensor:
        is_first, of_rest = indices < head, tf.gather(rest, tf.maximum(indices - head, 0))
        with_first = no_autograph(
            lambda: tf.where(
                tf.reshape(is_first, [-1] + [1] * (array.ndim - 1)),
                tf.gather(first, tf.minimum(indices, head)),
                of_rest,
            )
        )
        # Few batches have one of those: the others are gathered once, and copied no more.
        return tf.cond(tf.reduce_any(is_first), with_first, no_autograph(lambda: of_rest))

    return rows


def _rows_before_a_tensor(array: np.ndarray) -> int | None:
    """None where no row that is to be shared can begin a tensor."""
    if array.nbytes < _SHARED_BYTES or not _is_shareable(array):
        return None
    begin, row = array.ctypes.data, array.nbytes // len(array)
    return next((n for n in range(min(_ALIGNMENT, len(array))) if (begin + n * row) % _ALIGNMENT == 0), None)

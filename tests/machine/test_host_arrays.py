"""Arrays as tensors, against NumPy, and the memory that it takes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, RandomAccessData, Shard
from launcher.machine.host_arrays import copied_tensor, rows_of

pytestmark = pytest.mark.slow

NUMBERS = np.arange(24)
READ_ONLY = np.arange(24, dtype=np.int16)
READ_ONLY.flags.writeable = False


def first_batch(array):
    shard = Shard(global_batch_size=8, num_replicas=1, first_replica=0, local_replicas=1, seed=0)
    data = RandomAccessData(train=ArrayExamples({"x": array}))
    return next(iter(data.train_batches(shard)))


@pytest.mark.parametrize(
    "array",
    [
        NUMBERS.astype(np.float32).reshape(2, 3, 4), NUMBERS.astype(">i4"), NUMBERS[1::2].astype(np.uint8),
        NUMBERS[::-3], READ_ONLY, np.float16(7).reshape([]), np.zeros([3, 0], np.float32), NUMBERS % 2 == 0,
        NUMBERS.astype(ml_dtypes.bfloat16), np.array(["a", "bc"]), NUMBERS + 1j,
    ],
    ids=lambda array: f"{array.dtype.str} {array.shape}",
)  # fmt: skip
def test_a_tensor_has_the_arrays_numbers_in_memory_of_its_own(array):
    before = array.copy()
    tensor = copied_tensor(array)
    if array.flags.writeable and array.dtype.kind in "fiu" and array.size:
        array[...] += 1
    assert tensor.shape == before.shape
    expected = before if before.dtype.kind != "U" else before.astype(bytes).astype(object)
    np.testing.assert_array_equal(tf.identity(tensor).numpy(), expected)


@pytest.mark.parametrize(
    # Less where the allocator gives back meanwhile what other tests have left; without a copy it is nothing.
    ("use", "least", "most"),
    [(copied_tensor, 100, 260), (first_batch, -60, 60)],
    ids=["copied", "first batch"],
)
def test_an_array_takes_its_memory_once_as_a_tensor_and_not_at_all_as_examples(use, least, most, peak_growth):
    use(np.ones(1, np.float32))
    array = np.ones([50_000_000], np.float32)
    with peak_growth() as grown:
        used = use(array)
    del used
    assert least * 10**6 <= grown[0] < most * 10**6


@pytest.mark.parametrize(
    ("shape", "offset", "is_copied"),
    [((4_300_000, 4), 16, False), ((17_000_000,), 0, False), ((270_000, 64), 16, True)],
)
def test_rows_of_a_large_array_are_read_where_it_lies_if_one_of_them_can_begin_a_tensor(shape, offset, is_copied):
    memory = np.empty(int(np.prod(shape)) * 4 + 128, np.uint8)
    begin = -memory.ctypes.data % 64 + offset
    array = memory[begin : begin + int(np.prod(shape)) * 4].view(np.int32).reshape(shape)
    array[...] = np.arange(array.size).reshape(shape)
    indices = np.array([0, 1, 2, 3, 4, 5, 63, 64, len(array) - 1, 2])
    rows = rows_of(array)
    np.testing.assert_array_equal(rows(tf.constant(indices)).numpy(), array[indices])
    array[-1] = -1
    assert (rows(tf.constant([len(array) - 1])).numpy() == -1).all() == (not is_copied)

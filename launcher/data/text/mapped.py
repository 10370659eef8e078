"""Examples in arrays that may be too large for memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, Batch, Examples


class MappedExamples:
    """Examples that stay on disk: what is fetched is read.

    Args:
      arrays: key to memory-mapped array [n, ...], all of one length.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = dict(arrays)
        self._length = len(next(iter(self._arrays.values())))
        size = sum(array.nbytes for array in self._arrays.values())
        self.needs_python = (
            f"have its rows held in memory, by a memory_limit_bytes of text_corpus or text_pairs of at least {size}"
        )

    def __len__(self) -> int:
        return self._length

    def fetch(self, indices: tf.Tensor) -> Batch:
        rows = tf.numpy_function(
            lambda chosen: [np.asarray(array[chosen]) for array in self._arrays.values()],
            [indices],
            [tf.as_dtype(array.dtype) for array in self._arrays.values()],
            stateful=False,
        )
        return {
            key: tf.ensure_shape(row, [indices.shape[0], *self._arrays[key].shape[1:]])
            for key, row in zip(self._arrays, rows, strict=True)
        }


def examples(arrays: Mapping[str, np.ndarray], memory_limit_bytes: int) -> Examples:
    """Rows held in memory if they take no more than `memory_limit_bytes`, else left on disk."""
    if sum(array.nbytes for array in arrays.values()) <= memory_limit_bytes:
        return ArrayExamples(arrays)
    return MappedExamples(arrays)

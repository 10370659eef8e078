"""Arrays that only the chief has, brought to every worker bit for bit, the way that gradients take.

TensorFlow's collectives add numbers, which would change a NaN's payload or the sign of a zero. So arrays travel as the
32-bit words they consist of: one replica of the chief gives its words, all others give zeros, and whole numbers are
added.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.checkpoints import array_of, record_of
from launcher.runtime.tensorflow import TfRuntime

CHUNK_BYTES = 16 * 2**20
_WORD_BYTES = 4


class FromChief:
    """The chief's side and the others' side of the same calls, which all workers make in the same order.

    A collective has `chunk_bytes`, a multiple of 4: a bound on the memory it takes besides the arrays.
    """

    def __init__(self, runtime: TfRuntime, *, is_chief: bool, chunk_bytes: int = CHUNK_BYTES):
        self._runtime = runtime
        self.is_chief = is_chief
        self._chunk_bytes = chunk_bytes

    def share(
        self, record: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns the chief's record, which JSON can hold, and its arrays everywhere; the others give nothing.

        It returns on the chief when every other worker has begun to take what was shared.
        """
        specs = {name: (np.shape(array), array.dtype.name) for name, array in (arrays or {}).items()}
        parts = [np.ascontiguousarray(array).reshape(-1) for array in (arrays or {}).values()]
        text = array_of([record, specs])
        size = np.array([text.nbytes], np.int64)
        self._send([size])
        if not self.is_chief:
            text = np.zeros(size[0], np.uint8)
        self._send([text])
        shared, specs = record_of(text)
        if not self.is_chief:
            parts = [
                np.zeros(math.prod(shape), tf.dtypes.as_dtype(dtype).as_numpy_dtype) for shape, dtype in specs.values()
            ]
        self._send(parts)
        return shared or {}, {name: part.reshape(specs[name][0]) for name, part in zip(specs, parts, strict=True)}

    def _send(self, parts: Sequence[np.ndarray]) -> None:
        """Fills the others' arrays, uint8 or of one number, with what is in the chief's."""
        parts = [part.view(np.uint8) for part in parts]
        total = sum(part.nbytes for part in parts)
        # All chunks are of one size, because each size is traced.
        chunk = np.zeros(min(self._chunk_bytes, -(-total // _WORD_BYTES) * _WORD_BYTES), np.uint8)
        for start in range(0, total, max(1, chunk.nbytes)):
            places = list(_overlaps(parts, start, start + chunk.nbytes))
            if self.is_chief:
                for part, place in places:
                    chunk[place] = part
            words = self._runtime.call(_words_of_first_replica, tf.constant(chunk.view(np.int32))).view(np.uint8)
            if not self.is_chief:
                for part, place in places:
                    part[...] = words[place]


def _overlaps(parts: Sequence[np.ndarray], start: int, stop: int) -> Iterator[tuple[np.ndarray, slice]]:
    """Stretches of the parts that, laid end to end, lie in bytes [start, stop), and where in that range."""
    offset = 0
    for part in parts:
        first, last = max(start, offset), min(stop, offset + part.nbytes)
        if first < last:
            yield part[first - offset : last - offset], slice(first - start, last - start)
        offset += part.nbytes


def _words_of_first_replica(words: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    mine = tf.where(tf.equal(context.replica_id_in_sync_group, 0), words, tf.zeros_like(words))
    return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

"""Lookups by Keras's `ops.take` and by `tf.gather` that read the rows of a table that they look up, and no others.

Keras's `Embedding` reads its table whole and takes rows of what it has read. A variable whose rows are updated by
themselves is copied by TensorFlow at each such read.
"""

import contextlib
import contextvars
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

# Leans on Keras: `keras.ops.take` looks this name up in its backend's module at each call. Tried with 3.8 to 3.15.
# Noticed by tests/step/test_table_rows.py. Then: see what `Embedding` calls.
from keras.src.backend import numpy as backend

from launcher.machine.no_autograph import no_autograph
from launcher.machine.replaced import Shared, put

_REAL, _GATHER = backend.take, tf.gather
_by_rows = Shared()
_counts: contextvars.ContextVar[tuple[int, Counter[int]] | None] = contextvars.ContextVar("_counts", default=None)


@contextlib.contextmanager
def by_rows() -> Iterator[None]:
    """A block in which a lookup along a variable's first axis reads the rows alone."""

    def stand(undo: contextlib.ExitStack) -> None:
        put(undo, backend, "take", _take)
        put(undo, tf, "gather", _gather)

    with _by_rows.standing(stand):
        yield


@contextlib.contextmanager
def counted(batch_rows: int) -> Iterator[Counter[int]]:
    """A block in which lookups by rows are counted, by the id of the table's variable: at most so many a step.

    Args:
      batch_rows: of the batch, where ids do not tell how many there are along their first axis.
    """
    counts = Counter[int]()
    before = _counts.set((batch_rows, counts))
    try:
        yield counts
    finally:
        _counts.reset(before)


def _take(x: Any, indices: Any, axis: int | None = None) -> Any:
    found = _rows(x, indices, from_the_end=True) if axis == 0 else None  # as Keras has it
    return _REAL(x, indices, axis) if found is None else found


@no_autograph
def _gather(params: Any, indices: Any, *others: Any, axis: Any = None, **named: Any) -> tf.Tensor:
    found = None if others or named or axis not in (None, 0) else _rows(params, indices)
    return _GATHER(params, indices, *others, axis=axis, **named) if found is None else found


def _rows(x: Any, indices: Any, *, from_the_end: bool = False) -> tf.Tensor | None:
    table = _here(x.value) if isinstance(x, keras.Variable) else None
    if table is None or isinstance(indices, tf.SparseTensor | tf.RaggedTensor):
        return None
    ids = tf.convert_to_tensor(indices)
    if ids.dtype not in (tf.int32, tf.int64):
        return None
    if (counting := _counts.get()) and ids.shape[1:].is_fully_defined():
        batch_rows, counts = counting
        counts[id(x)] += math.prod([batch_rows if size is None else size for size in ids.shape])
    return table.sparse_read(tf.where(ids < 0, ids + tf.cast(table.shape[0], ids.dtype), ids) if from_the_end else ids)


def _here(table: Any) -> Any:
    """A variable, or the copy of one that this replica has; None of a tensor, and outside of replicas.

    Of a variable with a copy on each replica, `tf.gather` would read the whole.
    """
    # A user's thread may come here, too, and outside of any replica.
    if not isinstance(table, tf.Variable) or tf.distribute.in_cross_replica_context():
        return None
    copies, handle = getattr(table, "values", (table,)), table.handle
    return next((copy for copy in copies if copy.handle is handle and hasattr(copy, "sparse_read")), None)

"""Rows: the gradient by a table of which a batch looks few rows up, by those rows alone.

The gradient of a lookup says the rows and what each of them gets, in the order of the ids; an id that stands twice has
two. Here they are added up by row, gathered from all replicas, and applied to the rows, so that a step costs what its
batch has and not what the table has. No shape depends on the ids, as XLA wants it: a row that repeats has its sum at
one place, and zeros at the others.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from launcher.machine.no_autograph import no_autograph

# Times that what all replicas look up in a step goes into a table whose gradient is kept by rows: from there on that
# costs less, on one and two replicas of a CPU, by descent and by Adagrad (4,096 rows of 64 numbers a step).
_SPARSE = 4
# Numbers of a table that all move, from which on a step is slow enough for that to be told.
_WORTH_A_WORD = 2**22


class Rows(NamedTuple):
    """The gradient by some rows of a table.

    Attributes:
      ids: int [n], which rows, each of the values' first axis; one may stand several times.
      values: [n, ...], what is to be added up by row.
    """

    ids: tf.Tensor
    values: tf.Tensor

    def whole(self, shape: Sequence[int]) -> tf.Tensor:
        """The dense gradient by a table of this shape."""
        return tf.scatter_nd(self.ids[:, None], self.values, tf.constant([*shape], self.ids.dtype))


@no_autograph
def rows_of(gradient: Any, shape: tf.TensorShape, num_lookups: int, parts: int) -> tuple[Rows | None, int]:
    """What a lookup's gradient by a table of this shape says, float32, and how many rows are looked up at most.

    None, and 0, where a dense gradient costs no more; None alone where there is only a dense one.

    Args:
      num_lookups: at most so many rows, if that is known; else 0.
      parts: batches of this size that a step puts together, of microbatches and replicas.
    """
    is_of_rows = isinstance(gradient, tf.IndexedSlices)
    num_lookups = (is_of_rows and gradient.indices.shape.num_elements()) or num_lookups
    if gradient is None or shape.rank < 2 or not num_lookups or _SPARSE * num_lookups * parts > shape[0]:
        return None, 0
    if not is_of_rows:
        return None, num_lookups
    values = tf.ensure_shape(tf.cast(gradient.values, tf.float32), [None, *shape[1:]])
    return Rows(gradient.indices, values), num_lookups


@no_autograph
def summed(rows: Rows) -> Rows:
    """The same in the order of the ids; a row that repeats has its sum at its first place, and zeros at the others."""
    order = tf.argsort(rows.ids, stable=True)
    rows = Rows(tf.gather(rows.ids, order), tf.gather(rows.values, order))
    is_first = tf.reshape(_is_first(rows.ids), [-1, *[1] * (rows.values.shape.rank - 1)])
    return Rows(rows.ids, tf.where(is_first, spread(rows), tf.zeros([], rows.values.dtype)))


@no_autograph
def spread(rows: Rows) -> tf.Tensor:
    """The values of rows in the order of their ids, of which one that repeats has its sum at each place."""
    number = tf.cumsum(tf.cast(_is_first(rows.ids), tf.int32)) - 1
    return tf.gather(tf.math.unsorted_segment_sum(rows.values, number, tf.size(rows.ids)), number)


@no_autograph
def _is_first(ids: tf.Tensor) -> tf.Tensor:
    return tf.concat([[True], ids[1:] != ids[:-1]], axis=0)


@no_autograph
def over_replicas(rows: Rows, dtype: tf.DType) -> Rows:
    """Sums by row over all replicas, float32, of what travels in `dtype`; on one replica it is rounded, too."""
    local = summed(rows)
    context, sent = tf.distribute.get_replica_context(), tf.cast(local.values, dtype)
    if context.num_replicas_in_sync == 1:
        return Rows(local.ids, tf.cast(sent, tf.float32))
    ids, values = (context.all_gather(tf.identity(one), axis=0) for one in (local.ids, sent))
    return summed(Rows(ids, tf.cast(tf.reshape(values, [-1, *sent.shape[1:]]), tf.float32)))


def describe(
    model: keras.Model,
    lookups: Mapping[int, int],
    by_rows: Collection[int],
    dtype: str,
    num_replicas: int,
    *,
    lazy: bool = False,
    averaged: bool = False,
) -> dict[str, str]:
    """Lines of the plan on tables of which a step looks few rows up.

    Args:
      lookups: rows that a replica looks up in a step, by the position of the trained variable.
      by_rows: those whose gradients are kept by rows.
      dtype: that gradients travel in.
      lazy: `train.lazy_embeddings`.
      averaged: whether there is a moving average of the weights.
    """
    lines = dict[str, str]()
    for place, count in lookups.items():
        table = model.trainable_variables[place]
        size, width = table.shape[0], math.prod(table.shape[1:])
        text = f"{table.path}: {count:,} of {size:,} rows a step on each replica"
        if place in by_rows:
            sent = count * (num_replicas - 1) * (width * tf.as_dtype(dtype).size + 4)
            text += f", by rows, {sent / 2**20:.2f} MiB sent by each replica" if sent else ", by rows"
            if lazy:
                text += "; the others stay as they are (train.lazy_embeddings), which is another function than Keras's"
            if averaged:
                text += "; its moving average moves as a whole"
        elif size * width >= _WORTH_A_WORD:
            text += (
                ", and all are updated: the optimizer moves them, or the table is used whole as well, as by an output "
                "layer. SGD, Adagrad or train.lazy_embeddings = True move only what is looked up"
            )
        else:
            continue
        lines[f"table {len(lines) + 1}"] = text
    return lines

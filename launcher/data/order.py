"""Which example stands at which position of the training stream: a pure function of (seed, position).

Position p of a run belongs to epoch p // size; inside an epoch the examples follow a permutation of their own. No
state is kept, so a run that resumes, or one that is split over other hosts, sees the same examples in the same order.
"""

from __future__ import annotations

import tensorflow as tf

from launcher.data.philox import philox, split_words
from launcher.machine.as_written import as_written

# The default of 4 in tf.random.experimental.index_shuffle is too few: over 60,000 positions, consecutive epochs are
# visibly correlated (chi-square of their differences 3,000 a degree of freedom). From 12 on, with seeds that are
# themselves well mixed, the permutations passed every test that true ones passed.
_SHUFFLE_ROUNDS = 12

# Keeps the random words of one purpose apart from those of another.
_ORDER, _EXAMPLE = 1, 2


@as_written
def shuffled(position: tf.Tensor, *, seed: int, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """The epoch and the example at each position of the training stream.

    Args:
      position: int64 [n], places in the endless stream, from 0.
      seed: the run's seed.
      size: number of examples of an epoch.

    Returns:
      epoch: int64 [n].
      index: int64 [n] in [0, size). Over the positions of one epoch, every index occurs once.
    """
    epoch = position // size
    words = philox(split_words(seed), (*split_words(epoch), tf.constant(_ORDER, tf.uint64), tf.zeros([], tf.uint64)))
    # The public op index_shuffle takes one seed a call only; this is the op under it, with one seed a position, because
    # a batch may span epochs.
    index = tf.raw_ops.RandomIndexShuffle(
        index=position % size,
        seed=tf.stack(words[:3], axis=-1),
        max_index=tf.constant(size - 1, tf.int64),
        rounds=_SHUFFLE_ROUNDS,
    )
    return epoch, tf.ensure_shape(index, position.shape)


@as_written
def example_seeds(*, seed: int, epoch: tf.Tensor | int, index: tf.Tensor) -> tf.Tensor:
    """A seed pair for each example, for augmentation: it changes with the run's seed, the epoch and the example only.

    Args:
      seed: the run's seed.
      epoch: int64 [n] or one number, below 2**32.
      index: int64 [n], the example in its data set.

    Returns:
      int32 [n, 2], fit for `launcher.data.philox.uniform` and for the `tf.random.stateless_*` functions.
    """
    counter = (*split_words(index), split_words(epoch)[0], tf.constant(_EXAMPLE, tf.uint64))
    words = tf.stack(philox(split_words(seed), counter)[:2], axis=-1)
    return tf.bitcast(tf.cast(words, tf.uint32), tf.int32)

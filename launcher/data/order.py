"""The example at each position of the training stream: a pure function of (seed, position).

Position p of a run belongs to epoch p // size; inside an epoch the examples follow a permutation of their own. No
state is kept, so a run that resumes, or one that is split over other hosts, sees the same examples in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from launcher.data.philox import philox, split_words
from launcher.machine.no_autograph import no_autograph

# The default of 4 in tf.random.experimental.index_shuffle is too few: over 60,000 positions, consecutive epochs are
# visibly correlated (chi-square of their differences 3,000 a degree of freedom). From 12 on, with seeds that are
# themselves well mixed, the permutations passed every test that true ones passed.
_SHUFFLE_ROUNDS = 12

# Keeps the random words of one purpose apart from those of another.
_ORDER, _EXAMPLE = 1, 2


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """Batches that a run leaves out; those that follow take their place.

    Batches count from 1, as steps do: without any left out, step n trains on batch n. What is left out behind a step
    changes nothing for the steps up to it, so a run may leave out more as it goes on.
    """

    ranges: tuple[tuple[int, int], ...] = ()  # first and last batch of each, ascending, with batches between them

    def with_ranges(self, more: Iterable[Iterable[int]]) -> LeftOut:
        """These and others, each a first and a last batch."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted([*self.ranges, *((int(first), int(last)) for first, last in more)]):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return LeftOut(tuple(joined))

    def batch_of(self, step: int) -> int:
        """The batch that a step trains on."""
        batch = step
        for first, last in self.ranges:
            if batch >= first:
                batch += last - first + 1
        return batch

    def drop_from(self, batches: tf.data.Dataset, *, first: int, parts: int) -> tf.data.Dataset:
        """Leaves out what is to be left out of consecutive batches, each in `parts` elements, from batch `first` on."""
        ranges = [(start, end) for start, end in self.ranges if end >= first]
        if not ranges:
            return batches
        starts, ends = (tf.constant(column, tf.int64) for column in zip(*ranges, strict=True))

        @no_autograph
        def is_kept(place: tf.Tensor, _: object) -> tf.Tensor:
            number = first + place // parts
            return ~tf.reduce_any((number >= starts) & (number <= ends))

        return batches.enumerate().filter(is_kept).map(no_autograph(lambda _, element: element))


ALL_IN = LeftOut()


@no_autograph
def shuffled(
    position: tf.Tensor, *, seed: int, size: int, epoch: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """The epoch and the example at each position of the training stream.

    Args:
      position: int64 [n], places in the endless stream, from 0.
      size: number of examples of an epoch.
      epoch: int64 scalar, where all of them are of one; those words are then drawn by one operation.

    Returns:
      epoch: int64 [n], or the scalar.
      index: int64 [n] in [0, size). Over the positions of one epoch, every index occurs once.
    """
    if epoch is None:
        epoch = position // size
        counter = (*split_words(epoch), tf.constant(_ORDER, tf.uint64), tf.zeros([], tf.uint64))
        words = tf.stack(philox(split_words(seed), counter)[:3], axis=-1)
    else:
        words = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[3],
            key=[seed & (2**64 - 1)],
            counter=[tf.cast(epoch, tf.uint64), _ORDER],
            alg=tf.random.Algorithm.PHILOX.value,
            dtype=tf.uint32,
        )
    # The public op index_shuffle takes one seed a call only; this is the op under it, with one seed a position, because
    # a batch may span epochs.
    # Leans on TensorFlow: RandomIndexShuffle takes a seed for each index. Noticed by tests/data/test_order.py. Then:
    # write the permutation in operations, as `philox` is; another order would change resumed runs.
    index = tf.raw_ops.RandomIndexShuffle(
        index=position % size,
        seed=words,
        max_index=tf.constant(size - 1, tf.int64),
        rounds=_SHUFFLE_ROUNDS,
    )
    return epoch, tf.ensure_shape(index, position.shape)


@no_autograph
def example_seeds(*, seed: int, epoch: tf.Tensor | int, index: tf.Tensor) -> tf.Tensor:
    """A seed pair for each example, for augmentation: it changes with the run's seed, the epoch and the example only.

    Args:
      epoch: int64 [n] or one number, below 2**32.
      index: int64 [n], the example in its data set.

    Returns:
      int32 [n, 2], fit for `launcher.data.philox.uniform` and for the `tf.random.stateless_*` functions.
    """
    counter = (*split_words(index), split_words(epoch)[0], tf.constant(_EXAMPLE, tf.uint64))
    words = tf.stack(philox(split_words(seed), counter)[:2], axis=-1)
    return tf.bitcast(tf.cast(words, tf.uint32), tf.int32)

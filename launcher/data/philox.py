"""Random numbers that are a pure function of (key, counter), computed for a whole batch of keys at once.

`tf.random.stateless_uniform` takes one seed a call. Augmentation needs one seed an example, so that an example is
augmented the same way on any topology, and one call a batch, so that it is fast. The generator is the same Philox
4x32-10 that TensorFlow uses inside (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): it passes
BigCrush, and its published known answers are this module's test.
"""

import functools
from collections.abc import Callable

import tensorflow as tf

from launcher.machine.no_autograph import no_autograph

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW_32 = 0xFFFFFFFF

Words = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


@no_autograph
def philox(key: tuple[tf.Tensor, tf.Tensor], counter: Words) -> Words:
    """Philox 4x32-10: four words, uniform and independent over keys and counters.

    All words are uint64, below 2**32, of shapes that broadcast to that of the result.
    """
    words = (*key, *counter)
    shapes = tuple(None if word.shape.rank is None else tuple(word.shape.as_list()) for word in words)
    return _traced(shapes)(*words)


@functools.cache
def _traced(shapes: tuple[tuple[int | None, ...] | None, ...]) -> Callable[..., Words]:
    """One call in the graphs that use it, which are many, instead of some 150 operations in each."""
    return tf.function(_rounds, autograph=False, input_signature=[tf.TensorSpec(shape, tf.uint64) for shape in shapes])


def _rounds(k0: tf.Tensor, k1: tf.Tensor, c0: tf.Tensor, c1: tf.Tensor, c2: tf.Tensor, c3: tf.Tensor) -> Words:
    low = tf.constant(_LOW_32, tf.uint64)
    half = tf.constant(32, tf.uint64)
    m0, m1 = (tf.constant(value, tf.uint64) for value in _MULTIPLIERS)
    for turn in range(_ROUNDS):
        if turn:
            k0, k1 = ((k + tf.constant(w, tf.uint64)) & low for k, w in zip((k0, k1), _WEYL, strict=True))
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (
            tf.bitwise.right_shift(p1, half) ^ c1 ^ k0,
            p1 & low,
            tf.bitwise.right_shift(p0, half) ^ c3 ^ k1,
            p0 & low,
        )
    return c0, c1, c2, c3


@no_autograph
def split_words(value: tf.Tensor | int) -> tuple[tf.Tensor, tf.Tensor]:
    """The low and the high 32 bits of an int64 as uint64; a negative number counts as its two's complement."""
    if isinstance(value, int):
        return tf.constant(value & _LOW_32, tf.uint64), tf.constant((value >> 32) & _LOW_32, tf.uint64)
    unsigned = tf.bitcast(tf.cast(value, tf.int64), tf.uint64)
    return unsigned & tf.constant(_LOW_32, tf.uint64), tf.bitwise.right_shift(unsigned, tf.constant(32, tf.uint64))


@no_autograph
def uniform(seeds: tf.Tensor, count: int, *, purpose: int) -> tf.Tensor:
    """Uniform numbers for each of a batch of seed pairs.

    Args:
      seeds: int32 [n, 2], one pair an example; see `launcher.data.order.example_seeds`.
      count: how many numbers an example needs.
      purpose: numbers of different purposes are independent although the seeds are the same.

    Returns:
      float32 [n, count], multiples of 2**-24 in [0, 1).
    """
    blocks = -(-count // 4)
    low = tf.constant(_LOW_32, tf.uint64)
    key = tf.bitcast(tf.cast(seeds, tf.int64), tf.uint64) & low
    zero = tf.zeros([], tf.uint64)
    block = tf.bitcast(tf.range(blocks, dtype=tf.int64)[tf.newaxis], tf.uint64)
    counter = (block, tf.constant(purpose, tf.uint64), zero, zero)
    words = tf.stack(philox((key[:, :1], key[:, 1:]), counter), axis=-1)
    words = tf.reshape(words, [-1, 4 * blocks])[:, :count]
    return as_uniform(words)


def as_uniform(words: tf.Tensor) -> tf.Tensor:
    """float32 in [0, 1) of random 32-bit words, which uint64 hold."""
    # A float32 holds 24 bits exactly: more of the word would round up to 1.
    return tf.cast(tf.bitwise.right_shift(words, tf.constant(8, tf.uint64)), tf.float32) * 2.0**-24

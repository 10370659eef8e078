"""Attention in blocks: the scores of all queries and keys never exist at once, forward or backward.

Blocks of keys are met one after another with a softmax that is corrected as it goes (Milakov and Gimelshein 2018, arXiv
1805.02867), and the backward pass computes the scores again instead of keeping them (Dao et al. 2022, FlashAttention,
arXiv 2205.14135). It is one loop over a list of blocks that is known when the graph is made, so its turns can be
counted. A loop lets XLA keep a block's scores on the chip; written out, many blocks would be alive at once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from .. import products
from .positions import Visibility, same_segment

COMPUTED_AGAIN = "computed_again"
"""Name scope of what the backward pass computes again: no part of a model's FLOPs."""

_FAR_BELOW = -1e30  # of any float32 score; its exponential is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of the scores of attention, [batch, heads, queries, keys]. The last one may be padded."""

    batch: int
    queries: int
    keys: int
    rows: int  # of the batch that are taken at once, a divisor of it
    query_block: int  # positions
    key_block: int
    causal: bool = False  # blocks that lie above the diagonal are left out

    def turns(self) -> list[tuple[int, int, int, int]]:
        """Numbers of each block in which a query may see a key, by `_Turn`'s names; keys vary fastest, from 0."""
        query_blocks, key_blocks = -(-self.queries // self.query_block), -(-self.keys // self.key_block)
        return [
            (of_query, of_key, rows * query_blocks + of_query, rows * key_blocks + of_key)
            for rows in range(self.batch // self.rows)
            for of_query in range(query_blocks)
            for of_key in range(key_blocks)
            if not self.causal or of_key * self.key_block < (of_query + 1) * self.query_block
        ]

    def cut(self, whole: tf.Tensor, size: int, groups: int) -> tf.Tensor:
        """[batch, length, heads, width] as [all blocks, rows, groups, heads a group * size, width]."""
        _, length, heads, width = whole.shape
        count = -(-length // size)
        whole = tf.pad(whole, [[0, 0], [0, count * size - length], [0, 0], [0, 0]])
        whole = tf.reshape(whole, [-1, self.rows, count, size, groups, heads // groups, width])
        blocks = tf.transpose(whole, [0, 2, 1, 4, 5, 3, 6])
        return tf.reshape(blocks, [-1, self.rows, groups, heads // groups * size, width])

    def join(self, blocks: tf.Tensor, size: int, length: int) -> tf.Tensor:
        """The whole that was cut."""
        _, rows, groups, positions, width = blocks.shape
        count, shared = -(-length // size), positions // size
        blocks = tf.reshape(blocks, [-1, count, rows, groups, shared, size, width])
        whole = tf.transpose(blocks, [0, 2, 1, 5, 3, 4, 6])
        return tf.reshape(whole, [self.batch, count * size, groups * shared, width])[:, :length]


class _Turn(NamedTuple):
    """Numbers of a block of scores, of its queries and keys in their rows, and of these among all blocks."""

    number: tf.Tensor
    of_query: tf.Tensor
    of_key: tf.Tensor
    at_query: tf.Tensor
    at_key: tf.Tensor


def attend_in_blocks(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    visible: Visibility,
    blocks: Blocks,
    *,
    rate: float = 0.0,
    seed: tf.Tensor | None = None,
    compiling: bool = False,
) -> tf.Tensor:
    """Scaled dot-product attention as of `attention.attend`, in memory that grows with the length and not its square.

    Softmax and sums are float32 (float64 of float64). A query that may look nowhere gets zeros and gives no gradient.

    Args:
        query: [batch, queries, heads, width], of static shape.
        key: [batch, keys, key heads, width]; heads is a multiple of key heads.
        value: Like `key`.
        visible: Which positions see which.
        blocks: How to divide the scores.
        rate: Share of attention weights that `seed` drops. Which ones depends on the blocks, too.
        seed: Integers [2], or None to drop nothing. The backward pass draws the same again.
        compiling: Whether XLA compiles this: 16-bit products then stay in the float32 in which they are summed.

    Returns:
        [batch, queries, heads, width] in the dtype of `value`.
    """
    groups, shared, width = key.shape[2], query.shape[2] // key.shape[2], query.shape[3]
    sums = tf.float64 if query.dtype == tf.float64 else tf.float32
    scale, zero, far_below = tf.constant(width**-0.5, query.dtype), tf.zeros([], sums), tf.constant(_FAR_BELOW, sums)
    turns = blocks.turns()
    table = tf.constant(np.array(turns, np.int32))
    both = (visible.query_segments, blocks.query_block), (visible.key_segments, blocks.key_block)
    query_segments, key_segments = (
        blocks.cut(segments[:, :, None, None], size, 1)[:, :, 0, :, 0] for segments, size in both
    )

    def loop(body: Callable[..., tuple[Any, ...]], *state: Any) -> tuple[Any, ...]:
        """Has `body(turn, *state)` make the next state, for each of `Blocks.turns`."""

        def one(number: tf.Tensor, *state: Any) -> tuple[Any, ...]:
            return (number + 1, *body(_Turn(number, *tf.unstack(table[number])), *state))

        start = (tf.constant(0), *state)
        return tf.while_loop(lambda number, *_: number < len(turns), one, start, parallel_iterations=1)[1:]

    def product(one: tf.Tensor, other: tf.Tensor, **transposed: bool) -> tf.Tensor:
        if compiling or one.dtype.size > 2:
            return products.product(one, other, compiling=compiling, **transposed)
        # The kernels of 16 bits are the fast ones; they round their products.
        return tf.cast(tf.matmul(one, other, **transposed), tf.float32)

    def scores_of(turn: _Turn, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """[rows, groups, shared * query_block, key_block], far below all others where a query may not look."""
        # In the scores' own shape, all heads of a group one after another: XLA would write the mask of another shape to
        # memory, and copy it for each head.
        of_heads = tf.tile(query_segments[turn.at_query], [1, shared])
        allowed = same_segment(of_heads, key_segments[turn.at_key])
        if blocks.causal:
            later = turn.of_query * blocks.query_block + tf.range(shared * blocks.query_block) % blocks.query_block
            sooner = turn.of_key * blocks.key_block + tf.range(blocks.key_block)
            allowed &= later[:, None] >= sooner[None, :]
        return tf.where(allowed[:, None], product(queries, keys, transpose_b=True), far_below)

    def drop(weights: tf.Tensor, turn: _Turn) -> tf.Tensor:
        """Drops a share of a block's weights, or of their gradients, and scales the rest; the same ones each time."""
        if seed is None or not rate:
            return weights
        own = tf.random.experimental.stateless_fold_in(seed, turn.number)
        draws = tf.random.stateless_uniform(weights.shape, own, dtype=tf.float32)
        return tf.where(draws >= rate, weights * tf.constant(1.0 / (1.0 - rate), sums), zero)

    @tf.custom_gradient
    def attended(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        queries = blocks.cut(query * scale, blocks.query_block, groups)
        keys, values = (blocks.cut(each, blocks.key_block, groups) for each in (key, value))

        def ahead(turn: _Turn, highest: tf.Tensor, total: tf.Tensor, weighted: tf.Tensor, *stores: Any) -> tuple:
            scores = scores_of(turn, queries[turn.at_query], keys[turn.at_key])
            first = turn.of_key == 0
            highest = tf.where(first, far_below, highest)
            new = tf.maximum(highest, tf.reduce_max(scores, -1, keepdims=True))
            weights, before = tf.exp(scores - new), tf.where(first, zero, tf.exp(highest - new))
            total = total * before + tf.reduce_sum(weights, -1, keepdims=True)
            dropped = tf.cast(drop(weights, turn), value.dtype)
            weighted = weighted * before + product(dropped, values[turn.at_key])
            # Not `new > …`, which would make zeros of what is not a number.
            blind = new < _FAR_BELOW / 2
            outputs = tf.cast(tf.where(blind, zero, weighted / total), value.dtype)
            # The exponential of any score less this is 0 for a query that sees nothing.
            logs = tf.where(blind, -far_below, new + tf.math.log(total))
            pairs = zip(stores, (outputs, logs), strict=True)
            return new, total, weighted, *(store.write(turn.at_query, each) for store, each in pairs)

        column, block = queries[..., :1], tf.zeros(queries.shape[1:], sums)
        stores = _store(queries, value.dtype), _store(column, sums)
        *_, outputs, logs = loop(ahead, block[..., :1], block[..., :1], block, *stores)
        outputs, logs = outputs.stack(), logs.stack()

        def gradients(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            upstream = blocks.cut(upstream, blocks.query_block, groups)
            shift = tf.reduce_sum(tf.cast(upstream, sums) * tf.cast(outputs, sums), -1, keepdims=True)

            def back(turn: _Turn, by_query: tf.Tensor, by_queries: Any, by_keys: Any, by_values: Any) -> tuple:
                at, at_key = turn.at_query, turn.at_key
                query_block, key_block, by_outputs = queries[at], keys[at_key], upstream[at]
                with tf.name_scope(COMPUTED_AGAIN):
                    scores = scores_of(turn, query_block, key_block)
                weights = tf.exp(scores - logs[at])
                dropped = tf.cast(drop(weights, turn), value.dtype)
                by_value = product(dropped, by_outputs, transpose_a=True)
                by_weight = drop(product(by_outputs, values[at_key], transpose_b=True), turn)
                by_score = tf.cast(weights * (by_weight - shift[at]), query.dtype)
                by_key = product(by_score, query_block, transpose_a=True)
                by_query = tf.where(turn.of_key == 0, zero, by_query) + product(by_score, key_block)
                return (
                    by_query,
                    by_queries.write(at, tf.cast(by_query, query.dtype)),
                    by_keys.write(at_key, by_keys.read(at_key) + by_key),  # what was not yet written is zeros
                    by_values.write(at_key, by_values.read(at_key) + by_value),
                )

            stores = _store(queries, query.dtype), _store(keys, sums), _store(values, sums)
            _, *found = loop(back, block, *stores)
            by_query, by_key, by_value = (store.stack() for store in found)
            return (
                blocks.join(by_query, blocks.query_block, blocks.queries) * scale,
                tf.cast(blocks.join(by_key, blocks.key_block, blocks.keys), key.dtype),
                tf.cast(blocks.join(by_value, blocks.key_block, blocks.keys), value.dtype),
            )

        return blocks.join(outputs, blocks.query_block, blocks.queries), gradients

    return attended(query, key, value)


def _store(like: tf.Tensor, dtype: tf.DType) -> tf.TensorArray:
    return tf.TensorArray(dtype, size=like.shape[0], element_shape=like.shape[1:], clear_after_read=False)

"""Attention in blocks: the scores of all queries and keys never exist at once, forward or backward.

Blocks of keys are met one after another with a softmax that is corrected as it goes (Milakov and Gimelshein 2018, arXiv
1805.02867), and the backward pass computes the scores again instead of keeping them (Dao et al. 2022, FlashAttention,
arXiv 2205.14135). It is one loop over a list of blocks that is known when the graph is made, so its turns can be
counted. A loop lets XLA keep a block's scores on the chip; written out, many blocks would be alive at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from models.products import product
from models.transformer.positions import Visibility, same_segment

COMPUTED_AGAIN = "computed_again"
"""Name scope of what the backward pass computes again: no part of a model's FLOPs."""

_FAR_BELOW = -1e30  # of any float32 score; its exponential is 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the scores of attention, [batch, heads, queries, keys], are divided. The last block may be padded."""

    batch: int
    queries: int
    keys: int
    rows: int  # of the batch that are taken at once, a divisor of it
    query_block: int  # positions
    key_block: int
    causal: bool = False  # blocks that lie above the diagonal are left out

    @property
    def query_blocks(self) -> int:
        """In a row."""
        return -(-self.queries // self.query_block)

    @property
    def key_blocks(self) -> int:
        """In a row."""
        return -(-self.keys // self.key_block)

    def turns(self) -> list[tuple[int, int, int]]:
        """(rows, queries, keys), by number, of each block in which a query may see a key. Keys vary fastest, from 0."""
        return [
            (rows, of_query, of_key)
            for rows in range(self.batch // self.rows)
            for of_query in range(self.query_blocks)
            for of_key in range(self.key_blocks)
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
    groups, scale = key.shape[2], query.shape[3] ** -0.5
    sums = tf.float64 if query.dtype == tf.float64 else tf.float32
    turn = _Turn(visible, blocks, query.shape[2] // groups, rate, seed, sums, compiling)

    @tf.custom_gradient
    def attended(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        scaled = blocks.cut(query * tf.constant(scale, query.dtype), blocks.query_block, groups)
        keys, values = (blocks.cut(each, blocks.key_block, groups) for each in (key, value))
        outputs, logs = _forward(turn, scaled, keys, values)

        def gradients(upstream: tf.Tensor) -> tuple[tf.Tensor, ...]:
            upstream = blocks.cut(upstream, blocks.query_block, groups)
            by_query, by_key, by_value = _backward(turn, scaled, keys, values, outputs, logs, upstream)
            return (
                blocks.join(by_query, blocks.query_block, blocks.queries) * tf.constant(scale, query.dtype),
                tf.cast(blocks.join(by_key, blocks.key_block, blocks.keys), key.dtype),
                tf.cast(blocks.join(by_value, blocks.key_block, blocks.keys), value.dtype),
            )

        return blocks.join(outputs, blocks.query_block, blocks.queries), gradients

    return attended(query, key, value)


class _Turn:
    """What the turns of the forward and of the backward loop share: both compute the scores of a block.

    A key head has `shared` query heads. All else is as for `attend_in_blocks`.
    """

    def __init__(
        self,
        visible: Visibility,
        blocks: Blocks,
        shared: int,
        rate: float,
        seed: tf.Tensor | None,
        sums: tf.DType,
        compiling: bool,
    ) -> None:
        self.blocks, self.sums = blocks, sums
        self._shared, self._rate, self._seed, self._compiling = shared, rate, seed, compiling
        both = (visible.query_segments, blocks.query_block), (visible.key_segments, blocks.key_block)
        self._query_segments, self._key_segments = (
            blocks.cut(segments[:, :, None, None], size, 1)[:, :, 0, :, 0] for segments, size in both
        )

    def loop(self, body: Callable[..., tuple[Any, ...]], state: tuple[Any, ...]) -> tuple[Any, ...]:
        """Has `body(number, rows, of_query, of_key, *state)` make the next state, for each of `Blocks.turns`."""
        turns = self.blocks.turns()
        table = tf.constant(np.array(turns, np.int32))

        def one(number: tf.Tensor, *state: Any) -> tuple[Any, ...]:
            return (number + 1, *body(number, *tf.unstack(table[number]), *state))

        start = (tf.constant(0), *state)
        return tf.while_loop(lambda number, *_: number < len(turns), one, start, parallel_iterations=1)[1:]

    def places(self, rows: tf.Tensor, of_query: tf.Tensor, of_key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Where the block's queries and keys stand among all blocks."""
        return rows * self.blocks.query_blocks + of_query, rows * self.blocks.key_blocks + of_key

    def product(self, one: tf.Tensor, other: tf.Tensor, **transposed: bool) -> tf.Tensor:
        if self._compiling or one.dtype.size > 2:
            return product(one, other, compiling=self._compiling, **transposed)
        # The kernels of 16 bits are the fast ones; they round their products.
        return tf.cast(tf.matmul(one, other, **transposed), tf.float32)

    def scores(
        self, query: tf.Tensor, key: tf.Tensor, rows: tf.Tensor, of_query: tf.Tensor, of_key: tf.Tensor
    ) -> tf.Tensor:
        """[rows, groups, shared * query_block, key_block], far below all others where a query may not look."""
        blocks = self.blocks
        at_query, at_key = self.places(rows, of_query, of_key)
        # In the scores' own shape, all heads of a group one after another: XLA would write the mask of another shape to
        # memory, and copy it for each head.
        of_heads = tf.tile(self._query_segments[at_query], [1, self._shared])
        allowed = same_segment(of_heads, self._key_segments[at_key])
        if blocks.causal:
            queries = of_query * blocks.query_block + tf.range(self._shared * blocks.query_block) % blocks.query_block
            keys = of_key * blocks.key_block + tf.range(blocks.key_block)
            allowed &= queries[:, None] >= keys[None, :]
        found = self.product(query, key, transpose_b=True)
        return tf.where(allowed[:, None], found, self.constant(_FAR_BELOW))

    def drop(self, weights: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        """Drops a share of a block's weights, or of their gradients, and scales the rest; the same ones each time."""
        if self._seed is None or not self._rate:
            return weights
        seed = tf.random.experimental.stateless_fold_in(self._seed, number)
        draws = tf.random.stateless_uniform(weights.shape, seed, dtype=tf.float32)
        return tf.where(draws >= self._rate, weights * self.constant(1.0 / (1.0 - self._rate)), self.constant(0.0))

    def constant(self, value: float) -> tf.Tensor:
        return tf.constant(value, self.sums)

    def zeros(self, *shape: int) -> tf.Tensor:
        return tf.zeros(shape, self.sums)


def _forward(turn: _Turn, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Outputs like `query`, and the logarithms of the softmax's sums [..., 1]; all are cut in blocks."""
    one_query = query.shape[1:-1]

    def body(
        number: tf.Tensor, rows: tf.Tensor, of_query: tf.Tensor, of_key: tf.Tensor, highest: tf.Tensor,
        total: tf.Tensor, sums: tf.Tensor, outputs: tf.TensorArray, logs: tf.TensorArray,
    ) -> tuple[Any, ...]:  # fmt: skip
        at_query, at_key = turn.places(rows, of_query, of_key)
        scores = turn.scores(query[at_query], key[at_key], rows, of_query, of_key)
        first = of_key == 0
        highest = tf.where(first, turn.constant(_FAR_BELOW), highest)
        new = tf.maximum(highest, tf.reduce_max(scores, -1, keepdims=True))
        weights, before = tf.exp(scores - new), tf.where(first, turn.constant(0.0), tf.exp(highest - new))
        total = total * before + tf.reduce_sum(weights, -1, keepdims=True)
        dropped = tf.cast(turn.drop(weights, number), value.dtype)
        sums = sums * before + turn.product(dropped, value[at_key])
        # Not `new > …`, which would make zeros of what is not a number.
        blind = new < _FAR_BELOW / 2
        outputs = outputs.write(at_query, tf.cast(tf.where(blind, turn.constant(0.0), sums / total), value.dtype))
        # The exponential of any score less this is 0 for a query that sees nothing.
        logs = logs.write(at_query, tf.where(blind, turn.constant(-_FAR_BELOW), new + tf.math.log(total)))
        return new, total, sums, outputs, logs

    one, whole = turn.zeros(*one_query, 1), turn.zeros(*one_query, value.shape[-1])
    stores = _store(query.shape[0], whole.shape, value.dtype), _store(query.shape[0], one.shape, turn.sums)
    *_, outputs, logs = turn.loop(body, (one, one, whole, *stores))
    return outputs.stack(), logs.stack()


def _backward(
    turn: _Turn, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, outputs: tf.Tensor, logs: tf.Tensor,
    upstream: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:  # fmt: skip
    """Gradients by query (in its dtype), key and value (as they are summed) from those by the outputs."""
    shift = tf.reduce_sum(tf.cast(upstream, turn.sums) * tf.cast(outputs, turn.sums), -1, keepdims=True)

    def body(
        number: tf.Tensor, rows: tf.Tensor, of_query: tf.Tensor, of_key: tf.Tensor, by_query: tf.Tensor,
        by_queries: tf.TensorArray, by_keys: tf.TensorArray, by_values: tf.TensorArray,
    ) -> tuple[Any, ...]:  # fmt: skip
        at_query, at_key = turn.places(rows, of_query, of_key)
        queries, keys, of_outputs = query[at_query], key[at_key], upstream[at_query]
        with tf.name_scope(COMPUTED_AGAIN):
            scores = turn.scores(queries, keys, rows, of_query, of_key)
        weights = tf.exp(scores - logs[at_query])
        dropped = tf.cast(turn.drop(weights, number), value.dtype)
        by_value = turn.product(dropped, of_outputs, transpose_a=True)
        by_weight = turn.drop(turn.product(of_outputs, value[at_key], transpose_b=True), number)
        by_score = tf.cast(weights * (by_weight - shift[at_query]), query.dtype)
        by_key = turn.product(by_score, queries, transpose_a=True)
        by_query = tf.where(of_key == 0, turn.constant(0.0), by_query) + turn.product(by_score, keys)
        return (
            by_query,
            by_queries.write(at_query, tf.cast(by_query, query.dtype)),
            by_keys.write(at_key, by_keys.read(at_key) + by_key),
            by_values.write(at_key, by_values.read(at_key) + by_value),
        )

    # What was not yet written is read as zeros.
    stores = [_store(each.shape[0], each.shape[1:], turn.sums) for each in (key, value)]
    state = (turn.zeros(*query.shape[1:]), _store(query.shape[0], query.shape[1:], query.dtype), *stores)
    _, by_query, by_key, by_value = turn.loop(body, state)
    return by_query.stack(), by_key.stack(), by_value.stack()


def _store(blocks: int, shape: Any, dtype: tf.DType) -> tf.TensorArray:
    return tf.TensorArray(dtype, size=blocks, element_shape=shape, clear_after_read=False)

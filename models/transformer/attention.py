"""Scaled dot-product attention and the multi-head layer with its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla

from .attention_form import Form
from .attention_kernel import KERNELS, attend_by_kernel, unfit
from .blockwise_attention import attend_in_blocks
from .layers import Dropout, products, projection, sizes
from .positions import Visibility, rotate

Cache = dict[str, tf.Tensor]


def attend(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    allowed: tf.Tensor | None = None,
    drop: Callable[[tf.Tensor], tf.Tensor] | None = None,
    keeps_axes: bool = False,
    unrounded: bool = False,
    rounded: bool = False,
) -> tf.Tensor:
    """Scaled dot-product attention (Vaswani et al. 2017, section 3.2.1) of all positions at once.

    TensorFlow has no fused kernel to call: `keras.ops.dot_product_attention` refuses `flash_attention` on its backend
    and is plain products too, which in float16 overflow before the scale and copy shared keys. So these are plain
    products everywhere, and what stands between them is left to XLA to fuse (`jit_compile`).

    The softmax is float32 whatever the dtype of the inputs; the scale is applied to the query, before a 16-bit
    product could overflow. With fewer key than query heads, consecutive query heads share one (grouped-query
    attention, Ainslie et al. 2023, arXiv 2305.13245), and no key is copied.

    Args:
        query: [batch, queries, heads, width].
        key: [batch, keys, key heads, width]; heads is a multiple of key heads.
        value: Like `key`.
        allowed: bool, broadcast to [batch, queries, keys]: where a query may look; None is everywhere. A query that
            may look nowhere gets zeros.
        drop: Dropout of the attention weights [batch, key heads, heads a key head, queries, keys], or None.
        keeps_axes: Whether products leave the axes where they are, see `Form.keeps_axes`.
        unrounded: Whether 16-bit scores are not rounded before the softmax. A TPU multiplies such float32 products in
            one pass of 16 bits; elsewhere they cost what float32 costs.
        rounded: Whether the softmax's gradient is made of the weights in the dtype of `value`, as the next product has
            them, so that float32 ones are not kept beside them. Needs XLA.

    Returns:
        [batch, queries, heads, width] in the dtype of `value`.
    """
    batch, queries, heads, width = sizes(query)
    groups = sizes(key)[2]
    shared = heads // groups
    grouped = tf.reshape(query * width**-0.5, [batch, queries, groups, shared, width])
    key = tf.cast(key, grouped.dtype)
    if unrounded and grouped.dtype.size == 2:
        grouped, key = tf.cast(grouped, tf.float32), tf.cast(key, tf.float32)
    if keeps_axes:
        scores = tf.einsum("bqgsd,bkgd->bgsqk", grouped, key)
    else:
        # Batches of plain matrix products: einsum over the same axes took longer on a CPU, most of all in float16.
        rows, keys = [batch, groups, shared * queries], sizes(key)[1]
        each_row = tf.reshape(tf.transpose(grouped, [0, 2, 3, 1, 4]), [*rows, width])
        scores = tf.matmul(each_row, tf.transpose(key, [0, 2, 1, 3]), transpose_b=True)
        scores = tf.reshape(scores, [batch, groups, shared, queries, keys])
    weights = (_softmax_kept_rounded if rounded else _softmax)(scores, allowed, value.dtype)
    if drop is not None:
        weights = drop(weights)
    if keeps_axes:
        outputs = tf.einsum("bgsqk,bkgd->bqgsd", weights, value)
    else:
        outputs = tf.matmul(tf.reshape(weights, [*rows, keys]), tf.transpose(value, [0, 2, 1, 3]))
        outputs = tf.transpose(tf.reshape(outputs, [batch, groups, shared, queries, -1]), [0, 3, 1, 2, 4])
    outputs = tf.reshape(outputs, [batch, queries, heads, width])
    if allowed is None:
        return outputs
    # All keys forbidden, the softmax was even over them: finite, as its gradients are, and not to be used.
    return tf.where(tf.reduce_any(allowed, axis=-1)[:, :, None, None], outputs, tf.zeros([], outputs.dtype))


_FAR_BELOW = -1e30  # of any float32 score; its exponential is 0


def _softmax(scores: tf.Tensor, allowed: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
    scores = tf.cast(scores, tf.float32)
    if allowed is not None:
        scores = tf.where(allowed[:, None, None, :, :], scores, _FAR_BELOW)
    return tf.cast(tf.nn.softmax(scores), dtype)


def _softmax_kept_rounded(scores: tf.Tensor, allowed: tf.Tensor | None, dtype: tf.DType) -> tf.Tensor:
    @tf.custom_gradient
    def run(scores: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        # XLA would see through the pair of casts and keep the float32 weights.
        (weights,) = tfxla.optimization_barrier(_softmax(scores, allowed, dtype))

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            of_weights, kept = tf.cast(upstream, tf.float32), tf.cast(weights, tf.float32)
            mean = tf.reduce_sum(of_weights * kept, axis=-1, keepdims=True)
            return tf.cast((of_weights - mean) * kept, scores.dtype)

        return weights, gradient

    return run(scores)


class Attention(keras.layers.Layer):
    """Multi-head attention without biases, with a cache for decoding.

    Args:
        width: Of the inputs and outputs.
        heads: Query heads; `width` is a multiple of it.
        kv_heads: Key and value heads, a divisor of `heads`; None is as many.
        rotary: Whether queries and keys are rotated by their positions.
        dropout: Share of attention weights that training drops.
        output_scale: Factor of the initial output projection.
        smeared_keys: Whether each key is mixed with the one before it, by a share that each head learns: what follows
            an earlier occurrence of a token is then found by one layer, where it else takes two, and text is copied
            from its context much earlier in training (Olsson et al. 2022, arXiv 2209.11895). Needs positions.

    Attributes:
        form: How `call` computes; whoever trains the model may set another one before it is traced. Where it asks for
            a kernel and none fits, or XLA does not compile, it is as with "auto".
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        rotary: bool = False,
        dropout: float = 0.0,
        output_scale: float = 1.0,
        smeared_keys: bool = False,
        name: str,
    ) -> None:
        super().__init__(name=name)
        self.form = Form()
        self._heads, self._kv_heads, self._head_width = heads, kv_heads or heads, width // heads
        self._width, self._rotary, self._smeared = width, rotary, smeared_keys
        of_heads, of_kv_heads = heads * self._head_width, self._kv_heads * self._head_width
        # By way of `form`, which may be another one later.
        self.query, self.key, self.value, self.output_projection = (
            projection(units, name=name, scale=scale, keeps_axes=lambda: self.form.keeps_axes())
            for name, units, scale in (
                ("query", of_heads, 1.0),
                ("key", of_kv_heads, 1.0),
                ("value", of_kv_heads, 1.0),
                ("output", width, output_scale),
            )
        )
        self.dropout = Dropout(dropout, name="dropout")
        self.layers = [self.query, self.key, self.value, self.output_projection, self.dropout]

    def build(self, *_: Any) -> None:
        for layer in (self.query, self.key, self.value):
            layer.build((None, None, self._width))
        self.output_projection.build((None, None, self._heads * self._head_width))
        if self._smeared:
            self.smear = self.add_weight(name="smear", shape=(self._kv_heads,), initializer="zeros")

    def call(
        self,
        inputs: tf.Tensor,
        memory: tf.Tensor,
        *,
        visible: Visibility,
        positions: tf.Tensor | None = None,
        seed: tf.Tensor | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        """Attends from `inputs` [batch, queries, width] to what is visible of `memory` [batch, keys, width]."""
        del training  # which its layers are told by Keras
        compiling = self.form.compiling()
        on_gpu = compiling and self.form.accelerator == "gpu"
        own = [self.key, self.value] if inputs is memory else []
        query, *projected = products(inputs, [self.query, *own], at_once=on_gpu)
        query = self._split(query, self._heads)
        cache = self.keys_and_values(memory, positions, projected)
        if self._rotary:
            query = rotate(query, positions)
        parts = query, cache["key"], cache["value"]
        batch, queries, heads, _ = query.shape
        keys = cache["key"].shape[1]
        if compiling and self._is_by_kernel(batch, queries, keys):
            return self._join(attend_by_kernel(*parts, visible, accelerator=self.form.accelerator))
        blocks = self.form.blocks(batch=batch, queries=queries, keys=keys, heads=heads, causal=visible.causal)
        if blocks is None:
            drop = self.dropout.with_seed(seed)
            # A GPU would write the float32 scores to memory: more of it, and slower (a fifth and 9% of lm_gpu.gin).
            attended = attend(
                *parts,
                allowed=visible.allowed(),
                drop=drop,
                keeps_axes=self.form.keeps_axes(),
                unrounded=compiling and not on_gpu,
                rounded=on_gpu and query.dtype.size == 2,
            )
        else:
            attended = attend_in_blocks(*parts, visible, blocks, rate=self.dropout.rate, seed=seed, compiling=compiling)
        return self._join(attended)

    def form_for(self, batch: int, queries: int | None, keys: int | None) -> str:
        """The form in which `call` computes for such sizes, as a person reads it."""
        if self._is_by_kernel(batch, queries, keys):
            return KERNELS[self.form.accelerator]
        return self.form.describe(batch=batch, queries=queries, keys=keys, heads=self._heads)

    def unfit(self, queries: int, keys: int) -> str:
        """Why no kernel computes this over such lengths; "" where one does."""
        head = {"width": self._head_width, "dtype": tf.as_dtype(self.compute_dtype), "rate": self.dropout.rate}
        return unfit(self.form.accelerator, queries=queries, keys=keys, **head)

    def _is_by_kernel(self, batch: Any, queries: Any, keys: Any) -> bool:
        return self.form.wants_kernel(batch, queries, keys) and not self.unfit(queries, keys)

    def keys_and_values(
        self, memory: tf.Tensor, positions: tf.Tensor | None = None, projected: Sequence[tf.Tensor] = ()
    ) -> Cache:
        """Keys and values [batch, keys, key heads, head width] of `memory` [batch, keys, width]."""
        key, value = self._project(memory, projected)
        return {"key": self._place(key, tf.roll(key, 1, axis=1), positions), "value": value}

    def empty_cache(self, rows: int | tf.Tensor, length: int) -> Cache:
        """Room for `length` keys and values; with smeared keys also for the last key as it was projected."""
        lengths = {"key": length, "value": length, **({"last_key": 1} if self._smeared else {})}
        return {
            name: tf.zeros([rows, places, self._kv_heads, self._head_width], self.compute_dtype)
            for name, places in lengths.items()
        }

    def step(self, inputs: tf.Tensor, index: tf.Tensor, cache: Cache) -> tuple[tf.Tensor, Cache]:
        """Attends from one position [rows, 1, width] to itself and those before it; returns outputs and cache."""
        positions = tf.fill([tf.shape(inputs)[0], 1], index)
        places = tf.range(cache["key"].shape[1])
        here = (places == index)[None, :, None, None]
        key, value = self._project(inputs)
        new = {"key": self._place(key, cache.get("last_key"), positions), "value": value}
        cache = {**cache, **{name: tf.where(here, one, cache[name]) for name, one in new.items()}}
        if self._smeared:
            cache["last_key"] = key
        return self.look_up(inputs, (places <= index)[None, None, :], cache, positions), cache

    def _project(self, memory: tf.Tensor, made: Sequence[tf.Tensor] = ()) -> tuple[tf.Tensor, tf.Tensor]:
        projected = made or [layer(memory) for layer in (self.key, self.value)]
        key, value = (self._split(tf.cast(each, self.compute_dtype), self._kv_heads) for each in projected)
        return key, value

    def _place(self, key: tf.Tensor, before: tf.Tensor | None, positions: tf.Tensor | None) -> tf.Tensor:
        """Keys as they are attended to, from those projected here and one place before."""
        if self._smeared:
            # sigmoid(0) is a half; at the first place of a segment there is nothing before.
            share = tf.cast(tf.sigmoid(tf.cast(self.smear, tf.float32)), key.dtype)[:, None]
            first = tf.equal(positions, 0)[:, :, None, None]
            key = tf.where(first, key, share * key + (1 - share) * before)
        return rotate(key, positions) if self._rotary else key

    def look_up(
        self, inputs: tf.Tensor, allowed: tf.Tensor, cache: Cache, positions: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Attends from one position [rows, 1, width] to keys and values that were computed before."""
        query = self._split(self.query(inputs), self._heads)
        if self._rotary:
            query = rotate(query, positions)
        return self._join(attend(query, cache["key"], cache["value"], allowed=allowed))

    def _split(self, projected: tf.Tensor, heads: int) -> tf.Tensor:
        return tf.reshape(projected, [*sizes(projected)[:2], heads, self._head_width])

    def _join(self, attended: tf.Tensor) -> tf.Tensor:
        return self.output_projection(tf.reshape(attended, [*sizes(attended)[:2], self._heads * self._head_width]))

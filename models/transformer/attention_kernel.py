"""Attention in one kernel that others wrote: JAX's splash attention on TPUs, cuDNN's on NVIDIA GPUs.

Both keep the scores on the chip, forward and backward (Dao et al. 2022, FlashAttention, arXiv 2205.14135). They were
compiled for such devices and compared, splash attention as JAX interprets it; what ran is in `attention_form`.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from . import cudnn_attention, jax_function
from .positions import Visibility

SCOPE, CAUSAL_SCOPE = "attention_kernel", "causal_attention_kernel"
"""Name scopes of the kernels, which tell whoever counts their FLOPs that half of the scores are left out."""

KERNELS = {"tpu": "splash attention", "gpu": "cuDNN's attention"}

_UNIT = 128  # lanes of a TPU's vectors, in which splash attention takes positions
_BLOCK, _COMPUTED = 1024, 512  # positions at most in a block, and of those in one product
_FUSED = 8  # blocks of keys, for each of which the one kernel of the backward pass writes the queries' gradients
_CUDNN_WIDTH = 128  # of a head at most, before Hopper


def unfit(
    accelerator: str, *, queries: int, keys: int, width: int, dtype: tf.DType, rate: float = 0.0, masked: bool = True
) -> str:
    """Why no kernel takes heads of `width` and `dtype` over such lengths; "" where one does."""
    if accelerator not in KERNELS:
        return f"there is no kernel of attention for a {accelerator.upper()}, only for TPUs and NVIDIA GPUs"
    name = KERNELS[accelerator]
    if rate:
        return f"{name} drops no attention weights here, and a share of {rate:g} is to be dropped"
    if accelerator == "tpu" and (queries % _UNIT or keys % _UNIT):
        return f"{name} takes lengths that are multiples of {_UNIT}, not {queries:,} x {keys:,}"
    odd = width % 8 or width > _CUDNN_WIDTH or (masked and (queries % 2 or keys % 2))
    if accelerator == "gpu" and (odd or dtype not in (tf.float16, tf.bfloat16)):
        return (
            f"{name} takes float16 and bfloat16, even lengths and heads of a multiple of 8 up to {_CUDNN_WIDTH}, not "
            f"{dtype.name}{f', {queries:,} x {keys:,}' if queries else ''} and heads of {width}"
        )
    return ""


def attend_by_kernel(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, visible: Visibility, *, accelerator: str
) -> tf.Tensor:
    """Scaled dot-product attention as of `attention.attend`, in the kernel of an accelerator that `unfit` allows.

    Softmax and sums are float32. A query that may look nowhere gets zeros and gives no gradient.

    Args:
        query: [batch, queries, heads, width], of static shape.
        key: [batch, keys, key heads, width]; heads is a multiple of key heads.
        value: Like `key`.
        visible: Which positions see which.
        accelerator: "tpu" or "gpu"; "cpu" has JAX interpret splash attention, slowly, as tests do.

    Returns:
        [batch, queries, heads, width] in the dtype of `value`.
    """
    query, key = tf.cast(query, value.dtype), tf.cast(key, value.dtype)
    with tf.name_scope(CAUSAL_SCOPE if visible.causal else SCOPE):
        if accelerator == "gpu":
            same = visible.query_segments[:, None, :, None] == visible.key_segments[:, None, None, :]
            outputs = cudnn_attention.attend(query, key, value, same, visible.causal)
        else:
            run = _made(accelerator, tuple(query.shape), tuple(key.shape), value.dtype, visible.causal)
            segments = (tf.cast(one, tf.int32) for one in (visible.query_segments, visible.key_segments))
            outputs = run(query, key, value, *segments)
    return tf.where(visible.sees()[:, :, None, None], outputs, tf.zeros([], outputs.dtype))


def attend_as_keras(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    *,
    mask: tf.Tensor | None,
    scale: float | None,
    is_causal: bool,
    **others: Any,
) -> tf.Tensor | None:
    """`keras.ops.dot_product_attention`, in cuDNN's kernel; None where that computes something else or takes no such.

    `others` are a bias, a cap, and whether flash attention is asked for, or switched off.
    A query that may look nowhere gets the mean of all values, as a softmax over equal scores gives it.
    """
    (batch, queries, heads, width), keys = query.shape, key.shape[1]
    shape, masked = [batch, keys, heads, width], mask is not None
    if (
        any(one is not None for one in others.values())
        or None in (*shape, queries)
        or not key.shape == value.shape == shape
        or not query.dtype == key.dtype == value.dtype
        or (is_causal and (masked or queries != keys))
        or unfit("gpu", queries=queries, keys=keys, width=width, dtype=query.dtype, masked=masked)
    ):
        return None
    mask = tf.ones([1, 1, queries, keys], tf.bool) & mask if masked else None
    with tf.name_scope(CAUSAL_SCOPE if is_causal else SCOPE):
        outputs = cudnn_attention.attend(query, key, value, mask, is_causal, scale)
    if not masked:
        return outputs
    sees = tf.transpose(tf.reduce_any(mask, axis=-1, keepdims=True), [0, 2, 1, 3])
    return tf.where(sees, outputs, tf.reduce_mean(value, axis=1, keepdims=True))  # XLA adds up in float32


@functools.lru_cache(maxsize=64)
def _made(
    accelerator: str, query: tuple[int, ...], key: tuple[int, ...], dtype: tf.DType, causal: bool
) -> Callable[..., tf.Tensor]:
    specs = [tf.TensorSpec(shape, dtype) for shape in (query, key, key)]
    specs += [tf.TensorSpec(shape[:2], tf.int32) for shape in (query, key)]
    splash = functools.partial(_splash, causal, accelerator == "cpu")
    return jax_function.differentiable(splash, specs, accelerator, trained=3)


def _splash(
    causal: bool, interpret: bool, query: Any, key: Any, value: Any, query_segments: Any, key_segments: Any
) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = query.shape[1], key.shape[1]
    of_query, of_key = (_divisor(length, _BLOCK) for length in shape)
    computed, fused = _divisor(of_key, _COMPUTED), shape[1] <= _FUSED * of_key
    blocks: dict[str, Any] = {"block_q": of_query, "block_kv": of_key, "block_kv_compute": computed}
    blocks |= {"block_q_dkv": of_query, "block_kv_dkv": of_key, "block_kv_dkv_compute": computed}
    blocks |= {} if fused else {"block_q_dq": of_query, "block_kv_dq": of_key}
    sizes = splash.BlockSizes(**blocks, use_fused_bwd_kernel=fused)
    mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    every_head = masks.MultiHeadMask([mask] * query.shape[2])
    kernel = splash.make_splash_mha_single_device(every_head, block_sizes=sizes, interpret=interpret)
    query = query * jnp.asarray(query.shape[-1] ** -0.5, query.dtype)
    of_heads = (jnp.swapaxes(one, 1, 2) for one in (query, key, value))
    outputs = jax.vmap(kernel)(*of_heads, splash.SegmentIds(query_segments, key_segments))
    return jnp.swapaxes(outputs, 1, 2)


def _divisor(length: int, most: int) -> int:
    """The largest multiple of 128 up to `most` that divides a length, which is such a multiple."""
    return _UNIT * max(one for one in range(1, most // _UNIT + 1) if length // _UNIT % one == 0)

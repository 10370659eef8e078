"""cuDNN's attention for NVIDIA GPUs, called by the names that XLA has for it.

What stands in a program is a call of the target `__cudnn$fmha...` and a description in JSON (XLA's
`CudnnfMHABackendConfig`), as `jax.nn.dot_product_attention` writes both: neither JAX nor a GPU is needed to write them.
Fields that are left out have protobuf's default, which is "none of that".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla

from models.transformer.positions import Visibility

TARGET = "__cudnn$fmha"
_NO_SCORE = {tf.bfloat16: -(2.0**41), tf.float16: -(2.0**15)}  # cuDNN errs in the difference of two that are lower

# Of each product its dimensions, contracted and of the batch, left and right: queries [batch, length, heads, width],
# weights [batch, heads, queries, keys].
_AHEAD = {"bmm1": ("3", "3", "02", "02"), "bmm2": ("3", "1", "01", "02")}
_BACK = {
    "bmm1_grad_gemm1": ("2", "1", "01", "02"),
    "bmm1_grad_gemm2": ("3", "1", "01", "02"),
    "bmm2_grad_gemm1": ("2", "1", "01", "02"),
    "bmm2_grad_gemm2": ("3", "3", "02", "02"),
}
_SIDES = [f"{side}_{kind}_dimensions" for kind in ("contracting", "batch") for side in ("lhs", "rhs")]


def attend(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, visible: Visibility) -> tf.Tensor:
    """As `attention_kernel.attend_by_kernel`, in which the outputs of queries that may look nowhere are any."""
    shape, scope = query.shape, tf.get_current_name_scope()
    config = _Config(query, key, causal=visible.causal)
    same = visible.query_segments[:, None, :, None] == visible.key_segments[:, None, None, :]
    # Each head adds it to its scores. Those of all layers are the same, so that XLA keeps one.
    mask = tf.cast(tf.where(same, 0.0, _NO_SCORE[value.dtype]), value.dtype)

    @tf.custom_gradient
    def run(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        statistics = tf.TensorSpec([shape[0], shape[2], shape[1]], tf.float32)
        found, of_softmax = config.call("", _AHEAD, [*inputs, mask], [_of_heads(query), statistics])
        output = tf.transpose(found, [0, 2, 1, 3])

        def gradients(upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.name_scope(f"gradient_tape/{scope}/"):  # as TensorFlow names gradients of its own operations
                operands = [*inputs, of_softmax, upstream, mask, output]
                back = config.call("Backward", _BACK, operands, list(map(_of_heads, inputs)))
                return [tf.transpose(one, [0, 2, 1, 3]) for one in back]

        return output, gradients

    return run(query, key, value)


def _of_heads(one: tf.Tensor) -> tf.TensorSpec:
    """What cuDNN calls the dimensions of an output; where they lie is XLA's matter, see `pod_module`."""
    batch, length, heads, width = one.shape
    return tf.TensorSpec([batch, heads, length, width], one.dtype)


class _Config:
    """What cuDNN is told of the attention, and the call that tells it."""

    def __init__(self, query: tf.Tensor, key: tf.Tensor, *, causal: bool):
        sizes = [query.shape[0], query.shape[2], query.shape[1], key.shape[1]]
        self._told = {
            "algorithm": {
                "algo_id": "0",
                "math_type": "TENSOR_OP_MATH",
                "tuning_knobs": {"17": "1", "24": "0"},
                "is_cudnn_frontend": True,
                "workspace_size": "0",
            },
            "fmha_scale": query.shape[-1] ** -0.5,
            "is_flash_attention": True,
            "mask_type": "CAUSAL" if causal else "NO_MASK",
            "intermediate_tensor_shape": {
                "element_type": {tf.bfloat16: "BF16", tf.float16: "F16"}[query.dtype],
                "dimensions": list(map(str, sizes)),
                "layout": {"minor_to_major": ["3", "2", "1", "0"]},
                "is_dynamic_dimension": [False] * 4,
            },
        }

    def call(
        self, kind: str, products: dict[str, Any], operands: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec]
    ) -> list[tf.Tensor]:
        of_products = {
            f"{name}_dot_dimension_numbers": dict(zip(_SIDES, map(list, dimensions), strict=True))
            for name, dimensions in products.items()
        }
        told = json.dumps({"cudnn_fmha_backend_config": self._told | of_products})
        # Leans on TensorFlow: XLA's custom calls have this wrapper in Python. Noticed by
        # tests/preflight/test_kernels.py. Then: use the operation XlaCustomCallV2 by its new wrapper;
        # train.attention = 'kernel' on GPUs needs it.
        workspace = tf.TensorSpec([0], tf.uint8)
        found = tfxla.custom_call_v2(
            f"{TARGET}ScaleBiasSoftmax{kind}", list(operands), [*results, workspace], backend_config=told
        )
        return [tf.ensure_shape(one, spec.shape) for one, spec in zip(found[:-1], results, strict=True)]

"""cuDNN's attention for NVIDIA GPUs, called by the names that XLA has for it.

What stands in a program is a call of the target `__cudnn$fmha...` and a description in JSON (XLA's
`CudnnfMHABackendConfig`), as `jax.nn.dot_product_attention` writes both: neither JAX nor a GPU is needed to write them.
Fields that are left out have protobuf's default, which is "none of that".
"""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla as tfxla

TARGET = "__cudnn$fmha"
# XLA's name of a dtype, and what stands for no score: cuDNN errs in the difference of two that are lower.
_DTYPES = {tf.bfloat16: ("BF16", -(2.0**41)), tf.float16: ("F16", -(2.0**15))}

# As XLA reads it, but for what is computed with and the products.
_TOLD = (
    '{{"cudnn_fmha_backend_config": {{"algorithm": {{"algo_id": "0", "math_type": "TENSOR_OP_MATH", "tuning_knobs": '
    '{{"17": "1", "24": "0"}}, "is_cudnn_frontend": true, "workspace_size": "0"}}, "fmha_scale": {scale}, '
    '"is_flash_attention": true, "mask_type": "{mask}", "intermediate_tensor_shape": {{"element_type": "{element}", '
    '"dimensions": {sizes}, "layout": {{"minor_to_major": ["3", "2", "1", "0"]}}, "is_dynamic_dimension": '
    "[false, false, false, false]}}, {products}}}}}"
)
_PRODUCT = (
    '"{}_dot_dimension_numbers": {{"lhs_contracting_dimensions": ["{}"], "rhs_contracting_dimensions": ["{}"], '
    '"lhs_batch_dimensions": ["0", "{}"], "rhs_batch_dimensions": ["0", "2"]}}'
)
# Of each product the dimensions that are summed over, left and right, and the left one of the heads: queries are
# [batch, length, heads, width], weights [batch, heads, queries, keys].
_AHEAD = ["bmm1 3 3 2", "bmm2 3 1 1"]
_BACK = ["bmm1_grad_gemm1 2 1 1", "bmm1_grad_gemm2 3 1 1", "bmm2_grad_gemm1 2 1 1", "bmm2_grad_gemm2 3 3 2"]


def attend(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    allowed: tf.Tensor | None,
    causal: bool,
    scale: float | None = None,
) -> tf.Tensor:
    """Attention as of `attention_kernel.attend_by_kernel`; outputs of queries that may look nowhere are any.

    `allowed` is bool, [batch, heads, queries, keys], of which the first two may be 1; None is everywhere. Scores
    are multiplied by `scale`, or as ever.
    """
    scope, (batch, length, heads, width) = tf.get_current_name_scope(), query.shape
    element, no_score = _DTYPES[value.dtype]
    told = {
        "scale": scale or width**-0.5,
        "mask": "CAUSAL" if causal else "NO_MASK",
        "element": element,
        "sizes": json.dumps(list(map(str, (batch, heads, length, key.shape[1])))),
    }
    # Each head adds it to its scores. Those of all layers are the same, so that XLA keeps one.
    mask = [] if allowed is None else [tf.cast(tf.where(allowed, 0.0, no_score), value.dtype)]
    kind = "ScaleBiasSoftmax" if mask else "Softmax"

    @tf.custom_gradient
    def run(*inputs: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        statistics = tf.TensorSpec([batch, heads, length], tf.float32)
        found, of_softmax = _call(kind, _AHEAD, told, [*inputs, *mask], [_of_heads(query), statistics])
        output = tf.transpose(found, [0, 2, 1, 3])

        def gradients(upstream: tf.Tensor) -> list[tf.Tensor]:
            with tf.name_scope(f"gradient_tape/{scope}/"):  # as TensorFlow names gradients of its own operations
                operands = [*inputs, of_softmax, upstream, *mask, output]
                back = _call(f"{kind}Backward", _BACK, told, operands, list(map(_of_heads, inputs)))
                return [tf.transpose(one, [0, 2, 1, 3]) for one in back]

        return output, gradients

    return run(query, key, value)


def _of_heads(one: tf.Tensor) -> tf.TensorSpec:
    """Dimensions of an output as cuDNN calls them; where they lie is XLA's matter, see `pod_module`."""
    batch, length, heads, width = one.shape
    return tf.TensorSpec([batch, heads, length, width], one.dtype)


def _call(
    kind: str, products: list[str], told: dict[str, Any], operands: list[tf.Tensor], results: list[tf.TensorSpec]
) -> list[tf.Tensor]:
    config = _TOLD.format(products=", ".join(_PRODUCT.format(*one.split()) for one in products), **told)
    # Leans on TensorFlow: XLA's custom calls have this wrapper in Python. Noticed by tests/preflight/test_kernels.py.
    # Then: use the operation XlaCustomCallV2 by its new wrapper; train.attention = 'kernel' on GPUs needs it.
    results = [*results, tf.TensorSpec([0], tf.uint8)]  # cuDNN's workspace, whose size XLA asks for
    found = tfxla.custom_call_v2(f"{TARGET}{kind}", operands, results, backend_config=config)
    return [tf.ensure_shape(one, spec.shape) for one, spec in zip(found, results, strict=True)][:-1]

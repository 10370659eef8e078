"""Attention in one kernel: splash attention as JAX interprets it against NumPy in float64, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from test_blockwise_attention import allowed_by, assert_near, expected, normal, rounded

from launcher.models.transformer import attention_kernel
from launcher.models.transformer.positions import Visibility
from launcher.step import flops

pytestmark = pytest.mark.slow

# Of the largest value. Those of 16 bits are some roundings of what goes into a product.
TOLERANCES = {"float32": 3e-6, "bfloat16": 1e-2}
PACKED = np.repeat([[1, 2, 3, 0], [1, 1, 2, 0], [0, 0, 0, 0]], [100, 90, 50, 16], axis=1).astype(np.int32)
MEMORY = np.repeat([[1, 2, 0], [1, 1, 1], [1, 0, 0]], [128, 200, 56], axis=1).astype(np.int32)


# Blocks of keys for which the backward pass is one kernel; beyond, those of long rows, it is two.
@pytest.mark.parametrize(
    ("dtype", "fused", "sees"),
    repeated_but(
        [("bfloat16", 8, "of a memory")],
        [(*one, sees) for sees in ("causal", "of a memory") for one in (("float32", 1), ("bfloat16", 8))],
    ),
)
def test_splash_attention_is_that_of_numpy_with_packed_rows_padding_and_shared_keys(dtype, fused, sees, monkeypatch):
    causal = sees == "causal"
    monkeypatch.setattr(attention_kernel, "_BLOCK", 128)  # several in a row
    monkeypatch.setattr(attention_kernel, "_FUSED", fused)
    attention_kernel._made.cache_clear()
    segments = (PACKED, PACKED) if causal else (PACKED, MEMORY)
    queries, keys = (one.shape[1] for one in segments)
    shapes = (3, queries, 4, 64), (3, keys, 2, 64), (3, keys, 2, 64), (3, queries, 4, 64)
    arrays = rounded([normal(*shape, seed=seed) for seed, shape in enumerate(shapes)], dtype)

    @tf.function(jit_compile=True)
    def both(query, key, value, upstream):
        of_query = tf.constant(segments[0])
        visible = Visibility(
            query_segments=of_query, key_segments=of_query if causal else tf.constant(segments[1]), causal=causal
        )
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            outputs = attention_kernel.attend_by_kernel(query, key, value, visible, accelerator="cpu")
        return outputs, *tape.gradient(outputs, [query, key, value], upstream)

    graph = both.get_concrete_function(*(tf.TensorSpec(shape, dtype) for shape in shapes)).graph
    product = 2 * 3 * queries * 4 * keys * 64 * (0.5 if causal else 1)
    assert flops.count(graph, ()) == (6 * product, 7 * product), "the backward pass computes the scores again"
    found = [tf.cast(one, tf.float64).numpy() for one in both(*(tf.cast(one, dtype) for one in arrays))]
    assert_near(found, expected(*arrays, allowed_by(segments, causal)), TOLERANCES[dtype], least=0.1)
    assert not found[0][PACKED == 0].any()
    assert not found[1][PACKED == 0].any()

"""Products of 16-bit operands with float32 sums, and logits by them: what is summed over a width or a vocabulary."""

from collections.abc import Callable

import tensorflow as tf


def product(one: tf.Tensor, other: tf.Tensor, *, compiling: bool, **transposed: bool) -> tf.Tensor:
    """Matrix products with float32 sums (float64 of float64) of operands of one dtype, 16 bits, too.

    Args:
        one, other: As for `tf.matmul`.
        compiling: Whether XLA compiles this. Outside of it no kernel sums 16-bit products in float32, and the operands
            become float32: equal numbers, and no faster than those.
        transposed: `transpose_a` or `transpose_b`.
    """
    if one.dtype.size > 2:
        return tf.matmul(one, other, **transposed)
    if not compiling:
        return tf.matmul(tf.cast(one, tf.float32), tf.cast(other, tf.float32), **transposed)
    adjoint = {f"adj_{'xy'[name == 'transpose_b']}": on for name, on in transposed.items()}
    return tf.raw_ops.BatchMatMulV3(x=one, y=other, Tout=tf.float32, **adjoint)


def logits(
    features: tf.Tensor,
    matrix: tf.Tensor,
    bias: tf.Tensor | None = None,
    *,
    compiling: bool = False,
    factor: float = 1.0,
) -> tf.Tensor:
    """Scores of all words, float32 (float64 by a matrix of float64).

    Args:
        features: [tokens, width], rounded to the matrix's dtype.
        matrix: [vocab_size, width], float32 or 16 bits. Of 16 bits its gradient is float32 all the same: it must come
            from `tf.cast`, whose own gradient takes that.
        bias: float32 [vocab_size].
        compiling: As for `product`.
        factor: Gradients by 16-bit logits are rounded to 16 bits, too, so many times as large.

    Returns:
        [tokens, vocab_size].
    """

    @tf.custom_gradient
    def of_16_bits(features: tf.Tensor, matrix: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tuple]]:
        def gradient(by: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            by = tf.cast(by * factor, matrix.dtype)
            by_features = product(by, matrix, compiling=compiling) / factor
            return by_features, product(by, features, compiling=compiling, transpose_a=True) / factor

        return product(features, matrix, compiling=compiling, transpose_b=True), gradient

    features = tf.cast(features, matrix.dtype)
    whole = matrix.dtype.size > 2
    found = tf.matmul(features, matrix, transpose_b=True) if whole else of_16_bits(features, matrix)
    return found if bias is None else found + bias

"""What a loss needs of each token's logits, in one reduction of several tensors: on a GPU XLA would read them twice.

TensorFlow has no public operation for that; its own Python wrapper is used, as TensorFlow 2.16.2 and 2.21.0 have it.
"""

from __future__ import annotations

import tensorflow as tf

from launcher.errors import UsageError


# Leans on TensorFlow: XLA's reductions of several tensors have this wrapper in Python. Noticed by
# tests/tasks/test_loss_chunks.py. Then: use the operation XlaVariadicReduceV2 by its new wrapper, or two passes.
def reduced(logits: tf.Tensor, targets: tf.Tensor, lowest: float) -> list[tf.Tensor]:
    """Of logits float32 [tokens, vocab_size] and integer targets [tokens, 1], where XLA compiles it.

    Returns:
      [highest logit, sum of exp(logit - highest), the target's own, highest of the words before it], each [tokens, 1];
      `lowest`, which is lower than any logit, where there is none.
    """
    try:
        from tensorflow.compiler.tf2xla.python.xla import variadic_reduce
    except ImportError:
        raise UsageError(
            f"TensorFlow {tf.__version__} has no XlaVariadicReduceV2, by which a loss of 16 bits is computed on GPUs; "
            "install 2.16 to 2.21, which have it, or give the embedding or head 'float32' in train.precision_overrides"
        ) from None

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)] * 8, autograph=False)
    def join(*both: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (top, total, own, before), (top_, total_, own_, before_) = both[:4], both[4:]
        highest = tf.maximum(top, top_)
        total = total * tf.exp(top - highest) + total_ * tf.exp(top_ - highest)
        return highest, total, tf.maximum(own, own_), tf.maximum(before, before_)

    places, none = tf.range(logits.shape[-1], dtype=targets.dtype), tf.constant(lowest)
    own, before = (tf.where(chosen, logits, none) for chosen in (places == targets, places < targets))
    start = [none, tf.constant(0.0), none, none]
    inputs = [logits, tf.ones_like(logits), own, before]
    return [one[:, tf.newaxis] for one in variadic_reduce(inputs, start, [1], join.get_concrete_function())]

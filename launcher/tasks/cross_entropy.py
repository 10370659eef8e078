"""Label-smoothed cross-entropy over a vocabulary, as TensorFlow's kernels and as XLA have it cheapest."""

from __future__ import annotations

import tensorflow as tf

from launcher.machine import xla


def token_losses(logits: tf.Tensor, targets: tf.Tensor, label_smoothing: float = 0.0) -> tuple[tf.Tensor, tf.Tensor]:
    """Cross-entropy of each token with its smoothed target, and whether the token had the highest logit.

    The smoothed target of a token is `(1 - label_smoothing) * one_hot + label_smoothing / vocab_size`, with the token
    itself among those that share the rest (Szegedy et al. 2015; Vaswani et al. 2017, section 5.4).

    Args:
      logits: [..., vocab_size] in the dtype that is computed in, float32.
      targets: int32 [...].
      label_smoothing: in [0, 1).

    Returns:
      (losses in nats, 1.0 where the first of the highest logits is the token's, else 0.0), [...] in the logits' dtype.
    """
    if xla.is_compiling():
        return _closed(logits, targets, label_smoothing)
    if label_smoothing:
        size = logits.shape[-1]
        off = label_smoothing / size
        spread = tf.one_hot(targets, size, on_value=1.0 - label_smoothing + off, off_value=off, dtype=logits.dtype)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=spread, logits=logits)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    return losses, tf.cast(tf.argmax(logits, axis=-1, output_type=targets.dtype) == targets, logits.dtype)


def _closed(logits: tf.Tensor, targets: tf.Tensor, label_smoothing: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums over the vocabulary alone, for XLA to fuse: no tensor of targets, and the softmax is computed again for the
    gradient instead of kept. As kernels, each operation would be a pass over the logits."""
    size, dtype = logits.shape[-1], logits.dtype
    rest, none = tf.constant(1.0 - label_smoothing, dtype), tf.zeros([], dtype)

    @tf.custom_gradient
    def losses_and_right(logits: tf.Tensor) -> tuple:
        places = tf.range(size, dtype=targets.dtype)
        hit = places == targets[..., tf.newaxis]
        top = tf.reduce_max(logits, axis=-1, keepdims=True)
        log_sum = top + tf.math.log(tf.reduce_sum(tf.exp(logits - top), axis=-1, keepdims=True))
        losses = log_sum[..., 0] - rest * tf.reduce_sum(tf.where(hit, logits, none), axis=-1)
        if label_smoothing:
            losses -= label_smoothing / size * tf.reduce_sum(logits, axis=-1)
        first = tf.reduce_min(tf.where(logits >= top, places, size), axis=-1)

        def gradient(by_loss: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            by_logit = tf.exp(logits - log_sum) - tf.where(hit, rest, none) - label_smoothing / size
            return by_logit * by_loss[..., tf.newaxis]

        return (losses, tf.cast(first == targets, dtype)), gradient

    return losses_and_right(logits)

"""Cross-entropy over tokens: what translation and language modelling share."""

from __future__ import annotations

import tensorflow as tf

from launcher.data.text.vocabulary import PADDING

Sums = tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]


def token_sums(logits: tf.Tensor, targets: tf.Tensor, row_weight: tf.Tensor, *, label_smoothing: float = 0.0) -> Sums:
    """Sums over the real tokens of one replica's batch.

    The smoothed target of a token is `(1 - label_smoothing) * one_hot + label_smoothing / vocab_size`, with the token
    itself among those that share the rest (Szegedy et al. 2015; Vaswani et al. 2017, section 5.4).

    Args:
      logits: [batch, length, vocab_size], taken as float32.
      targets: int32 [batch, length]; 0, padding, is not predicted.
      row_weight: float32 [batch], 0 for rows that are padding.
      label_smoothing: in [0, 1).

    Returns:
      (sum of losses in nats, weight of the real tokens, {"accuracy": weight of those that had the highest logit}).
    """
    logits = tf.cast(logits, tf.float32)
    if label_smoothing:
        size = logits.shape[-1]
        off = label_smoothing / size
        spread = tf.one_hot(targets, size, on_value=1.0 - label_smoothing + off, off_value=off)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=spread, logits=logits)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    weight = tf.cast(targets != PADDING, tf.float32) * row_weight[:, tf.newaxis]
    right = tf.cast(tf.argmax(logits, axis=-1, output_type=targets.dtype) == targets, tf.float32)
    return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), {"accuracy": tf.reduce_sum(right * weight)}

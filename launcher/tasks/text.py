"""What tasks of text share: cross-entropy over tokens, a vocabulary that stays with the weights, notes."""

from __future__ import annotations

import keras
import tensorflow as tf

from launcher.data.text.vocabulary import PADDING, Vocabulary
from launcher.errors import UsageError
from launcher.tasks.base import Assets
from launcher.tasks.cross_entropy import token_losses
from models.transformer import dimension_notes

VOCABULARY = "vocabulary.model"

Sums = tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]


def token_sums(logits: tf.Tensor, targets: tf.Tensor, row_weight: tf.Tensor, *, label_smoothing: float = 0.0) -> Sums:
    """Sums over the real tokens of one replica's batch.

    Args:
      logits: [batch, length, vocab_size], taken as float32.
      targets: int32 [batch, length]; 0, padding, is not predicted.
      row_weight: float32 [batch], 0 for rows that are padding.
      label_smoothing: see `cross_entropy.token_losses`.

    Returns:
      (sum of losses in nats, weight of the real tokens, {"accuracy": weight of those that had the highest logit}).
    """
    losses, right = token_losses(tf.cast(logits, tf.float32), targets, label_smoothing)
    weight = tf.cast(targets != PADDING, tf.float32) * row_weight[:, tf.newaxis]
    return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), {"accuracy": tf.reduce_sum(right * weight)}


def read_vocabulary(assets: Assets, size: int, binding: str) -> Vocabulary:
    """The vocabulary that was kept with the weights.

    Raises:
      UsageError: there is none, or it has another size than the recipe's.
    """
    if VOCABULARY not in assets:
        raise UsageError(f"assets/{VOCABULARY} is missing beside the checkpoints; train again, or put it back")
    vocabulary = Vocabulary(assets[VOCABULARY])
    if vocabulary.size != size:
        raise UsageError(
            f"{binding} = {size}, but the vocabulary kept with the weights has {vocabulary.size} tokens; "
            "use the recipe that trained them"
        )
    return vocabulary


def model_notes(model: keras.Model, accelerator: str) -> list[str]:
    """Sizes that an accelerator would rather have rounded, if the model tells its own."""
    dimensions = getattr(model, "dimensions", None)
    if dimensions is None or accelerator == "cpu":
        return []
    return dimension_notes(dimensions, accelerator.upper())


def rows_of(tensor: tf.Tensor) -> int | tf.Tensor:
    """Its first axis, as a number where it is known."""
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]

"""What tasks of text have in common, apart from their loss: a vocabulary that stays with the weights, notes, rows."""

from __future__ import annotations

import keras
import tensorflow as tf

from launcher.data.text.vocabulary import Vocabulary
from launcher.errors import UsageError
from launcher.tasks.base import Assets
from models.transformer import dimension_notes

VOCABULARY = "vocabulary.model"


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

"""Tasks of text: cross-entropy over tokens, a vocabulary that stays with the weights, notes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.data.text.corpus import TextCorpus
from launcher.data.text.pairs import TextPairs
from launcher.data.text.vocabulary import PADDING, Vocabulary
from launcher.errors import UsageError
from launcher.reporting.units import bytes_text
from launcher.tasks import loss_chunks
from launcher.tasks.base import Assets, Task
from launcher.tasks.cross_entropy import Head, chunked_sums, token_losses
from launcher.tasks.loss_chunks import LossChunks, Split

VOCABULARY = "vocabulary.model"

Sums = tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]


def model_sums(
    model: keras.Model, batch: dict[str, tf.Tensor], targets: tf.Tensor, *, training: bool, label_smoothing: float = 0.0
) -> Sums:
    """Sums over the real tokens of one replica's batch, in the pieces that `train.loss_chunks` has them computed in.

    Args:
      model: called with the batch, gives logits [batch, length, vocab_size], taken as float32. One that has
        `output_matrix()`, see `models.token_model.TokenModel`, and takes `logits=False` to give features instead, may
        be asked for these.
      batch: with "weight", float32 [batch], 0 for rows that are padding.
      targets: int32 [batch, length]; 0, padding, is not predicted.
      label_smoothing: see `cross_entropy.token_losses`.

    Returns:
      (sum of losses in nats, weight of the real tokens, {"accuracy": weight of those that had the highest logit}).

    Raises:
      UsageError: the recipe asks for pieces of a model that gives logits only.
    """
    pieces, head, split = loss_chunks.present(), _head(model), None
    if head is not None and targets.shape.is_fully_defined():
        narrow = head.matrix.dtype.size == 2
        split = pieces.split(targets.shape.num_elements(), *head.matrix.shape, at_once=training and narrow)
        if narrow and split is None:
            # All at once, and by a product of 16 bits, which the model would not know to be compiled.
            split = Split(narrow=training and pieces.accelerator == "tpu")
    elif pieces.forced:
        raise UsageError(f"train.loss_chunks = {pieces.pieces}: the model has no output_matrix(); bind 'auto' or 1")
    weight = tf.cast(targets != PADDING, tf.float32) * batch["weight"][:, tf.newaxis]
    if head is None or split is None:
        logits = tf.cast(model(batch, training=training), tf.float32)
        losses, hits = token_losses(logits, targets, label_smoothing)
        loss, right = tf.reduce_sum(losses * weight), tf.reduce_sum(hits * weight)
    else:
        features = model(batch, training=training, logits=False)
        loss, right = chunked_sums(
            tf.reshape(features, [-1, features.shape[-1]]),
            head,
            tf.reshape(targets, [-1]),
            tf.reshape(weight, [-1]),
            split=split,
            label_smoothing=label_smoothing,
            training=training,
        )
    return loss, tf.reduce_sum(weight), {"accuracy": right}


def describe_loss(pieces: LossChunks, model: keras.Model, rows: int, logits_shape: tuple[int, int]) -> str:
    """The plan's line about the loss of a microbatch of `rows` examples; for `logits_shape`, see `Task`."""
    # Traced, as only the shape is asked for.
    head = tf.function(lambda: _head(model), autograph=False).get_concrete_function().structured_outputs
    length, vocab_size = logits_shape
    width, narrow = (1, False) if head is None else (head.matrix.shape[1], head.matrix.dtype.size == 2)
    split = pieces.split(rows * length, vocab_size, width, at_once=narrow)
    why = f"the logits of a microbatch are {bytes_text(rows * length * vocab_size * 4)}"
    if pieces.pieces != "auto":
        why = f"train.loss_chunks; {why}"
    if split is not None and head is None:
        split, why = None, f"{why}; the model gives nothing else"
    return f"from whole logits ({why})" if split is None else f"in {split} ({why})"


def _head(model: keras.Model) -> Head | None:
    output_matrix = getattr(model, "output_matrix", None)
    matrix_and_bias = None if output_matrix is None else output_matrix()
    return None if matrix_and_bias is None else Head(*matrix_and_bias)


class TextTask(Task):
    """A task whose data is text with a vocabulary, which is kept beside the weights.

    The model is a builder called with `vocab_size`; `size_binding`, for messages, is what binds the vocabulary's size.
    """

    def __init__(self, data: TextCorpus | TextPairs, model: Callable[..., keras.Model], size_binding: str):
        self._data: Any = data
        self._model = model
        self._size_binding = size_binding

    def data(self) -> TextCorpus | TextPairs:
        return self._data

    def model(self) -> keras.Model:
        return self._model(vocab_size=self._data.vocab_size)

    def decode_lines(self, outputs: np.ndarray) -> list[str]:
        return self.vocabulary.decode(outputs.tolist())

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The data's, or the one that came with the weights."""
        return self._data.vocabulary

    def assets(self) -> Assets:
        return {VOCABULARY: self.vocabulary.model_bytes}

    def use_assets(self, assets: Assets) -> None:
        """Takes the vocabulary that was kept with the weights.

        Raises:
          UsageError: there is none, or it has another size than the recipe's.
        """
        if VOCABULARY not in assets:
            raise UsageError(f"assets/{VOCABULARY} is missing beside the checkpoints; train again, or put it back")
        vocabulary, size = Vocabulary(assets[VOCABULARY]), self._data.vocab_size
        if vocabulary.size != size:
            raise UsageError(f"{self._size_binding} = {size}: must be {vocabulary.size}, as the weights have it")
        self.vocabulary = vocabulary


def rows_of(tensor: tf.Tensor) -> int | tf.Tensor:
    """Its first axis, as a number where it is known."""
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Rows of tokens as int32 [rows, length], filled up with padding."""
    filled = np.full([len(rows), length], PADDING, np.int32)
    for row, tokens in zip(filled, rows, strict=True):
        row[: len(tokens)] = tokens
    return filled

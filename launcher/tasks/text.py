"""Tasks of text: cross-entropy over tokens, a vocabulary that stays with the weights, notes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.data.pipeline import Batch
from launcher.data.text.corpus import TextCorpus
from launcher.data.text.graph_vocabulary import GraphVocabulary
from launcher.data.text.pairs import TextPairs
from launcher.data.text.vocabulary import PADDING, Vocabulary
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph
from launcher.reporting.units import bytes_text
from launcher.tasks.base import Assets, Served, Sums, Task, check_builder
from launcher.tasks.cross_entropy import Head, LossChunks, chunked_sums, present, token_losses

VOCABULARY = "vocabulary.model"


def model_sums(
    model: keras.Model, batch: Batch, targets: tf.Tensor, *, training: bool, label_smoothing: float = 0.0
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
    setting, pieces, is_16_bits = present(), 1, False
    head = _head(model) if targets.shape.is_fully_defined() else None
    if head is not None:
        pieces = setting.count(targets.shape.num_elements(), *head.matrix.shape)
        is_16_bits = head.matrix.dtype.size == 2
    elif setting.pieces not in ("auto", 1):
        raise UsageError(f"train.loss_chunks = {setting.pieces}: the model has no output_matrix(); bind 'auto' or 1")
    weight = tf.cast(targets != PADDING, tf.float32) * batch["weight"][:, tf.newaxis]
    # A product of 16 bits is made here, as the model would not know it to be compiled.
    if head is None or (pieces == 1 and not is_16_bits):
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
            pieces=pieces,
            narrow=training and is_16_bits and setting.accelerator == "tpu",
            label_smoothing=label_smoothing,
            training=training,
        )
    return loss, tf.reduce_sum(weight), {"accuracy": right}


def describe_loss(setting: LossChunks, model: keras.Model, rows: int, logits_shape: tuple[int, int]) -> str:
    """The plan's line about the loss of a microbatch of `rows` examples; for `logits_shape`, see `Task`."""
    # Traced, as only the shape is asked for.
    head = tf.function(lambda: _head(model), autograph=False).get_concrete_function().structured_outputs
    length, vocab_size = logits_shape
    pieces = setting.count(rows * length, vocab_size, 1 if head is None else head.matrix.shape[1])
    why = f"the logits of a microbatch are {bytes_text(rows * length * vocab_size * 4)}"
    if setting.pieces != "auto":
        why = f"train.loss_chunks; {why}"
    if pieces > 1 and head is None:
        pieces, why = 1, f"{why}; the model gives nothing else"
    return f"in {pieces} pieces of the tokens ({why})" if pieces > 1 else f"from whole logits ({why})"


def _head(model: keras.Model) -> Head | None:
    output_matrix = getattr(model, "output_matrix", None)
    matrix_and_bias = None if output_matrix is None else output_matrix()
    return None if matrix_and_bias is None else Head(*matrix_and_bias)


class TextTask(Task):
    """A task whose data is text with a vocabulary, which is kept beside the weights.

    Evaluation does not smooth: it reports the plain cross-entropy, comparable between recipes.

    Args:
      data: has "targets" of each row under the key `targets`.
      model: a builder called with `vocab_size`.
      label_smoothing: of training.
      name: of the task in recipes.
      example: a builder's reference, for messages.
    """

    targets: str
    size_binding: str
    """The binding of the vocabulary's size, for messages."""

    def __init__(
        self,
        data: TextCorpus | TextPairs,
        model: Callable[..., keras.Model],
        label_smoothing: float,
        *,
        name: str,
        example: str,
    ):
        check_builder(f"{name}.model", model, example)
        check_value(f"{name}.label_smoothing", label_smoothing, 0 <= label_smoothing < 1, "in [0, 1)")
        self._data: Any = data
        self._model = model
        self._label_smoothing = label_smoothing
        self.logits_shape = (data.row_length, data.vocab_size)

    def data(self) -> TextCorpus | TextPairs:
        return self._data

    def model(self) -> keras.Model:
        return self._model(vocab_size=self._data.vocab_size)

    @no_autograph
    def loss(self, model: keras.Model, batch: Batch, training: bool) -> Sums:
        smoothing = self._label_smoothing if training else 0.0
        return model_sums(model, batch, batch[self.targets], training=training, label_smoothing=smoothing)

    def encoded(self, ids: tf.RaggedTensor) -> Batch:
        """A batch for `generate`, one row of static length for each of these tokens of a text."""
        raise NotImplementedError

    def generate(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """See `Decodes`."""
        raise NotImplementedError

    def encode_lines(self, lines: Sequence[str]) -> dict[str, np.ndarray]:
        ids = tf.ragged.constant(self.vocabulary.encode(lines), tf.int32, ragged_rank=1)
        return {key: rows.numpy() for key, rows in self.encoded(ids).items()}

    def served(self, model: keras.Model) -> Served:
        """Texts in, what the model makes of them out."""
        vocabulary = GraphVocabulary(self.vocabulary)

        @no_autograph
        def serve(text: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"text": vocabulary.decode(self.generate(model, self.encoded(vocabulary.encode(text))))}

        return Served("text", serve, [vocabulary])

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
            raise UsageError(f"{self.size_binding} = {size}: must be {vocabulary.size}, as the weights have it")
        self.vocabulary = vocabulary


def rows_of(tensor: tf.Tensor) -> int | tf.Tensor:
    """Its first axis, as a number where it is known."""
    return tf.shape(tensor)[0] if tensor.shape[0] is None else tensor.shape[0]

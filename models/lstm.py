"""A language model on LSTM layers."""

from __future__ import annotations

from typing import Any

import gin
import keras
import tensorflow as tf

from .token_model import TokenModel
from .transformer.dimensions import at_least, check_share
from .transformer.layers import Dropout, Embedding, projection, sizes
from .transformer.positions import layout

State = dict[str, tf.Tensor]


@gin.configurable
def lstm_language_model(
    *, vocab_size: int, layers: int = 2, width: int = 512, dropout: float = 0.1, tie_embeddings: bool = True
) -> LstmLanguageModel:
    """Builds a language model of LSTM layers, as Zaremba et al. 2014 (arXiv 1409.2329): dropout between layers only.

    Args:
        vocab_size: Number of tokens, of which 0 is padding.
        layers: LSTM layers.
        width: Of the embeddings and of each layer's state.
        dropout: Share dropped of the embeddings and of each layer's outputs; never of what passes from token to token.
        tie_embeddings: Whether the matrix of embeddings is also that of the softmax.
    """
    at_least(vocab_size=(vocab_size, 4), layers=(layers, 1), width=(width, 1))
    check_share(dropout=dropout)
    return LstmLanguageModel.make(
        vocab_size=vocab_size, layers=layers, width=width, dropout=dropout, tie_embeddings=tie_embeddings
    )


@keras.saving.register_keras_serializable(package="models")
class LstmLanguageModel(TokenModel):
    """Logits of the next token, from the tokens so far; called and decoded like `models.transformer.LanguageModel`.

    The state starts as zeros at the first token of each segment. Any length will do.
    """

    def __init__(self, *, vocab_size: int, layers: int, width: int, dropout: float, tie_embeddings: bool) -> None:
        super().__init__(name="lstm_language_model")
        self._width = width
        self.embedding = Embedding(vocab_size=vocab_size, width=width, name="embedding")
        self.dropout = Dropout(dropout, name="dropout")
        numbers = range(1, layers + 1)
        self.lstms = [Lstm(width=width, name=f"lstm{number}") for number in numbers]
        self.dropouts = [Dropout(dropout, name=f"dropout{number}") for number in numbers]
        if not tie_embeddings:
            self.head = projection(vocab_size, name="head")

    def call(self, batch: dict[str, tf.Tensor], training: bool = False, logits: bool = True) -> tf.Tensor:
        tokens = batch["tokens"]
        segments, _ = layout(tokens, batch.get("segments"), batch.get("positions"))
        before = tf.pad(segments[:, :-1], [[0, 0], [1, 0]])
        features = self.dropout(self.embedding(tokens), training=training)
        for lstm, dropout in zip(self.lstms, self.dropouts, strict=True):
            features = dropout(lstm(features, starts=segments != before), training=training)
        return self._logits(features) if logits else features

    def start_decoding(
        self, batch: dict[str, tf.Tensor] | None, rows: int | tf.Tensor, max_length: int
    ) -> dict[str, Any]:
        """The states before the first token, a nest of tensors with the first axis `rows`; the rest is not read."""
        del batch, max_length
        return {"layers": [lstm.zero_state(rows) for lstm in self.lstms]}

    def decode_step(
        self, tokens: tf.Tensor, index: tf.Tensor, cache: dict[str, Any]
    ) -> tuple[tf.Tensor, dict[str, Any]]:
        """Logits float32 [rows, vocab_size] after one more token of each row, int32 [rows], and the new states."""
        del index
        features = self.embedding(tokens)
        states = []
        for lstm, state in zip(self.lstms, cache["layers"], strict=True):
            state = lstm.step(features, state)
            features = state["output"]
            states.append(state)
        return self._logits(features[:, None])[:, 0], {"layers": states}


class Lstm(keras.layers.Layer):
    """Long short-term memory (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).

    Weights are those of `keras.layers.LSTM`: kernel, recurrent_kernel and bias of the input gate, forget gate,
    candidate and output gate side by side. That layer cannot start a new state within a row, as packed rows need. The
    cell is a sum over the whole text and float32 under any policy; so are the gates. The products with the weights have
    the compute dtype. Inputs and state have the same width.
    """

    def __init__(self, *, width: int, name: str) -> None:
        super().__init__(name=name)
        self._width = width

    def build(self, *_: Any) -> None:
        width = self._width
        self.kernel = self.add_weight(name="kernel", shape=(width, 4 * width), initializer="glorot_uniform")
        self.recurrent_kernel = self.add_weight(
            name="recurrent_kernel", shape=(width, 4 * width), initializer="orthogonal"
        )
        self.bias = self.add_weight(name="bias", shape=(4 * width,), initializer=_remembering, autocast=False)

    def call(self, inputs: tf.Tensor, starts: tf.Tensor) -> tf.Tensor:
        """Outputs [batch, length, width] of inputs of that shape; `starts` bool [batch, length]: forget what was."""
        rows, length, width = sizes(inputs)
        # One product for all places; only what depends on the place before is left for the loop.
        flat = tf.matmul(tf.reshape(inputs, [-1, width]), tf.cast(self.kernel, self.compute_dtype))
        projected = tf.transpose(tf.reshape(flat, [rows, length, 4 * width]), [1, 0, 2])
        keeps = tf.transpose(tf.logical_not(starts))[..., None]
        recurrent, bias = tf.cast(self.recurrent_kernel, self.compute_dtype), tf.convert_to_tensor(self.bias)

        def step(state: tuple[tf.Tensor, tf.Tensor], place: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            inputs, keep = place
            output, cell = (tf.where(keep, each, tf.zeros_like(each)) for each in state)
            return _gates(inputs + tf.matmul(output, recurrent), bias, cell, self.compute_dtype)

        state = self.zero_state(rows)
        outputs, _ = tf.scan(step, (projected, keeps), initializer=(state["output"], state["cell"]))
        return tf.transpose(outputs, [1, 0, 2])

    def zero_state(self, rows: int | tf.Tensor) -> State:
        shape = [rows, self._width]
        return {"output": tf.zeros(shape, self.compute_dtype), "cell": tf.zeros(shape, tf.float32)}

    def step(self, inputs: tf.Tensor, state: State) -> State:
        """The state after one more input [rows, width]."""
        kernel, recurrent = (tf.cast(each, self.compute_dtype) for each in (self.kernel, self.recurrent_kernel))
        summed = tf.matmul(inputs, kernel) + tf.matmul(state["output"], recurrent)
        output, cell = _gates(summed, tf.convert_to_tensor(self.bias), state["cell"], self.compute_dtype)
        return {"output": output, "cell": cell}


def _gates(summed: tf.Tensor, bias: tf.Tensor, cell: tf.Tensor, dtype: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Output in `dtype` and cell in float32, from the gates' inputs [rows, 4 * width] and the cell before."""
    admit, keep, candidate, show = tf.split(tf.cast(summed, tf.float32) + bias, 4, axis=-1)
    cell = tf.sigmoid(keep) * cell + tf.sigmoid(admit) * tf.tanh(candidate)
    return tf.cast(tf.sigmoid(show) * tf.tanh(cell), dtype), cell


def _remembering(shape: tuple[int, ...], dtype: Any = None) -> tf.Tensor:
    """Zeros, and ones for the forget gate (Jozefowicz et al. 2015), as in Keras."""
    quarter = shape[0] // 4
    return tf.repeat(tf.constant([0.0, 1.0, 0.0, 0.0], dtype), quarter)

"""A decoder-only transformer: each token is predicted from those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gin
import keras
import tensorflow as tf

from ..token_model import TokenModel
from . import dimensions
from .block import Block
from .layers import NORMALIZATIONS, Dropout, Embedding, projection, sizes
from .positions import Visibility, layout, sinusoids


@gin.configurable
def language_model(
    *,
    vocab_size: int,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    kv_heads: int | None = None,
    hidden: int | None = None,
    norm: str = "rms",
    activation: str = "swiglu",
    positions: str = "rotary",
    tie_embeddings: bool = True,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    smeared_keys: bool = False,
    max_length: int = 1024,
    rematerialize: bool = False,
) -> LanguageModel:
    """Builds a decoder-only transformer that reads normalised features in each sublayer (pre-norm).

    The defaults are the parts that Llama (Touvron et al. 2023, arXiv 2302.13971) made usual: RMSNorm, rotary positions,
    SwiGLU, no biases. `norm="layer", activation="gelu", positions="learned"` are those of GPT-2. The last matrix of
    each sublayer starts smaller by (2 * layers) ** 0.5, as in GPT-2, so that the sum over blocks starts of order one.

    Args:
        vocab_size: Number of tokens, of which 0 is padding.
        layers: Blocks.
        width: Of embeddings and blocks, a multiple of `heads`.
        heads: Query heads of each attention.
        kv_heads: Key and value heads, a divisor of `heads`; None is as many.
        hidden: Width inside a feed-forward network; None is 4 * width, or for SwiGLU, which has three matrices, 8 / 3 *
            width rounded up to a multiple of 128.
        norm: "rms" or "layer".
        activation: "swiglu", "gelu" or "relu".
        positions: "rotary", "learned" or "sinusoidal".
        tie_embeddings: Whether the matrix of embeddings is also that of the softmax.
        dropout: Share dropped of embeddings and of what each sublayer adds.
        attention_dropout: Share dropped of the attention weights.
        smeared_keys: Whether attention mixes each key with the one before, which makes small models copy sooner.
        max_length: Longest row in tokens; a longer one is refused.
        rematerialize: Compute the inside of each block again in the backward pass instead of keeping it.
    """
    dimensions.one_of("norm", norm, tuple(NORMALIZATIONS))
    dimensions.one_of("activation", activation, ("swiglu", "gelu", "relu"))
    dimensions.one_of("positions", positions, ("rotary", "learned", "sinusoidal"))
    if hidden is None:
        hidden = -(-8 * width // (3 * 128)) * 128 if activation == "swiglu" else 4 * width
    dimensions.at_least(vocab_size=(vocab_size, 4), layers=(layers, 1), width=(width, 1), hidden=(hidden, 1))
    dimensions.at_least(heads=(heads, 1), max_length=(max_length, 1))
    dimensions.check_heads(width, heads, kv_heads)
    dimensions.check_share(dropout=dropout, attention_dropout=attention_dropout)
    if positions == "rotary":
        dimensions.check_even(**{"the width of a head": width // heads})
    elif positions == "sinusoidal":
        dimensions.check_even(width=width)
    return LanguageModel.make(
        vocab_size=vocab_size,
        layers=layers,
        width=width,
        norm=norm,
        positions=positions,
        tie_embeddings=tie_embeddings,
        dropout=dropout,
        max_length=max_length,
        block={
            "width": width,
            "hidden": hidden,
            "activation": activation,
            "attention": {
                "heads": heads,
                "kv_heads": kv_heads,
                "rotary": positions == "rotary",
                "dropout": attention_dropout,
                "smeared_keys": smeared_keys,
            },
            "normalization": norm,
            "norm_first": True,
            "dropout": dropout,
            "output_scale": (2 * layers) ** -0.5,
            "rematerialize": rematerialize,
        },
    )


@keras.saving.register_keras_serializable(package="models")
class LanguageModel(TokenModel):
    """Logits of the next token, from the tokens so far.

    Called with a dict of int32 tensors: "tokens" [batch, length], and for rows that hold several texts "segments" and
    "positions" of the same shape. Tokens attend within their segment only; segment 0 is padding. Without them, a row
    is one segment of its tokens that are not 0. Other keys are ignored.

    Returns float32 logits [batch, length, vocab_size] under any dtype policy; those of place t are for the token after
    the one at t. With `logits=False`, the features that they are made of, [batch, length, width].
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        layers: int,
        width: int,
        norm: str,
        positions: str,
        tie_embeddings: bool,
        dropout: float,
        max_length: int,
        block: dict[str, Any],
    ) -> None:
        super().__init__(name="language_model")
        self._width, self._max_length, self._positions = width, max_length, positions
        self.embedding = Embedding(vocab_size=vocab_size, width=width, name="embedding")
        self.position_embedding: Any = None
        if positions == "learned":
            self.position_embedding = Embedding(vocab_size=max_length, width=width, name="position_embedding")
        self.dropout = Dropout(dropout, name="dropout")
        self.blocks = [Block(**block, name=f"block{number}") for number in range(1, layers + 1)]
        self.norm = NORMALIZATIONS[norm](name="norm")
        if not tie_embeddings:
            self.head = projection(vocab_size, name="head")

    def attended_lengths(self, batch: Mapping[str, Any]) -> dict[str, tuple[int | None, int | None]]:
        """Queries and keys of each kind of attention for a batch of such shapes."""
        length = batch["tokens"].shape[1]
        return {"tokens": (length, length)}

    def call(self, batch: dict[str, tf.Tensor], training: bool = False, logits: bool = True) -> tf.Tensor:
        tokens = batch["tokens"]
        dimensions.check_length(tokens, self._max_length)
        segments, positions = layout(tokens, batch.get("segments"), batch.get("positions"))
        features = self.dropout(self._embed(tokens, positions), training=training)
        visible = Visibility(query_segments=segments, key_segments=segments, causal=True)
        for block in self.blocks:
            features = block(features, visible=visible, positions=positions, training=training)
        features = self.norm(features)
        return self._logits(features) if logits else features

    def start_decoding(
        self, batch: dict[str, tf.Tensor] | None, rows: int | tf.Tensor, max_length: int
    ) -> dict[str, Any]:
        """The cache in which `decode_step` reads or writes up to `max_length` tokens in each of `rows`, its first axis.

        The batch is not read: there is nothing to know before the first token.
        """
        del batch
        dimensions.check_steps(max_length, self._max_length)
        return {"blocks": [block.start(rows, max_length) for block in self.blocks]}

    def decode_step(
        self, tokens: tf.Tensor, index: tf.Tensor, cache: dict[str, Any]
    ) -> tuple[tf.Tensor, dict[str, Any]]:
        """Logits after the token of each row at position `index`, and the cache with it.

        Args:
            tokens: int32 [rows], of a prompt or as chosen from the logits of the step before.
            index: int32 scalar, 0 in the first step and one more in each.
            cache: From `start_decoding` or the step before.

        Returns:
            float32 [rows, vocab_size], and a cache of the same structure and shapes.
        """
        features = self._embed(tokens[:, None], tf.fill([sizes(tokens)[0], 1], index))
        blocks = []
        for block, part in zip(self.blocks, cache["blocks"], strict=True):
            features, part = block.step(features, index, part)
            blocks.append(part)
        return self._logits(self.norm(features))[:, 0], {"blocks": blocks}

    def _embed(self, tokens: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        vectors = self.embedding(tokens)
        if self._positions == "learned":
            return vectors + tf.cast(self.position_embedding(positions), vectors.dtype)
        if self._positions == "sinusoidal":
            return vectors + tf.cast(sinusoids(positions, self._width), vectors.dtype)
        return vectors

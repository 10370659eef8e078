"""The transformer of Vaswani et al. 2017: an encoder reads one text, a decoder writes another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gin
import keras
import tensorflow as tf

from ..token_model import TokenModel
from . import dimensions
from .block import Block
from .layers import Dropout, Embedding, LayerNormalization, sizes
from .positions import Visibility, layout, sinusoids


@gin.configurable
def transformer(
    *,
    vocab_size: int,
    layers: int = 6,
    width: int = 512,
    heads: int = 8,
    hidden: int = 2048,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    norm: str = "post",
    share_embeddings: bool = True,
    max_length: int = 1024,
    rematerialize: bool = False,
) -> EncoderDecoder:
    """Builds the encoder-decoder of Vaswani et al. 2017 (arXiv 1706.03762).

    The defaults are the paper's base model; big is `width=1024, heads=16, hidden=4096, dropout=0.3`. As in the paper's
    own code, attention has no biases and feed-forward networks have; positions are sinusoids. With
    `norm="pre"` each sublayer reads normalised features and each stack ends with a normalisation (Xiong et al. 2020,
    arXiv 2002.04745), which trains without a long warm-up.

    Args:
        vocab_size: Number of tokens, of which 0 is padding.
        layers: Blocks of the encoder, and of the decoder.
        width: Of embeddings and blocks, a multiple of `heads` and even.
        heads: Heads of each attention.
        hidden: Width between the two layers of a feed-forward network.
        dropout: Share dropped of embeddings and of what each sublayer adds.
        attention_dropout: Share dropped of the attention weights.
        norm: "post" (the paper) or "pre".
        share_embeddings: One matrix for source, target and the softmax (the paper, section 3.4), or three.
        max_length: Longest row, source or target, in tokens; a longer one is refused.
        rematerialize: Compute the inside of each block again in the backward pass instead of keeping it.
    """
    dimensions.at_least(vocab_size=(vocab_size, 4), layers=(layers, 1), width=(width, 2), hidden=(hidden, 1))
    dimensions.at_least(heads=(heads, 1), max_length=(max_length, 1))
    dimensions.check_heads(width, heads)
    dimensions.check_even(width=width)
    dimensions.check_share(dropout=dropout, attention_dropout=attention_dropout)
    dimensions.one_of("norm", norm, ("post", "pre"))
    return EncoderDecoder.make(
        vocab_size=vocab_size,
        layers=layers,
        width=width,
        dropout=dropout,
        norm_first=norm == "pre",
        share_embeddings=share_embeddings,
        max_length=max_length,
        block={
            "width": width,
            "hidden": hidden,
            "activation": "relu",
            "attention": {"heads": heads, "dropout": attention_dropout},
            "normalization": "layer",
            "norm_first": norm == "pre",
            "dropout": dropout,
            "rematerialize": rematerialize,
        },
    )


@keras.saving.register_keras_serializable(package="models")
class EncoderDecoder(TokenModel):
    """Logits of the next target token, from the source and the target tokens before it.

    Called with a dict of int32 tensors: "source" [batch, source length] and "target_in" [batch, length], and for rows
    that hold several pairs "source_segments", "source_positions", "target_segments" and "target_positions" of the same
    shapes. Tokens attend within their segment only, to the source segment of the same number too; segment 0 is padding.
    Without them, a row is one segment of its tokens that are not 0. Other keys are ignored.

    Returns float32 logits [batch, length, vocab_size] under any dtype policy; with `logits=False`, the features that
    they are made of, [batch, length, width].
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        layers: int,
        width: int,
        dropout: float,
        norm_first: bool,
        share_embeddings: bool,
        max_length: int,
        block: dict[str, Any],
    ) -> None:
        super().__init__(name="transformer")
        self._width, self._max_length = width, max_length
        names = ("embedding",) if share_embeddings else ("source_embedding", "target_embedding", "output_embedding")
        embeddings = [Embedding(vocab_size=vocab_size, width=width, name=name) for name in names]
        self.source_embedding, self.target_embedding, self.output_embedding = (
            embeddings * 3 if share_embeddings else embeddings
        )
        self.source_dropout = Dropout(dropout, name="source_dropout")
        self.target_dropout = Dropout(dropout, name="target_dropout")
        numbers = range(1, layers + 1)
        self.encoder = [Block(**block, name=f"encoder_block{number}") for number in numbers]
        self.decoder = [Block(**block, has_memory=True, name=f"decoder_block{number}") for number in numbers]
        self.encoder_norm = LayerNormalization(name="encoder_norm") if norm_first else None
        self.decoder_norm = LayerNormalization(name="decoder_norm") if norm_first else None

    def attended_lengths(self, batch: Mapping[str, Any]) -> dict[str, tuple[int | None, int | None]]:
        """Queries and keys of each kind of attention for a batch of such shapes."""
        source, target = (batch[name].shape[1] for name in ("source", "target_in"))
        return {"source": (source, source), "target": (target, target), "target to source": (target, source)}

    def call(self, batch: dict[str, tf.Tensor], training: bool = False, logits: bool = True) -> tf.Tensor:
        memory, source_segments = self._encode(batch, training)
        tokens = batch["target_in"]
        segments, positions = layout(tokens, batch.get("target_segments"), batch.get("target_positions"))
        dimensions.check_length(tokens, self._max_length)
        features = self._embed(self.target_embedding, tokens, positions)
        features = self.target_dropout(features, training=training)
        seen = {
            "visible": Visibility(query_segments=segments, key_segments=segments, causal=True),
            "memory_visible": Visibility(query_segments=segments, key_segments=source_segments),
        }
        for block in self.decoder:
            features = block(features, memory=memory, **seen, training=training)
        features = self._normed(features)
        return self._logits(features) if logits else features

    def start_decoding(
        self, batch: dict[str, tf.Tensor], rows: int | tf.Tensor | None, max_length: int
    ) -> dict[str, Any]:
        """Reads the sources; what `decode_step` needs to write up to `max_length` tokens a row.

        Args:
            batch: "source" [batch, source length], one text a row.
            rows: Texts to write, a multiple of batch: rows i * rows / batch and following belong to source i. None is
                as many as sources.
            max_length: Most steps, at most the model's own.
        """
        dimensions.check_steps(max_length, self._max_length)
        memory, segments = self._encode(batch, training=False)
        sources = sizes(memory)[0]
        rows = sources if rows is None else rows
        memory, segments = (tf.repeat(each, rows // sources, axis=0) for each in (memory, segments))
        return {
            "memory_allowed": segments[:, None, :] != 0,
            "blocks": [block.start(rows, max_length, memory) for block in self.decoder],
        }

    def decode_step(
        self, tokens: tf.Tensor, index: tf.Tensor, cache: dict[str, Any]
    ) -> tuple[tf.Tensor, dict[str, Any]]:
        """One step as of `models.transformer.LanguageModel`; tokens are the target's input here (begin at 0)."""
        positions = tf.fill([sizes(tokens)[0], 1], index)
        features = self._embed(self.target_embedding, tokens[:, None], positions)
        blocks = []
        for block, part in zip(self.decoder, cache["blocks"], strict=True):
            features, part = block.step(features, index, part, cache["memory_allowed"])
            blocks.append(part)
        return self._logits(self._normed(features))[:, 0], {**cache, "blocks": blocks}

    def _encode(self, batch: dict[str, tf.Tensor], training: bool) -> tuple[tf.Tensor, tf.Tensor]:
        tokens = batch["source"]
        segments, positions = layout(tokens, batch.get("source_segments"), batch.get("source_positions"))
        dimensions.check_length(tokens, self._max_length)
        features = self._embed(self.source_embedding, tokens, positions)
        features = self.source_dropout(features, training=training)
        visible = Visibility(query_segments=segments, key_segments=segments)
        for block in self.encoder:
            features = block(features, visible=visible, training=training)
        return (features if self.encoder_norm is None else self.encoder_norm(features)), segments

    def _embed(self, embedding: Embedding, tokens: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
        vectors = embedding(tokens)
        return vectors + tf.cast(sinusoids(positions, self._width), vectors.dtype)

    def _output_embedding(self) -> Embedding:
        return self.output_embedding

    def _normed(self, features: tf.Tensor) -> tf.Tensor:
        return features if self.decoder_norm is None else self.decoder_norm(features)

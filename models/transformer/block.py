"""The block that transformers repeat: self-attention, perhaps attention to a memory, and a feed-forward network."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .attention import Attention, Cache
from .blockwise_attention import COMPUTED_AGAIN
from .layers import NORMALIZATIONS, Dropout, FeedForward
from .positions import Visibility

Change = Callable[[tf.Tensor], tf.Tensor]


class Block(keras.layers.Layer):
    """Sublayers, each with a residual connection, dropout of what it adds, and a normalisation.

    Args:
        width: Of the inputs and outputs.
        hidden: Of the feed-forward network.
        activation: Of the feed-forward network, see `FeedForward`.
        attention: Arguments of self-attention (and of attention to the memory), see `Attention`.
        has_memory: Whether it attends to a memory, the encoder's output, after itself.
        normalization: "layer" or "rms".
        norm_first: Normalise what a sublayer reads (pre-norm) instead of the sum after it (post-norm).
        dropout: Share of elements dropped of what each sublayer adds.
        output_scale: Factor of the initial last matrix of each sublayer.
        rematerialize: Keep only the inputs for the backward pass, and compute the rest again there.
    """

    def __init__(
        self,
        *,
        width: int,
        hidden: int,
        activation: str,
        attention: dict[str, Any],
        has_memory: bool = False,
        normalization: str,
        norm_first: bool,
        dropout: float,
        output_scale: float = 1.0,
        rematerialize: bool = False,
        name: str,
    ) -> None:
        super().__init__(name=name)
        norm = NORMALIZATIONS[normalization]
        arguments = {**attention, "width": width, "output_scale": output_scale}
        self._width, self._norm_first, self.rematerialize = width, norm_first, rematerialize
        self.attention = Attention(**arguments, name="attention")
        self.attention_norm = norm(name="attention_norm")
        self.attention_dropout = Dropout(dropout, name="attention_dropout")
        self.layers: list[Any] = [self.attention, self.attention_norm, self.attention_dropout]
        self.memory_attention: Any = None
        if has_memory:
            self.memory_attention = Attention(**{**arguments, "rotary": False}, name="memory_attention")
            self.memory_norm = norm(name="memory_norm")
            self.memory_dropout = Dropout(dropout, name="memory_dropout")
            self.layers += [self.memory_attention, self.memory_norm, self.memory_dropout]
        self.feed_forward = FeedForward(
            width=width, hidden=hidden, activation=activation, output_scale=output_scale, name="feed_forward"
        )
        self.feed_forward_norm = norm(name="feed_forward_norm")
        self.feed_forward_dropout = Dropout(dropout, name="feed_forward_dropout")
        self.layers += [self.feed_forward, self.feed_forward_norm, self.feed_forward_dropout]
        self._dropouts = {
            "attention_weights": self.attention.dropout,
            "attention": self.attention_dropout,
            "feed_forward": self.feed_forward_dropout,
        }
        if self.memory_attention is not None:
            self._dropouts |= {"memory_weights": self.memory_attention.dropout, "memory": self.memory_dropout}

    def build(self, *_: Any) -> None:
        for layer in self.layers:
            layer.build((None, None, self._width))

    def call(
        self,
        inputs: tf.Tensor,
        *,
        visible: Visibility,
        positions: tf.Tensor | None = None,
        memory: tf.Tensor | None = None,
        memory_visible: Visibility | None = None,
        training: bool = False,
    ) -> tf.Tensor:
        """Features to features, both [batch, length, width], with a memory [batch, memory length, width] if it has one.

        Positions are integers [batch, length], which rotary ones need.
        """
        # Drawn here, because what is computed twice must drop the same elements twice.
        seeds = self._draw(training)

        def compute(features: tf.Tensor, *of_memory: tf.Tensor) -> tf.Tensor:
            return self._sublayers(
                features,
                lambda features: self.attention(
                    features,
                    features,
                    visible=visible,
                    positions=positions,
                    seed=seeds["attention_weights"],
                    training=training,
                ),
                lambda features: self.memory_attention(
                    features, *of_memory, visible=memory_visible, seed=seeds["memory_weights"], training=training
                ),
                seeds,
                training,
            )

        if self.rematerialize and training:
            compute = tf.recompute_grad(_named_when_repeated(compute))
        return compute(inputs) if memory is None else compute(inputs, memory)

    def start(self, rows: int | tf.Tensor, length: int, memory: tf.Tensor | None = None) -> dict[str, Cache]:
        """The cache before the first step: empty, and what the memory [rows, memory length, width] offers."""
        cache = {"self": self.attention.empty_cache(rows, length)}
        if self.memory_attention is not None:
            cache["memory"] = self.memory_attention.keys_and_values(memory)
        return cache

    def step(
        self, inputs: tf.Tensor, index: tf.Tensor, cache: dict[str, Cache], memory_allowed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, dict[str, Cache]]:
        """Features to features for one position [rows, 1, width]; returns them and the cache with it."""
        cache = dict(cache)

        def attention(features: tf.Tensor) -> tf.Tensor:
            outputs, cache["self"] = self.attention.step(features, index, cache["self"])
            return outputs

        def memory_attention(features: tf.Tensor) -> tf.Tensor:
            return self.memory_attention.look_up(features, memory_allowed, cache["memory"])

        return self._sublayers(inputs, attention, memory_attention, self._draw(training=False), False), cache

    def _draw(self, training: bool) -> dict[str, tf.Tensor | None]:
        return {name: dropout.draw(training) for name, dropout in self._dropouts.items()}

    def _sublayers(
        self,
        features: tf.Tensor,
        attention: Change,
        memory_attention: Change,
        seeds: dict[str, tf.Tensor | None],
        training: bool,
    ) -> tf.Tensor:
        sublayers: dict[str, tuple[Change, Change]] = {"attention": (attention, self.attention_norm)}
        if self.memory_attention is not None:
            sublayers["memory"] = (memory_attention, self.memory_norm)
        # What is computed again is in no call of a model, which would say whether it trains, as scales of float8 ask.
        sublayers["feed_forward"] = (
            lambda features: self.feed_forward(features, training=training),
            self.feed_forward_norm,
        )
        for name, (sublayer, norm) in sublayers.items():
            drop = self._dropouts[name].with_seed(seeds[name])
            # A sublayer may have a dtype policy of its own.
            if self._norm_first:
                features = features + tf.cast(drop(sublayer(norm(features))), features.dtype)
            else:
                features = norm(features + tf.cast(drop(sublayer(features)), features.dtype))
        return features


def _named_when_repeated(compute: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """`compute` with a name scope around what it does from the second call on, which is the backward pass's."""
    calls = itertools.count()

    def named(*tensors: tf.Tensor) -> tf.Tensor:
        with tf.name_scope(COMPUTED_AGAIN) if next(calls) else contextlib.nullcontext():
            return compute(*tensors)

    return named

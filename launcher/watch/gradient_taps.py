"""Gradient taps: look at the gradients that pass between a model's layers, in the graph, where they are computed.

A tap is the identity with one more input, a token of zeros. In the backward pass, the token's gradient is what the tap
saw of the gradient beside it, so `tape.gradient(loss, tokens)` gives the statistics and keeps no gradient in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.machine.replaced import put
from launcher.step import gradients
from launcher.step.layers import walk
from launcher.step.state import unique_name
from launcher.step.trainer import Trainer
from launcher.watch.float16_losses import NUM_BINS, count_exponents

# Maxima do not add up over a layer's calls, so each call has a place of its own; those past the last share it.
_CALLS = 4
TOKEN_SIZE = NUM_BINS + _CALLS


class GradientTaps:
    """One tap on every leaf layer of a model: those without layers inside, and recurrent layers as a whole.

    Layers that come before the first weights have no gradient in training, and none here.

    Example, while a tf.function is traced:

        with taps.installed():
            runtime.call(replica_function)

    and in the replica's function:

        with tf.GradientTape() as tape:
            tokens = taps.watch(tape)
            loss = ...
        seen = tape.gradient(loss, tokens, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    """

    def __init__(self, model: keras.Model):
        named = named_leaves(model)
        self.paths = tuple(named)  # a name for each tapped layer: its path, made unique where layers share one
        self.layers: tuple[keras.layers.Layer, ...] = tuple(named.values())
        self._held_elsewhere = _weights_of([model]) - _weights_of(self.layers)
        # Replicas are traced in threads, in turns: each has a pass of its own.
        self._thread = threading.local()
        # Dtypes of each layer's outputs in the pass that was traced last, in the order of its calls.
        self.outputs: list[list[str]] = [[] for _ in self.layers]

    def watch(self, tape: tf.GradientTape) -> list[tf.Tensor]:
        """Makes this pass's tokens, float32 [TOKEN_SIZE] each, in the order of `layers`; under the tape."""
        one = _Pass(
            tokens=[tf.zeros([TOKEN_SIZE]) for _ in self.layers],
            calls=[0] * len(self.layers),
            outputs=[[] for _ in self.layers],
            past_weights=bool(self._held_elsewhere),
        )
        tape.watch(one.tokens)
        self._thread.present, self.outputs = one, one.outputs
        return one.tokens

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the taps into the model while a pass is traced, and takes them out again; around all replicas."""
        with contextlib.ExitStack() as stack:
            for index, layer in enumerate(self.layers):
                self._on(index, layer, stack)
            yield

    def _on(self, index: int, layer: keras.layers.Layer, stack: contextlib.ExitStack) -> None:
        call = layer.call

        def tapped(*args: Any, **kwargs: Any) -> Any:
            return keras.tree.map_structure(lambda value: self._tap(index, value), call(*args, **kwargs))

        put(stack, layer, "call", tapped)

    def _tap(self, index: int, value: Any) -> Any:
        present: _Pass | None = getattr(self._thread, "present", None)
        if present is None:
            return value
        present.past_weights |= bool(self.layers[index].trainable_variables)
        if not tf.is_tensor(value) or not value.dtype.is_floating:
            return value
        present.outputs[index].append(value.dtype.name)
        if not present.past_weights:
            return value
        place = min(present.calls[index], _CALLS - 1)
        present.calls[index] += 1
        return _identity(value, present.tokens[index], place)


@dataclasses.dataclass
class _Pass:
    """One forward pass while it is traced."""

    tokens: list[tf.Tensor]
    calls: list[int]
    outputs: list[list[str]]
    past_weights: bool


class Seen(NamedTuple):
    """Gradients of one pass; float32, equal on every replica.

    Weight gradients are those of a microbatch, before the reduction; with a loss scale, they are scaled. Counts are
    sums over replicas (see `float16_losses.count_exponents`); maxima are of finite magnitudes.
    """

    counts: Any  # [tensors, 256]: those of the weights, then of the tapped layers' outputs
    maxima: Any  # [replicas, tensors]
    loss: Any  # scalar, the mean over the microbatches' weight


class TappedPass:
    """The pass of a trainer's step over a model of its own or another one, with taps; it changes nothing."""

    def __init__(self, trainer: Trainer, model: keras.Model):
        self.taps = GradientTaps(model)
        self._step = trainer.step_of(model, self.taps.watch)

    def observe(self, batch: Batch, scale: tf.Tensor) -> tuple[Seen, list[tf.Tensor]]:
        """Statistics of a replica's first microbatch, and its gradients by the weights; see `first_microbatch`."""
        local = self._step.first_microbatch(batch, scale=scale)
        seen = tf.stack([*map(observe, local.gradients), *local.watched])
        *tables, loss, weight = gradients.reduce_sum([*to_reduce(seen), local.loss, local.weight])
        return Seen._make([*tables, tf.math.divide_no_nan(loss, weight)]), local.gradients


def counts(seen: tf.Tensor) -> tf.Tensor:
    """Counts of exponents, float32 [..., 256], in tokens' gradients [..., TOKEN_SIZE]; see `count_exponents`."""
    return seen[..., :NUM_BINS]


def maxima(seen: tf.Tensor) -> tf.Tensor:
    """Largest finite magnitudes, float32 [...], in tokens' gradients [..., TOKEN_SIZE].

    Exact where a layer is called up to 4 times; past that, no less than the true value.
    """
    return tf.reduce_max(seen[..., NUM_BINS:], axis=-1)


def to_reduce(seen: tf.Tensor) -> list[tf.Tensor]:
    """Addends of this replica to a sum over replicas, of tokens' gradients [tensors, TOKEN_SIZE].

    Returns:
      Counts [tensors, 256], and maxima [replicas, tensors] that are zero but for this replica's row.
    """
    context = tf.distribute.get_replica_context()
    row = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)[:, None]
    return [counts(seen), row * maxima(seen)[None, :]]


def observe(tensor: tf.Tensor, place: int = 0) -> tf.Tensor:
    """Note of a tap on a tensor, float32 [TOKEN_SIZE]."""
    wide = tf.abs(tf.cast(tensor, tf.float32))
    largest = tf.reduce_max(tf.where(tf.math.is_finite(wide), wide, 0.0))
    # Of no elements, the largest is -inf.
    return tf.concat([count_exponents(tensor), tf.maximum(largest, 0.0) * tf.one_hot(place, _CALLS)], axis=0)


def _identity(value: tf.Tensor, token: tf.Tensor, place: int) -> tf.Tensor:
    @tf.custom_gradient
    def tap(value: tf.Tensor, token: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            upstream = tf.convert_to_tensor(upstream)
            return upstream, observe(upstream, place)

        return tf.identity(value), gradient

    return tap(value, token)


def named_leaves(model: keras.Model) -> dict[str, keras.layers.Layer]:
    """The layers that have taps, by their paths."""
    named: dict[str, keras.layers.Layer] = {}
    # The layers inside a recurrent one run in a loop, which a token made outside of it cannot leave.
    for placed in walk(model, enter=lambda layer: not isinstance(layer, keras.layers.RNN)):
        # Masking hands its mask on with the very tensor that it returns.
        is_left_out = isinstance(placed.layer, (keras.layers.InputLayer, keras.layers.Masking, keras.Model))
        if not is_left_out and (isinstance(placed.layer, keras.layers.RNN) or placed.is_leaf):
            named[unique_name(placed.path, named)] = placed.layer
    return named


def _weights_of(layers: Iterable[keras.layers.Layer]) -> set[int]:
    return {id(variable) for layer in layers for variable in layer.trainable_variables}

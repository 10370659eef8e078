"""Cross-entropy over a vocabulary: label-smoothed, from logits, or from features without all logits at once.

From features, pieces of the tokens are computed one after another, each with its gradients where they are needed, so
that its logits are made once and kept for no one (as in the fused loss of Hsu et al. 2024, Liger Kernel, arXiv
2410.10989).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import xla
from launcher.models import products

# Logits of up to so many bytes are computed whole: pieces would save little, and a small loop costs time. On a GPU
# pieces cost time always, for memory that a card of 40 GB and more has.
_WHOLE_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30, "tpu": 256 << 20}
# A piece has at most so many bytes of logits; on a GPU so many times the matrix's, if that is more. Each piece reads
# the matrix and adds to its gradient, about five passes over it, where its logits take six or seven.
_PIECE_BYTES, _MATRICES = 64 << 20, 4
# On a TPU a piece has so many tokens that the matrix's gradient is read and written under its own product (peak /
# bandwidth * 4 bytes of a v5e), and that 16-bit logits stay on the chip.
_TOKENS = 1024
_LOWEST = -1e30
# Gradients by logits lie between -1 and 1, and are multiplied by the loss scale only behind the products: so many times
# as large, they keep what float16 would flush below 2^-24.
_UP = {tf.float16: 2.0**12}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossChunks:
    """The recipe's `train.loss_chunks`, and the device: "cpu", "gpu" or "tpu".

    Attributes:
      pieces: "auto", 1 for whole logits, or a number of pieces.
    """

    pieces: int | Literal["auto"] = 1
    accelerator: str = "cpu"

    def count(self, tokens: int, vocab_size: int, width: int) -> int:
        """The number of pieces of a loss over the tokens of one microbatch of one replica; 1 for whole logits.

        Args:
          width: elements of a token's features.
        """
        if self.pieces != "auto":
            return min(self.pieces, tokens)
        logits_bytes = tokens * vocab_size * 4
        if logits_bytes <= _WHOLE_BYTES[self.accelerator]:
            return 1
        most = max(_PIECE_BYTES, _MATRICES * vocab_size * width * 4 if self.accelerator == "gpu" else 0)
        least = -(-tokens // _TOKENS) if self.accelerator == "tpu" else -(-logits_bytes // most)
        # So many pieces, or somewhat more that are equal.
        return next((count for count in range(least, 2 * least) if tokens % count == 0), least)


WHOLE = LossChunks()
_present: contextvars.ContextVar[LossChunks] = contextvars.ContextVar("loss_chunks", default=WHOLE)


@contextlib.contextmanager
def using(pieces: LossChunks) -> Iterator[None]:
    """A block in which what tasks compute follows this setting."""
    token = _present.set(pieces)
    try:
        yield
    finally:
        _present.reset(token)


def present() -> LossChunks:
    """The setting of the step that is traced; whole logits where nobody says."""
    return _present.get()


def token_losses(logits: tf.Tensor, targets: tf.Tensor, label_smoothing: float = 0.0) -> tuple[tf.Tensor, tf.Tensor]:
    """Cross-entropy of each token with its smoothed target, and whether the token had the highest logit.

    The smoothed target of a token is `(1 - label_smoothing) * one_hot + label_smoothing / vocab_size`, with the token
    itself among those that share the rest (Szegedy et al. 2015; Vaswani et al. 2017, section 5.4).

    Args:
      logits: [..., vocab_size] in the dtype that is computed in, float32.
      targets: int32 [...].
      label_smoothing: in [0, 1).

    Returns:
      (losses in nats, 1.0 where the first of the highest logits is the token's, else 0.0), [...] in the logits' dtype.
    """
    if xla.is_compiling():
        return _closed(logits, targets, label_smoothing)
    if label_smoothing:
        size = logits.shape[-1]
        off = label_smoothing / size
        spread = tf.one_hot(targets, size, on_value=1.0 - label_smoothing + off, off_value=off, dtype=logits.dtype)
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=spread, logits=logits)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits)
    return losses, tf.cast(tf.argmax(logits, axis=-1, output_type=targets.dtype) == targets, logits.dtype)


def _closed(logits: tf.Tensor, targets: tf.Tensor, label_smoothing: float, *, once: bool = False) -> tuple:
    """Sums over the vocabulary alone, for XLA to fuse: no tensor of targets, and the softmax is computed again for the
    gradient instead of kept. As kernels, each operation would be a pass over the logits. `once`: see `_in_one_pass`."""
    size, dtype = logits.shape[-1], logits.dtype
    rest, none = tf.constant(1.0 - label_smoothing, dtype), tf.zeros([], dtype)

    @tf.custom_gradient
    def losses_and_right(logits: tf.Tensor) -> tuple:
        places = tf.range(size, dtype=targets.dtype)
        hit = places == targets[..., tf.newaxis]
        if once:
            top, total, own, before = _in_one_pass(logits, targets[..., tf.newaxis])
            earlier = before >= own
        else:
            top = tf.reduce_max(logits, axis=-1, keepdims=True)
            total = tf.reduce_sum(tf.exp(logits - top), axis=-1, keepdims=True)
            own = tf.reduce_sum(tf.where(hit, logits, none), axis=-1, keepdims=True)
            # A sum as well, not the place of the first of the highest: XLA makes one pass of all sums.
            highest = (logits >= top) & (places < targets[..., tf.newaxis])
            earlier = tf.reduce_sum(tf.cast(highest, dtype), axis=-1, keepdims=True) > none
        log_sum = top + tf.math.log(total)
        losses = (log_sum - rest * own)[..., 0]
        if label_smoothing:
            losses -= label_smoothing / size * tf.reduce_sum(logits, axis=-1)
        first = ((own >= top) & ~earlier)[..., 0]

        def gradient(by_loss: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            by_logit = tf.exp(logits - log_sum) - tf.where(hit, rest, none) - label_smoothing / size
            return by_logit * by_loss[..., tf.newaxis]

        return (losses, tf.cast(first, dtype)), gradient

    return losses_and_right(logits)


# Leans on TensorFlow: XLA's reductions of several tensors have this wrapper in Python (2.16.2 to 2.21.0). Noticed by
# tests/tasks/test_loss_chunks.py. Then: use the operation XlaVariadicReduceV2 by its new wrapper, or two passes.
def _in_one_pass(logits: tf.Tensor, targets: tf.Tensor) -> list[tf.Tensor]:
    """[highest logit, sum of exp(logit - highest), the target's own, highest of the words before it], each [tokens, 1].

    Of logits float32 [tokens, vocab_size] and integer targets [tokens, 1] in one reduction of several tensors, as XLA
    compiles it: on a GPU it would read them twice. `_LOWEST` where no word stands before.
    """
    try:
        from tensorflow.compiler.tf2xla.python.xla import variadic_reduce
    except ImportError:
        raise UsageError(
            f"TensorFlow {tf.__version__} has no XlaVariadicReduceV2, by which a loss of 16 bits is computed on GPUs; "
            "install 2.16 to 2.21, which have it, or give the embedding or head 'float32' in train.precision_overrides"
        ) from None

    @tf.function(input_signature=[tf.TensorSpec([], tf.float32)] * 8, autograph=False)
    def join(*both: tf.Tensor) -> tuple[tf.Tensor, ...]:
        (top, total, own, before), (top_, total_, own_, before_) = both[:4], both[4:]
        highest = tf.maximum(top, top_)
        total = total * tf.exp(top - highest) + total_ * tf.exp(top_ - highest)
        return highest, total, tf.maximum(own, own_), tf.maximum(before, before_)

    places, none = tf.range(logits.shape[-1], dtype=targets.dtype), tf.constant(_LOWEST)
    own, before = (tf.where(chosen, logits, none) for chosen in (places == targets, places < targets))
    start = [none, tf.constant(0.0), none, none]
    inputs = [logits, tf.ones_like(logits), own, before]
    return [reduced[:, tf.newaxis] for reduced in variadic_reduce(inputs, start, [1], join.get_concrete_function())]


class Head(NamedTuple):
    """The matrix [vocab_size, width] that makes logits of features, and a bias [vocab_size] or None.

    A matrix of 16 bits is for products of 16-bit operands with float32 sums: see `models.products.logits`.
    """

    matrix: tf.Tensor
    bias: tf.Tensor | None = None


def chunked_sums(
    features: tf.Tensor,
    head: Head,
    targets: tf.Tensor,
    weight: tf.Tensor,
    *,
    pieces: int = 1,
    narrow: bool = False,
    label_smoothing: float = 0.0,
    training: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sums of the losses and of the tokens that had the highest logit, as `token_losses`.

    Args:
      features: [tokens, width] of static shape; logits are products of operands in the dtype of the head's matrix.
      head: matrix and bias, both differentiable.
      targets: int32 [tokens].
      weight: of each token, in the dtype of the logits.
      pieces: how many there are, of the tokens.
      narrow: whether logits of a bfloat16 head are kept in bfloat16, less the target's own, which costs few digits.
      label_smoothing: in [0, 1).
      training: whether gradients will be asked for. Pieces are then differentiated while their logits are there;
        otherwise, if they are asked for all the same, the logits are made again.

    Returns:
      (sum of the losses in nats, weight of the right tokens), scalars in the dtype of the logits.
    """
    operands, dtype, (tokens, width) = head.matrix.dtype, weight.dtype, features.shape
    once = operands.size == 2 and xla.is_compiling() and present().accelerator == "gpu"
    losses_of = functools.partial(_closed, once=True) if once else token_losses
    piece = -(-tokens // pieces)

    def in_pieces(whole: tf.Tensor) -> tf.Tensor:
        """[pieces, piece, ...], filled up with zeros: with weight 0."""
        if missing := pieces * piece - tokens:
            whole = tf.pad(whole, [[0, missing], *([[0, 0]] * (len(whole.shape) - 1))])
        return tf.reshape(whole, [pieces, piece, *whole.shape[1:]])

    targets, weight = in_pieces(targets), in_pieces(weight)

    def sums(x: tf.Tensor, index: tf.Tensor, tensors: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        logits = products.logits(x, *tensors, compiling=xla.is_compiling(), factor=_UP.get(operands, 1.0))
        if narrow and operands == tf.bfloat16:
            # The loss does not change by what all logits of a token are less; digits are lost far from the target only.
            matrix, *biases = (tf.gather(tensor, targets[index]) for tensor in tensors)
            own = tf.reduce_sum(tf.cast(x, dtype) * tf.cast(matrix, dtype), axis=-1)
            own = tf.stop_gradient(sum(biases, own))[:, tf.newaxis]
            logits = tf.cast(tf.cast(logits - own, operands), dtype)
        losses, right = losses_of(logits, targets[index], label_smoothing)
        return tf.reduce_sum(losses * weight[index]), tf.reduce_sum(right * weight[index])

    def looped(xs: tf.Tensor, tensors: list[tf.Tensor], *, differentiates: bool) -> list[tf.Tensor]:
        """Both sums; if asked for, also the gradients of the first by the features and the tensors."""

        def turn(index: tf.Tensor, loss: tf.Tensor, right: tf.Tensor, *gradients: Any) -> list[Any]:
            x = tf.cast(xs[index], operands)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([x, *tensors])
                more, hits = sums(x, index, tensors)
            totals = [loss + more, right + hits]
            if differentiates:
                rows, *by_tensors = gradients
                by_x, *more_by = tape.gradient(more, [x, *tensors])
                totals += [rows.write(index, by_x), *map(operator.add, by_tensors, more_by)]
            return totals

        totals = [tf.zeros([], dtype)] * 2
        if differentiates:
            rows = tf.TensorArray(dtype, size=pieces, element_shape=[piece, width])
            totals += [rows, *(tf.zeros(tensor.shape, dtype) for tensor in tensors)]
        loss, right, *gradients = _turns(pieces, turn, totals)
        if differentiates:
            gradients[0] = tf.reshape(gradients[0].stack(), [-1, width])[:tokens]
        return [loss, right, *gradients]

    @tf.custom_gradient
    def both(features: tf.Tensor, *tensors: tf.Tensor) -> tuple:
        xs = in_pieces(features)
        loss, right, *known = looped(xs, list(tensors), differentiates=training)

        def gradient(by_loss: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            by_features, *by_tensors = known or looped(xs, list(tensors), differentiates=True)[2:]
            # The loss scale is in `by_loss`: 16 bits would lose small gradients without it.
            return [
                tf.cast(by_features * by_loss, features.dtype),
                *(by_tensor * by_loss for by_tensor in by_tensors),
            ]

        return (loss, right), gradient

    return both(features, *(tensor for tensor in head if tensor is not None))


def _turns(count: int, body: Callable, state: list) -> list:
    """The state that `body(index, *state)` leaves after `count` turns; a single one needs no loop."""
    if count == 1:
        return list(body(tf.constant(0), *state))
    loop = tf.while_loop(
        lambda index, *_: index < count,
        lambda index, *state: (index + 1, *body(index, *state)),
        (tf.constant(0), *state),
        parallel_iterations=1,
    )
    return list(loop[1:])

"""Cross-entropy over a vocabulary: label-smoothed, from logits, or from features without all logits at once.

From features, pieces of the tokens are computed one after another, each with its gradients where they are needed, so
that its logits are made once and kept for no one (as in the fused loss of Hsu et al. 2024, Liger Kernel, arXiv
2410.10989). Pieces of the vocabulary go through an online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867) and
are made again in the backward pass: a fourth product, and nothing of the logits' size leaves a TPU's vector memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from launcher.machine import xla
from launcher.tasks import loss_chunks, one_pass
from launcher.tasks.loss_chunks import LANES, Split
from models.products import logits as logits_of
from models.products import product

COMPUTED_AGAIN = "computed_again"
"""Name scope of what the backward pass computes again, here and in `models.transformer`: no part of a model's FLOPs."""

_LOWEST = -1e30
# Gradients by logits lie between -1 and 1, and are multiplied by the loss scale only behind the products: so many times
# as large, they keep what float16 would flush below 2^-24.
_UP = {tf.float16: 2.0**12}


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
    gradient instead of kept. As kernels, each operation would be a pass over the logits. `once`: see `one_pass`."""
    size, dtype = logits.shape[-1], logits.dtype
    rest, none = tf.constant(1.0 - label_smoothing, dtype), tf.zeros([], dtype)

    @tf.custom_gradient
    def losses_and_right(logits: tf.Tensor) -> tuple:
        places = tf.range(size, dtype=targets.dtype)
        hit = places == targets[..., tf.newaxis]
        if once:
            top, total, own, before = one_pass.reduced(logits, targets[..., tf.newaxis], _LOWEST)
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


class Head(NamedTuple):
    """What makes logits of features: a matrix [vocab_size, width], and a bias [vocab_size] or None.

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
    split: Split,
    label_smoothing: float = 0.0,
    training: bool = True,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Weighted sums of the losses and of the tokens that had the highest logit, as `token_losses`.

    Args:
      features: [tokens, width] of static shape; logits are products of operands in the dtype of the head's matrix.
      head: matrix and bias, both differentiable.
      targets: int32 [tokens].
      weight: of each token, in the dtype of the logits.
      split: in which pieces.
      label_smoothing: in [0, 1).
      training: whether gradients will be asked for. Pieces of the tokens are then differentiated while their logits are
        there; otherwise, if they are asked for all the same, the logits are made again.

    Returns:
      (sum of the losses in nats, weight of the right tokens), scalars in the dtype of the logits.
    """
    arguments = (features, head, targets, weight)
    if split.vocabulary > 1:
        return _by_words(*arguments, split=split, label_smoothing=label_smoothing)
    return _by_tokens(*arguments, split=split, label_smoothing=label_smoothing, training=training)


def _by_tokens(
    features: tf.Tensor,
    head: Head,
    targets: tf.Tensor,
    weight: tf.Tensor,
    *,
    split: Split,
    label_smoothing: float,
    training: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    operands, dtype, shape, count = head.matrix.dtype, weight.dtype, features.shape, split.tokens
    once = operands.size == 2 and xla.is_compiling() and loss_chunks.present().accelerator == "gpu"
    losses_of = functools.partial(_closed, once=True) if once else token_losses
    part, in_parts = _parts(shape[0], count)
    targets, weight = in_parts(targets), in_parts(weight)
    zero = tf.zeros([], dtype)

    def sums(xs: tf.Tensor, index: tf.Tensor, tensors: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        logits = _logits(xs, *tensors)
        if split.narrow and operands == tf.bfloat16:
            # The loss does not change by what all logits of a token are less; digits are lost far from the target only.
            matrix, *biases = (tf.gather(one, targets[index]) for one in tensors)
            own = tf.reduce_sum(tf.cast(xs, dtype) * tf.cast(matrix, dtype), axis=-1)
            own = tf.stop_gradient(sum(biases, own))[:, tf.newaxis]
            logits = tf.cast(tf.cast(logits - own, operands), dtype)
        losses, right = losses_of(logits, targets[index], label_smoothing)
        return tf.reduce_sum(losses * weight[index]), tf.reduce_sum(right * weight[index])

    def forward(xs: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Both sums."""

        def turn(index: tf.Tensor, *totals: tf.Tensor) -> list[tf.Tensor]:
            more = sums(tf.cast(xs[index], operands), index, tensors)
            return [total + one for total, one in zip(totals, more, strict=True)]

        return _turns(count, turn, [zero, zero])

    def differentiated(xs: tf.Tensor, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Both sums, and the gradients of the first by the features and the tensors."""

        def turn(
            index: tf.Tensor, loss: tf.Tensor, right: tf.Tensor, rows: tf.TensorArray, *totals: tf.Tensor
        ) -> list[tf.Tensor]:
            x = tf.cast(xs[index], operands)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([x, *tensors])
                more, hits = sums(x, index, tensors)
            by_x, *by_tensors = tape.gradient(more, [x, *tensors])
            gradients = [total + one for total, one in zip(totals, by_tensors, strict=True)]
            return [loss + more, right + hits, rows.write(index, by_x), *gradients]

        rows = tf.TensorArray(dtype, size=count, element_shape=[part, shape[1]])
        nothing = [tf.zeros(one.shape, dtype) for one in tensors]
        loss, right, rows, *by_tensors = _turns(count, turn, [zero, zero, rows, *nothing])
        return [loss, right, tf.reshape(rows.stack(), [-1, shape[1]])[: shape[0]], *by_tensors]

    @tf.custom_gradient
    def both(features: tf.Tensor, *tensors: tf.Tensor) -> tuple:
        xs = in_parts(features)
        loss, right, *found = (differentiated if training else forward)(xs, list(tensors))

        def gradient(by_loss: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            by_features, *by_tensors = found or differentiated(xs, list(tensors))[2:]
            # The loss scale is in `by_loss`: 16 bits would lose small gradients without it.
            return [tf.cast(by_features * by_loss, features.dtype), *(one * by_loss for one in by_tensors)]

        return (loss, right), gradient

    return both(features, *_tensors(head))


def _by_words(
    features: tf.Tensor, head: Head, targets: tf.Tensor, weight: tf.Tensor, *, split: Split, label_smoothing: float
) -> tuple[tf.Tensor, tf.Tensor]:
    operands, dtype, (tokens, width), size = head.matrix.dtype, weight.dtype, features.shape, head.matrix.shape[0]
    rows, count, compiling = split.tokens, split.vocabulary, xla.is_compiling()
    words = -(-size // count)
    if (count - 1) * _whole_lanes(words) < size:
        words = _whole_lanes(words)
    part, in_parts = _parts(tokens, rows)
    targets, weight = in_parts(targets), in_parts(weight)
    zeros = tf.zeros([part], dtype)
    certain, spread = tf.constant(1.0 - label_smoothing, dtype), tf.constant(label_smoothing / size, dtype)

    @tf.custom_gradient
    def sums(features: tf.Tensor, *tensors: tf.Tensor) -> tuple:
        xs = in_parts(features)
        matrices, *biases = (tf.reshape(_padded(one, count * words), [count, words, *one.shape[1:]]) for one in tensors)

        def piece(x: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            """Logits [part, words], the number of each word, and whether there is one."""
            logits = _logits(x, matrices[index], *(bias[index] for bias in biases))
            places = index * words + tf.range(words)
            real = places < size
            return (logits if size == count * words else tf.where(real, logits, _LOWEST)), places, real

        def forward(row: tf.Tensor, loss: tf.Tensor, right: tf.Tensor, logs: tf.TensorArray) -> list[tf.Tensor]:
            x, target = tf.cast(xs[row], operands), targets[row][:, tf.newaxis]

            def turn(
                index: tf.Tensor, top: tf.Tensor, before: tf.Tensor, total: tf.Tensor, own: tf.Tensor, all_: tf.Tensor
            ) -> list[tf.Tensor]:
                logits, places, real = piece(x, index)
                highest = tf.maximum(top, tf.reduce_max(logits, axis=-1))
                total = total * tf.exp(top - highest)
                total += tf.reduce_sum(tf.exp(logits - highest[:, tf.newaxis]), axis=-1)
                own += tf.reduce_sum(tf.where(places == target, logits, 0.0), axis=-1)
                # Of equal logits the first counts: the token is right if none is higher and none before it as high.
                earlier = tf.reduce_max(tf.where(places < target, logits, _LOWEST), axis=-1)
                if label_smoothing:
                    all_ += tf.reduce_sum(tf.where(real, logits, 0.0), axis=-1)
                return [highest, tf.maximum(before, earlier), total, own, all_]

            lowest = zeros + _LOWEST
            top, before, total, own, all_ = _turns(count, turn, [lowest, lowest, zeros, zeros, zeros])
            log_sum = top + tf.math.log(total)
            losses = log_sum - certain * own - spread * all_
            first = tf.cast((own >= top) & (before < own), dtype)
            loss += tf.reduce_sum(losses * weight[row])
            return [loss, right + tf.reduce_sum(first * weight[row]), logs.write(row, log_sum)]

        zero = tf.zeros([], dtype)
        logs = tf.TensorArray(dtype, size=rows, element_shape=[part])
        loss, right, logs = _turns(rows, forward, [zero, zero, logs])
        log_sums = logs.stack()

        def gradient(by_loss: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            # Rounded before the loss scale in `by_loss`: with it and the factor they could be more than float16 holds,
            # and the many gradients by a target's logit of nearly -1 would no longer be so in bfloat16.
            factor = _UP.get(operands, 1.0)
            inside, behind = (by_loss, None) if operands.size > 2 else (factor, by_loss / factor)

            def backward(row: tf.Tensor, by_features: tf.TensorArray, *totals: tf.TensorArray) -> list:
                x, target = tf.cast(xs[row], operands), targets[row][:, tf.newaxis]
                log_sum = log_sums[row][:, tf.newaxis]
                factor = (weight[row] * inside)[:, tf.newaxis]

                def turn(index: tf.Tensor, by_x: tf.Tensor, *totals: tf.TensorArray) -> list:
                    with tf.name_scope(COMPUTED_AGAIN):
                        logits, places, real = piece(x, index)
                    by_logits = tf.exp(logits - log_sum) - tf.where(places == target, certain, 0.0)
                    if label_smoothing:
                        by_logits -= tf.where(real, spread, 0.0)
                    by_logits *= factor
                    narrow = tf.cast(by_logits, operands)
                    by_matrix = product(narrow, x, compiling=compiling, transpose_a=True)
                    found = [by_matrix, tf.reduce_sum(by_logits, axis=0)]
                    if rows > 1:
                        found = [one + total.read(index) for one, total in zip(found, totals, strict=False)]
                    by_x += product(narrow, matrices[index], compiling=compiling)
                    return [by_x, *(total.write(index, one) for total, one in zip(totals, found, strict=False))]

                by_x, *added = _turns(count, turn, [tf.zeros([part, width], dtype), *totals])
                return [by_features.write(row, by_x), *added]

            by_features = tf.TensorArray(dtype, size=rows, element_shape=[part, width])
            empty = [_array(count, [words, *one.shape[1:]], dtype, filled=rows > 1) for one in tensors]
            by_features, *found = _turns(rows, backward, [by_features, *empty])
            by_features = tf.reshape(by_features.stack(), [-1, width])[:tokens]
            found = [tf.reshape(one.stack(), [count * words, *one.element_shape[1:]])[:size] for one in found]
            if behind is not None:
                by_features, found = by_features * behind, [one * behind for one in found]
            return [tf.cast(by_features, features.dtype), *found]

        return (loss, right), gradient

    return sums(features, *_tensors(head))


def _whole_lanes(size: int) -> int:
    return -(-size // LANES) * LANES


def _array(size: int, shape: list[int], dtype: tf.DType, *, filled: bool) -> tf.TensorArray:
    array = tf.TensorArray(dtype, size=size, element_shape=shape, clear_after_read=False)
    return array.unstack(tf.zeros([size, *shape], dtype)) if filled else array


def _tensors(head: Head) -> list[tf.Tensor]:
    return [one for one in head if one is not None]


def _logits(x: tf.Tensor, matrix: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
    return logits_of(x, matrix, bias, compiling=xla.is_compiling(), factor=_UP.get(matrix.dtype, 1.0))


def _parts(tokens: int, count: int) -> tuple[int, Callable[[tf.Tensor], tf.Tensor]]:
    """Tokens of a part, and what takes a tensor of all tokens into parts, filled up with zeros: with weight 0."""
    part = -(-tokens // count)
    return part, lambda tensor: tf.reshape(_padded(tensor, count * part), [count, part, *tensor.shape[1:]])


def _padded(tensor: tf.Tensor, size: int) -> tf.Tensor:
    more = size - tensor.shape[0]
    return tf.pad(tensor, [[0, more], *([[0, 0]] * (len(tensor.shape) - 1))]) if more else tensor


def _turns(count: int, body: Callable, state: list) -> list:
    """What `body(index, *state)` leaves after `count` turns; a single one needs no loop."""
    if count == 1:
        return list(body(tf.constant(0), *state))
    loop = tf.while_loop(
        lambda index, *_: index < count,
        lambda index, *state: (index + 1, *body(index, *state)),
        (tf.constant(0), *state),
        parallel_iterations=1,
    )
    return list(loop[1:])

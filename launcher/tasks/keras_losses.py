"""Whether the loss of a compiled model is the mean of its parts' losses: known of Keras's own, and else found by trial.

A loss is tried on two halves of a batch and on both as one, with outputs and labels of several kinds: what it leaves
out may be marked in either. One that is no such mean is computed on the outputs for the whole batch. What masks leave
is counted: Keras divides by it.
"""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import versions
from launcher.machine.replicas import context_of_several, sum_over_replicas
from launcher.tasks.base import Place
from launcher.tasks.keras_metrics import Batch, equal, fold_of, halves, is_overridden, variants
from launcher.tasks.keras_private import keras_losses_of
from launcher.tasks.keras_weights import each_tensor

Total = Callable[[Batch], tf.Tensor]
"""The loss of a batch; eager."""

# One number a batch, or along an axis that is given; or of pairs of rows; or a function that is not Keras's.
_TO_BE_TRIED = ("circle", "dice", "tversky", "cosinesimilarity", "lossfunctionwrapper")
# What labels are given where there is none.
_MARKS = (0, -1, 255)
_REDUCTIONS = ("sum_over_batch_size", "mean")


def check_reductions(model: keras.Model, where: str) -> None:
    """Raises UsageError for a Loss object that takes no mean; `where` the model is made."""
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", _REDUCTIONS[0])
        if isinstance(loss, keras.losses.Loss) and reduction not in _REDUCTIONS:
            raise UsageError(f"{where}: loss {loss.name!r} has reduction={reduction!r}; leave it at {_REDUCTIONS[0]!r}")


def place(
    model: keras.Model,
    reduced: Sequence[tuple[bool, bool]],
    added: Total | None,
    tried: Callable[[], Batch],
    where: str,
    at: Place,
    counts_rows: bool,
) -> tuple[bool, bool, bool]:
    """The way in which a model's loss is right: whether from the whole batch's outputs, and without what fills it up.

    The latter by TensorFlow's XLA, or by the runtime.

    Args:
      reduced: of each Loss object, whether it has one number for a batch, and whether a mask.
      added: the sum of what the model's layers add, if that is more than regularisers, or they update metrics.
      tried: an even number of real examples.
      where: the model is made, for messages.
      counts_rows: whether a layer does, in a state of its own.

    Raises:
      UsageError: it is right in no way that is known.
    """
    several, is_own = at.num_replicas * at.microbatches > 1, is_overridden(model, "compute_loss")
    is_apart = several and (at.microbatches > 1 or at.jit)
    losses = [loss for loss in keras.tree.flatten(model.loss) if not is_plain(loss)]
    own = [getattr(loss, "name", getattr(loss, "__name__", loss)) for loss in losses]
    what = f"{type(model).__name__}.compute_loss" if is_own else f"the loss {next(iter(own), '')}"
    apart = (
        f"which works neither with train.microbatches > 1 (it is {at.microbatches}) nor with train.jit_compile on "
        "several replicas"
    )
    fits, needs_whole, gathers = True, False, False

    def total(batch: Batch) -> tf.Tensor:
        with keras.StatelessScope(), keras_losses_of([tf.zeros([])], model, share_of_mask):
            return compute_loss(model, *batch, True)

    if (own or is_own) and (several or at.compiled):
        fits = _adds_up(total, tried())
        needs_whole = not fits or is_own or not reduced or any(is_number for is_number, _ in reduced)
        with tf.GradientTape() as tape:
            once = total(tried())
        gradients = tape.gradient(once, [variable.value for variable in model.trainable_variables])
        gathers = needs_whole and at.num_replicas > 1 and not is_apart and not any(by is not None for by in gradients)
        gathers &= not (fits and at.leaves_padding_out)  # parts of as many rows each
    if several and not fits and not gathers:
        raise UsageError(
            f"{where}: {what} does not add up over the rows of a batch, so it needs the outputs for all of "
            f"it, {apart}, nor where the loss has trained weights in it"
        )
    if is_apart and any(masked for _, masked in reduced) and (len(reduced) > 1 or is_own or added):
        raise UsageError(
            f"{where}: a part of the loss is divided by what a mask or ignore_class leaves, and another one "
            f"by the rows, {apart}"
        )
    if several and added and not versions.sums_activity_penalties():
        with trial(model):
            whole, again, *parts = (float(added(batch)) for batch in (tried(), tried(), *halves(tried())))
        if whole == again and not equal(whole, np.mean(parts)):
            raise UsageError(
                f"{where}: a layer adds a loss that is no mean over the rows of a batch, which works on one "
                "replica without microbatches alone: have it divide by the rows, or compute it in the loss"
            )
    counts = at.compiled and (counts_rows or added is not None or needs_whole)
    may_divide = at.leaves_padding_out and not (at.num_replicas > 1 and (gathers or counts_rows))
    divides = may_divide and (counts or (at.num_replicas == 1 and _mixes_rows(model, tried())))
    if counts and at.pads and not (at.jit or divides):
        raise UsageError(
            f"{where}: {what if needs_whole else 'what a layer adds or keeps'} counts rows of weight 0, "
            "which fill up a short batch on a TPU or by --engine=pjrt: have all batches whole, in validation too, or a "
            "loss with a value for each row"
        )
    return gathers, counts and at.jit, divides


def compute_loss(model: keras.Model, x: Any, y: Any, outputs: Any, weights: Any, training: bool) -> tf.Tensor:
    """The model's, with the arguments that Keras would give to one of its own."""
    told = {"training": training} if "training" in inspect.signature(model.compute_loss).parameters else {}
    return model.compute_loss(x, y, outputs, weights, **told)


def of_all_replicas(num_real: tf.Tensor, values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | float:
    """A mean's factor, for it to be divided by what a mask leaves on all replicas, in the mean over their rows.

    Args:
      num_real: the replica's rows.
    """
    if mask is None:
        return 1.0
    left = tf.reduce_sum(tf.cast(mask, tf.float32)) * tf.minimum(num_real, 1.0)
    sums = sum_over_replicas(tf.stack([left, num_real]))
    return tf.math.divide_no_nan(left * sums[1], sums[0] * num_real)


def share_of_mask(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | float:
    """The share that a mask leaves: 1 without one."""
    return 1.0 if mask is None else tf.reduce_mean(tf.cast(mask, tf.float32))


def is_plain(loss: Any) -> bool:
    """Whether what a model is compiled with is a loss of Keras's that has a value for each row."""
    loss = keras.losses.get(loss) if isinstance(loss, str) else loss
    own = loss if inspect.isfunction(loss) else type(loss)
    return loss is None or (own.__module__.startswith("keras.") and own.__name__.lower() not in _TO_BE_TRIED)


def trial(model: keras.Model) -> keras.StatelessScope:
    """A scope in which a model's layers add losses, and assign nothing; Keras looks for regularised weights in it."""
    return keras.StatelessScope([(weight, weight) for weight in model.trainable_variables], collect_losses=True)


def has_statistics(model: keras.Model) -> bool:
    """Whether it has batch normalisation."""
    return any("moving_mean" in weight.path for weight in model.weights)


def _adds_up(total: Total, batch: Batch) -> bool:
    """Whether the loss of a batch is the mean of those of its halves, wherever they are finite."""
    random, trials = np.random.default_rng(0), []
    for (x, y, outputs, weight), mark in itertools.product(variants(batch), _MARKS):

        def marked(labels: tf.Tensor, mark: int = mark) -> tf.Tensor:
            return tf.where(random.uniform(size=labels.shape) < 0.4, tf.cast(mark, labels.dtype), labels)

        both = x, each_tensor(y, marked), outputs, weight
        # What it cannot be told of is passed over.
        with contextlib.suppress(ValueError, TypeError, AssertionError, tf.errors.InvalidArgumentError):
            losses = [np.array(total(part)) for part in (*halves(both), both)]
            trials += [losses] * bool(np.isfinite(losses).all())
    fold = fold_of(np.array(np.inf), trials, averages=True)  # of no start: one that is always 0 is no sum
    return fold is not None and fold.over_steps == "rows"


def _mixes_rows(model: keras.Model, batch: Batch) -> bool:
    """Whether the outputs for a row depend on other rows, too; False where that cannot be told."""
    with contextlib.suppress(ValueError, TypeError, tf.errors.InvalidArgumentError), keras.StatelessScope():
        x, y, _, weight = batch  # its answers are zeros where weights are large
        x, _, outputs, _ = halves((x, y, model(x, training=False), weight))[0]
        pairs = zip(*map(keras.tree.flatten, (outputs, model(x, training=False))), strict=True)
        return not all(equal(one, other) for one, other in pairs)
    return False


def summed(loss: tf.Tensor, real: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """A layer's loss of several values, summed as Keras does, so that the parts' mean by weight is that sum."""
    size = tf.shape(loss)[0]
    counts = (tf.range(size) < tf.cast(tf.reduce_sum(real), size.dtype)) | (size != tf.size(real))  # not what fills up
    total = tf.reduce_sum(tf.where(tf.reshape(counts, [-1, *[1] * (loss.shape.rank - 1)]), loss, 0.0))
    if context_of_several() is None:
        return total
    return total * tf.cast(sum_over_replicas(weight) / tf.maximum(weight, 1.0), total.dtype)

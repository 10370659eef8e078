"""The control of a verification: one replica against itself, with nothing changed but the rounding.

Some training multiplies rounding errors from step to step until they exceed any tolerance, whatever the topology. The
control tells that from a defect: it is trained on one replica like the reference, and its deviation is measured like
that of a topology. What differs is what exact arithmetic would not see:

* the rows of each batch are permuted, so that sums over examples are taken in another order;
* every element of the gradient that is applied is changed by up to one unit roundoff of the narrowest dtype that the
  gradient passes through, the error that a topology makes where it rounds the sum of each part of the batch by itself.
  A permutation alone would miss it: within one product, sums are taken in float32 and rounded to 16 bits once.

Which permutations are legal: normalisation over groups of n consecutive examples is a part of the function, so rows
stay with those of their group, and groups change places as a whole. Statistics over the whole batch allow any order.
Augmentation, mixup and cutmix are done before the rows are permuted and go by the example. Dropout and noise are off;
with `verify.dropout` there is no control.

A task that depends on the place of an example in its batch in some other way makes the control differ from its first
step on, when nothing can have been multiplied yet. Such a control explains nothing.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

import keras
import numpy as np
import tensorflow as tf

from launcher.data.kinds import pads_batches
from launcher.data.pipeline import WEIGHT, Batch, Data, Shard
from launcher.machine.no_autograph import no_autograph
from launcher.optimizers import Optimizer
from launcher.run.session import Session
from launcher.step.layers import group_sizes, layers_of
from launcher.verify.compare import EXACT, Deviation, Record

FACTOR = 4.0
"""Multiple of the control's deviation that counts as rounding: two runs of the same rounding differ by 2 or so."""

_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_FLOAT32 = 2.0**-24


def install(built: Session) -> Data:
    """Turns a session, not traced yet, into the control of its recipe; returns what it is to train on."""
    plan = built.plan
    optimizer, unit = built.trainer.optimizer, roundoff(built.model, plan.reduce_dtype)
    for one in optimizer.parts:
        _round_once_more(one, unit, plan.seed)
    return cast(Data, _Permuted(plan.data, sorted(group_sizes(built.model))))


@dataclasses.dataclass(frozen=True)
class _Permuted:
    """Training data whose rows stand in another legal order in each batch."""

    data: Data
    groups: Sequence[int]

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        size = shard.per_replica_batch_size

        @no_autograph
        def permuted(step: tf.Tensor, batch: Batch) -> Batch:
            order = legal_order(size, self.groups, tf.stack([tf.constant(shard.seed, tf.int64), step]))
            if pads_batches(self.data):  # padding stays last
                order = tf.gather(
                    order, tf.argsort(tf.cast(tf.gather(batch[WEIGHT], order) <= 0, tf.int32), stable=True)
                )
            return {name: tf.gather(tensor, order) for name, tensor in batch.items()}

        return self.data.train_batches(shard).enumerate().map(permuted)


@no_autograph
def legal_order(size: int, groups: Sequence[int], seed: tf.Tensor) -> tf.Tensor:
    """A permutation of `size` examples that keeps every group of consecutive ones together.

    Args:
      groups: their sizes; each divides `size`.
      seed: int64 [2].

    Returns:
      int32 [size]: for each place, which row goes there.
    """
    inner, outer = (math.gcd(*groups), math.lcm(*groups)) if groups else (size, size)
    rows = _shuffled(tf.reshape(tf.range(size), [size // inner, inner]), seed)
    blocks = tf.reshape(rows, [1, size // outer, outer])
    places = _shuffled(tf.range(size // outer)[tf.newaxis], seed)
    return tf.reshape(tf.gather(blocks[0], places[0]), [size])


def _shuffled(rows: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Each row of a matrix in an order of its own."""
    order = tf.argsort(tf.random.stateless_uniform(tf.shape(rows), seed), axis=1)
    return tf.gather(rows, order, batch_dims=1)


def roundoff(model: keras.Model, reduce_dtype: tf.DType) -> float:
    """Half the distance from 1 to the next number, in the narrowest dtype that a gradient passes through."""
    dtypes = {reduce_dtype.name, *(layer.compute_dtype for layer in layers_of(model))}
    return max(_UNIT_ROUNDOFF.get(dtype, _FLOAT32) for dtype in dtypes)


def _round_once_more(optimizer: Optimizer, unit: float, seed: int) -> None:
    """Makes an optimizer change each gradient element by a random share of up to `unit`."""
    apply = optimizer.apply

    @no_autograph
    def rounded(
        gradients: Sequence[tf.Tensor | None], step: tf.Tensor, rate: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        changed: list[tf.Tensor | None] = []
        for index, gradient in enumerate(gradients):
            if gradient is None:  # of a weight that the loss does not depend on
                changed.append(None)
                continue
            pair = tf.random.experimental.stateless_fold_in(
                tf.stack([tf.constant(seed & 0x7FFFFFFF), tf.constant(index)]), tf.cast(step, tf.int32)
            )
            error = tf.random.stateless_uniform(tf.shape(gradient), pair, -unit, unit)
            changed.append(gradient * (1.0 + error))
        return apply(changed, step, rate)

    optimizer.apply = rounded  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
    """The control's distance from the reference; `void` is why it explains nothing, empty where it does."""

    deviations: tuple[Deviation, ...] = ()
    void: str = ""

    def explains(self, found: Sequence[Deviation]) -> bool:
        """Whether rounding alone explains a topology's deviations in this training."""
        if self.void:
            return False
        own = {one.quantity: one.value or 0.0 for one in self.deviations}
        return all(one.within or (one.value or 0.0) <= FACTOR * own[one.quantity] for one in found)


def of(deviations: tuple[Deviation, ...], baseline: Record) -> Control:
    """The control with these deviations."""
    if may_be_rounding(deviations, baseline):
        return Control(deviations=deviations)
    wrong = next(one for one in deviations if not one.within and not _grown(one, baseline))
    if wrong.quantity in EXACT:
        why = "rounding decides there which steps overflow; bind a lower DynamicLossScale.initial_scale"
    else:
        why = "does the task or a layer of the model depend on an example's place in its batch?"
    return Control(deviations=deviations, void=f"one replica with its rows permuted: {wrong.sentence}: {why}")


def may_be_rounding(deviations: Sequence[Deviation], baseline: Record) -> bool:
    """Whether rounding could have grown into deviations: all are numbers, and none is there before the first update."""
    return all(one.within or _grown(one, baseline) for one in deviations)


def _grown(one: Deviation, baseline: Record) -> bool:
    if one.quantity in EXACT or one.value is None or not math.isfinite(one.value):
        return False
    first_applied = int(np.argmax(baseline.finite > 0)) + 1
    return one.first_step is None or one.first_step > first_applied

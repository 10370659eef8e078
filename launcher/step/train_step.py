"""One replica's training step: microbatches, one reduction, one check, a gated update.

    loss sum -> / nominal weight -> * scale -> differentiate -> add up microbatches in float32
    -> reduce -> unscale and check -> update weights, slots and moving statistics, or nothing at all

The step runs in replica context. Its collectives are those of `gradients.reduce_sum`; where the optimizer's state is
sharded, of `gradients.gather` and of norms over the shards; and of synchronised normalisation. All stand outside every
conditional.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.step import gradients, overflow
from launcher.step.local_pass import LocalPass, LocalSums, OwnTime, Traced, Watch, is_first_replica, num_replicas
from launcher.step.rows import over_replicas
from launcher.step.step_config import StepParts
from launcher.step.updates import Change, Trained, update


class StepReport(NamedTuple):
    """Float32 values of one step, scalars unless said, equal on every replica.

    Attributes:
      loss: sum of weighted losses over the global batch, regularisation included.
      weight: sum of weights over the global batch; 0 skips the step whatever its gradients are.
      metrics: sums of the task's weighted metrics, scalars or vectors, in the order of `Traced.metrics`.
      gradient_norm: global norm of the mean gradient, before clipping.
      finite: 1 when the update was applied, 0 when it was skipped.
      loss_scale: the scale this step used.
      learning_rate: of this step.
      non_finite: which variables' reduced gradients are not finite, as `overflow.pack` tells; zeros after an update,
        and where the step `selects`: there, flags would read every gradient at every step.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    metrics: tuple[tf.Tensor, ...]
    gradient_norm: tf.Tensor
    finite: tf.Tensor
    loss_scale: tf.Tensor
    learning_rate: tf.Tensor
    non_finite: tuple[tf.Tensor, ...]

    def flat(self) -> tf.Tensor:
        """All of it as one float32 vector, see `ReplicaStep.report_names`."""
        values = tf.nest.flatten(self)
        # Small operations are what a small model's step costs: no reshape where nothing needs one.
        if all(value.shape.rank == 0 for value in values):
            return tf.stack(values)
        vector = tf.constant([-1])
        return tf.concat([tf.reshape(value, vector) for value in values], axis=0)


def report_names(traced: Traced, num_weights: int) -> tuple[str, ...]:
    """Names of the numbers of a `StepReport`, in the order of `flat`; a vector's repeat."""
    flags = range(overflow.num_scalars(num_weights))
    of_metrics = [name for name, size in traced.metrics.items() for _ in range(size)]
    parts = {"metrics": of_metrics, "non_finite": [str(number) for number in flags]}
    return tuple(
        name
        for field in StepReport._fields
        for name in ([f"{field}/{part}" for part in parts[field]] if field in parts else [field])
    )


def reported(
    sums: LocalSums, checked: gradients.Checked, scale: tf.Tensor, learning_rate: tf.Tensor, non_finite: tf.Tensor
) -> StepReport:
    """The report of a step, from the sums over all replicas and the check of their gradients."""
    return StepReport(
        loss=sums.loss,
        weight=sums.weight,
        metrics=sums.metrics,
        gradient_norm=checked.norm,
        finite=tf.cast(checked.applied, tf.float32),
        loss_scale=scale,
        learning_rate=learning_rate,
        non_finite=tuple(tf.unstack(non_finite)),
    )


class ReplicaStep:
    """The training step of one replica, to be run by `strategy.run`.

    Args:
      watch: what else the loss is differentiated by; see `first_microbatch`.
      own_time: counts this worker's own time, if that is to be known.
    """

    def __init__(self, parts: StepParts, *, watch: Watch | None = None, own_time: OwnTime | None = None):
        self._parts, self._config, self._counters, self._own_time = parts, parts.config, parts.counters, own_time
        self._weights = list(parts.model.trainable_variables)
        self._pass = LocalPass(parts, watch)

    @property
    def traced(self) -> Traced:
        return self._pass.traced

    def __call__(self, batch: Batch) -> StepReport:
        config, counters = self._config, self._counters
        scale, step = tf.convert_to_tensor(counters.scale.scale), tf.convert_to_tensor(counters.step)
        run = self._pass if self._own_time is None else functools.partial(self._own_time.of, self._pass)
        local = run(batch, scale, step)
        weights = zip(self._weights, self._parts.optimizer.shards, strict=True)
        others = {*self.traced.unused, *self.traced.tables}
        trained = [Trained(index, *pair) for index, pair in enumerate(weights) if index not in others]
        sent = gradients.to_reduce_dtype([local.gradients[one.number] for one in trained], config.reduce_dtype)
        dense = local._replace(gradients=sent, watched=[], rows=[])
        sums = gradients.reduce_sum(dense, bucket_bytes=config.bucket_bytes)
        rows = [over_replicas(one, config.reduce_dtype) for one in local.rows]
        tables = zip(self.traced.tables, rows, strict=True)
        trained += [Trained(place, self._weights[place], None, one.ids) for place, one in tables]
        sums.gradients.extend(one.values for one in rows)
        checked = self._unscale_and_check(sums, trained, scale)
        learning_rate = self._parts.optimizer.learning_rate(tf.cast(step, tf.float32))
        change = Change(
            trained=trained,
            checked=checked,
            moving=list(zip(self._pass.moving, sums.moving, strict=True)),
            num_microbatches=config.num_parts(num_replicas()),
            learning_rate=learning_rate,
            parts=self._parts,
        )
        changes = not config.one_copy or is_first_replica()
        non_finite = update(change) if changes else change.no_flags()
        if changes:
            counters.advance(self._parts.loss_scale, checked, scale)
        if self._parts.task.shows_rows:
            loss, weight = gradients.by_rows(sums.loss, sums.weight, batch)
            sums = sums._replace(loss=loss, weight=weight)
        return reported(sums, checked, scale, learning_rate, non_finite)

    def _unscale_and_check(self, sums: LocalSums, trained: Sequence[Trained], scale: tf.Tensor) -> gradients.Checked:
        """The check of the reduced gradients of `trained`, and on the mean loss where it has a limit."""
        config, limits = self._config, self._counters.limits
        in_shards = [place for place, one in enumerate(trained) if config.checks_shards and one.shard]
        pairs = zip(trained, sums.gradients, strict=True)
        checked = gradients.unscale_and_check(
            [one.shard.of(total) if config.checks_shards and one.shard else total for one, total in pairs],
            scale=scale,
            nominal_weight=config.nominal_weight,
            true_weight=sums.weight,
            shards=in_shards,
            divides=config.selects,
            each=config.one_program and not config.selects,
        )
        if limits is None:
            return checked
        return gradients.within(checked, tf.math.divide_no_nan(sums.loss, sums.weight), tf.convert_to_tensor(limits))

    def first_microbatch(self, batch: Batch, *, scale: tf.Tensor) -> LocalSums:
        """The forward and backward pass of this replica's first microbatch of the step after `counters.step`.

        Changes nothing: moving statistics are as they were.

        Args:
          batch: this replica's part of that step.
          scale: float32 scalar, the loss scale.
        """
        return self._pass.first(batch, scale, tf.convert_to_tensor(self._counters.step))

    def checksums(self, batch: Batch, flip: tf.Tensor) -> tf.Tensor:
        """Checksums of the bits of each replica's own gradients of this batch, which do not depend on an order of sums.

        Changes nothing.

        Args:
          batch: this replica's part of a step.
          flip: int64 scalar, 1 for the checksum of another first gradient, to rehearse that.

        Returns:
          float32 [replicas, trained variables, 2], the same on every replica; whole numbers below 2**16.
        """
        scale, step = map(tf.convert_to_tensor, (self._counters.scale.scale, self._counters.step))
        found = self._pass.whole(self._pass(batch, scale, step)).gradients
        sums = tf.stack([tf.reduce_sum(tf.cast(tf.bitcast(one, tf.int32), tf.int64)) for one in found])
        sums += flip * tf.one_hot(0, len(found), dtype=tf.int64)
        halves = tf.stack([tf.math.floormod(sums, 2**16), tf.math.floormod(sums // 2**16, 2**16)], axis=1)
        return gradients.of_each_replica(tf.cast(halves, tf.float32))

    def non_finite(self, batch: Batch) -> tf.Tensor:
        """Flags of the gradients of this batch's step that are not finite, and on which replica.

        Computes the gradients with the present weights and scale once more and changes nothing.

        Args:
          batch: this replica's part of the step after `counters.step`.

        Returns:
          float32 [replicas + 1, trained variables]: 1 where a replica's own gradient is not finite; the last row tells
          of the sums over replicas, which can overflow in the reduce dtype where no part does.
        """
        counters = self._counters
        scale, step = tf.convert_to_tensor(counters.scale.scale), tf.convert_to_tensor(counters.step)
        local = self._pass.whole(self._pass(batch, scale, step))
        sent = gradients.to_reduce_dtype(local.gradients, self._config.reduce_dtype)
        rows = gradients.of_each_replica(overflow.flags(sent))
        summed = gradients.reduce_sum(sent, bucket_bytes=self._config.bucket_bytes)
        return tf.concat([rows, overflow.flags(summed)[None, :]], axis=0)

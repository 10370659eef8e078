"""One replica's training step: microbatches, one reduction, one judgement, a gated update.

    loss sum -> / nominal weight -> * scale -> differentiate -> add up microbatches in float32
    -> reduce -> judge -> update weights, slots and moving statistics, or nothing at all

The step runs in replica context. Its only collectives are those of `gradients.reduce_sum` and, where the optimizer's
state is shared out, of `gradients.gather`: outside every conditional. Whatever depends on the judgement is local.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.machine.as_written import call_converted
from launcher.optimizers import Optimizer
from launcher.optimizers.parts import Part
from launcher.step import gradients, overflow
from launcher.step.local_pass import LocalPass, LocalSums, Watch, num_replicas
from launcher.step.moving_average import MovingAverage
from launcher.step.precision import LossScale, ScaleState
from launcher.step.step_config import StepConfig
from launcher.tasks.base import Task


class StepReport(NamedTuple):
    """Float32 values of one step, scalars unless said, equal on every replica.

    Attributes:
      loss: sum of weighted losses over the global batch, regularisation included.
      weight: sum of weights over the global batch; 0 skips the step whatever its gradients are.
      metrics: sums of the task's weighted metrics, scalars or vectors, in the order of `ReplicaStep.metric_names`.
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

    def flat(self, *more: tf.Tensor) -> tf.Tensor:
        """All of it as one float32 vector, see `ReplicaStep.report_names`, and `more` float32 scalars after it."""
        values = [*tf.nest.flatten(self), *more]
        # Small operations are what a small model's step costs: no reshape where nothing needs one.
        if all(value.shape.rank == 0 for value in values):
            return tf.stack(values)
        return tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """Variables that steer a run, one copy a replica and always equal (aggregation NONE: assigns are local).

    Attributes:
      step: int64, steps done, skipped ones included; the data position follows from it.
      skipped: int64, steps skipped so far.
      scale: the four variables of the loss scale's state.
      limits: float32 [2], the mean loss and the gradient norm above which a step is skipped; None for no such rule.
    """

    step: tf.Variable
    skipped: tf.Variable
    scale: ScaleState
    limits: tf.Variable | None = None


class OwnTime:
    """Seconds of the steps that a worker spends on its own part, without the waiting for others in the reduction.

    Held by a variable of each worker, outside checkpoints. The clock is the host's: it is read once the batch is there,
    and again when the loss and the gradient that is ready last have come back from the device.
    """

    def __init__(self) -> None:
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, aggregation=tf.VariableAggregation.NONE)

    def begin(self, batch: Batch) -> tf.Tensor:
        """Reads the clock when the batch is there."""
        return _clock_after(tf.nest.flatten(batch))

    def end(self, begun: tf.Tensor, local: LocalSums) -> None:
        """Counts what has passed until this worker's gradients are there."""
        # The first weights' gradient is the last one that a backward pass makes.
        self.seconds.assign_add(_clock_after([local.loss, tf.reshape(local.gradients[0], [-1])[:1]]) - begun)


def _clock_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.device("CPU:0"), tf.control_dependencies([tf.identity(tensor) for tensor in tensors]):
        return tf.timestamp()


def _selected(
    applied: tf.Tensor,
    change: Callable[[], list[tf.Tensor]],
    variables: Sequence[tf.Variable],
    old: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Makes a change and, unless it is to be applied, takes it back; for devices that compute both branches anyway.

    Args:
      applied: bool scalar.
      change: assigns some of `variables` and returns tensors.
      variables: what it may assign.
      old: in place of what it returns, where it is not applied.
    """
    before = [tf.identity(variable) for variable in variables]
    new = change()
    for variable, value in zip(variables, before, strict=True):
        # Not `assign`, which for the optimizer's count of updates would call into the cross-replica context.
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.where(applied, tf.identity(variable), value))
    return [tf.where(applied, one, other) for one, other in zip(new, old, strict=True)]


class ReplicaStep:
    """The training step of one replica, to be run by `strategy.run`.

    Args:
      statistics: variables that the model's forward pass assigns, see `launcher.step.moving_statistics`.
      watch: what else the loss is differentiated by; see `first_microbatch`.
      own_time: counts this worker's own time, if that is to be known.
    """

    def __init__(
        self,
        *,
        task: Task,
        model: keras.Model,
        optimizer: Optimizer,
        loss_scale: LossScale,
        counters: Counters,
        ema: MovingAverage,
        config: StepConfig,
        statistics: Sequence[keras.Variable],
        watch: Watch | None = None,
        own_time: OwnTime | None = None,
    ):
        self._own_time = own_time
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._counters = counters
        self._ema = ema
        self._config = config
        self._weights = list(model.trainable_variables)
        self._pass = LocalPass(task=task, model=model, config=config, statistics=statistics, watch=watch)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Of the task, once the step is traced."""
        return self._pass.metric_names

    @property
    def unused(self) -> frozenset[int]:
        """Positions of the trained variables that the loss does not depend on, once the step is traced.

        They are not reduced and not updated, so that neither momentum nor weight decay moves them.
        """
        return self._pass.unused

    @property
    def report_names(self) -> tuple[str, ...]:
        """Of the numbers of a `StepReport`, in the order of `flat`, once the step is traced; a vector's repeat."""
        flags = range(overflow.num_scalars(len(self._weights)))
        sizes = zip(self.metric_names, self._pass.metric_sizes, strict=True)
        metrics = [name for name, size in sizes for _ in range(size)]
        parts = {"metrics": metrics, "non_finite": [str(number) for number in flags]}
        return tuple(
            name
            for field in StepReport._fields
            for name in ([f"{field}/{part}" for part in parts[field]] if field in parts else [field])
        )

    def __call__(self, batch: Batch) -> StepReport:
        config, counters = self._config, self._counters
        scale = tf.convert_to_tensor(counters.scale.scale)
        step = tf.convert_to_tensor(counters.step)
        begun = self._own_time.begin(batch) if self._own_time else None
        local = self._pass(batch, scale, step)
        if self._own_time:
            self._own_time.end(begun, local)

        used = [index for index in range(len(self._weights)) if index not in self.unused]
        wire = gradients.to_wire([local.gradients[index] for index in used], config.wire_dtype)
        sums = [local.loss, local.weight, *local.metrics]
        reduced = gradients.reduce_sum([*wire, *local.moving, *sums], bucket_bytes=config.bucket_bytes)
        reduced_wire, rest = reduced[: len(wire)], reduced[len(wire) :]
        moving_deltas, sums = rest[: len(local.moving)], rest[len(local.moving) :]
        loss, weight, metrics = sums[0], sums[1], tuple(sums[2:])

        shared = {index: part for index in used if (part := self._optimizer.parts[index]) is not None}
        # Of a sum that is used as a whole nowhere, a TPU's compiler reduces each replica's part alone.
        early = config.selects and not config.clipping.needs_wholes
        if early:
            reduced_wire = [
                shared[index].of(gradient) if index in shared else gradient
                for index, gradient in zip(used, reduced_wire, strict=True)
            ]
        judged = gradients.judge(
            reduced_wire,
            scale=scale,
            nominal_weight=config.nominal_weight,
            true_weight=weight,
            parts=[place for place, index in enumerate(used) if index in shared] if early else (),
            divides=config.selects,
        )
        if counters.limits is not None:
            judged = gradients.within(
                judged, tf.math.divide_no_nan(loss, weight), tf.convert_to_tensor(counters.limits)
            )
        learning_rate = self._optimizer.learning_rate(tf.cast(step, tf.float32))
        parts = num_replicas() * config.microbatches

        def apply() -> list[tf.Tensor]:
            weights = [tf.cast(self._weights[index].value, tf.float32) for index in used]
            clipped = config.clipping.apply(judged.gradients, judged.norm, weights)
            of_used = dict(zip(used, clipped, strict=True))
            if not early:
                of_used |= {index: part.of(of_used[index]) for index, part in shared.items()}
            of_all = [of_used.get(index) for index in range(len(self._weights))]
            return self._optimizer.apply(of_all, tf.cast(step, tf.float32), learning_rate)

        def follow() -> list[tf.Tensor]:
            for variable, delta in zip(self._pass.moving, moving_deltas, strict=True):
                old = tf.convert_to_tensor(variable.value)
                new = old + delta / parts
                # A 16-bit forward pass can overflow in its statistics alone; those must not stay for ever. Each element
                # by itself: one test of them all would be one more pass over each variable.
                variable.value.assign(tf.where(tf.math.is_finite(new), new, old))
            self._ema.update(step - tf.convert_to_tensor(self._counters.skipped))
            return []

        def name() -> tf.Tensor:
            by_index = dict(zip(used, judged.gradients, strict=True))
            return overflow.pack(overflow.flags([by_index.get(i, tf.zeros([])) for i in range(len(self._weights))]))

        nothing = tf.zeros([overflow.num_scalars(len(self._weights))])
        if config.selects:
            changes = [self._weights[index].value for index in used if index not in shared]
            changes += [variable.value for variable in self._optimizer.variables]
            new_parts = _selected(judged.applied, apply, changes, [part.taken().value for part in shared.values()])
            self._put_together(list(shared.values()), new_parts)
            changes = [variable.value for variable in self._pass.moving]
            _selected(judged.applied, follow, [*changes, *(average for _, average in self._ema.variables)], [])
            non_finite = nothing
        elif shared:
            # Collectives stand outside of the conditionals: after a skipped step, for the weights as they are.
            non_finite, *new_parts = tf.cond(
                judged.applied,
                lambda: [nothing, *apply()],
                lambda: [name(), *(part.taken().value for part in shared.values())],
            )
            self._put_together(list(shared.values()), new_parts)
            tf.cond(judged.applied, lambda: (follow(), tf.constant(True))[1], lambda: tf.constant(False))
        else:
            # Flags are looked at only where nothing is applied, so that a finite step pays nothing for them.
            non_finite = tf.cond(judged.applied, lambda: (apply(), follow(), tf.identity(nothing))[2], name)
        for variable, gained in zip(self._pass.counts, local.counts, strict=True):
            # Counted once a microbatch so far; a step counts once, a skipped one not at all.
            counted = gained // config.microbatches
            old = tf.convert_to_tensor(variable.value)
            variable.value.assign(old + tf.where(judged.applied, counted, tf.zeros_like(counted)))
        self._advance(judged, scale)
        return StepReport(
            loss=loss,
            weight=weight,
            metrics=metrics,
            gradient_norm=judged.norm,
            finite=tf.cast(judged.applied, tf.float32),
            loss_scale=scale,
            learning_rate=learning_rate,
            non_finite=tuple(tf.unstack(non_finite)),
        )

    def _put_together(self, parts: Sequence[Part], new: Sequence[tf.Tensor]) -> None:
        """Makes weights of all replicas' new parts of them."""
        if not parts:
            return
        axes = [part.axis for part in parts]
        whole = gradients.gather(new, axes, bucket_bytes=self._config.bucket_bytes)
        for part, value in zip(parts, whole, strict=True):
            part.whole.value.assign(value)

    def first_microbatch(self, batch: Batch, *, scale: tf.Tensor) -> LocalSums:
        """The forward and backward pass of this replica's first microbatch of the step after `counters.step`.

        Changes nothing: moving statistics and counts are as they were.

        Args:
          batch: this replica's part of that step.
          scale: float32 scalar, the loss scale.
        """
        return self._pass.first(batch, scale, tf.convert_to_tensor(self._counters.step))

    def non_finite(self, batch: Batch) -> tf.Tensor:
        """Which gradients of the step that this batch belongs to are not finite, and on which replica.

        Computes the gradients with the present weights and scale once more and changes nothing.

        Args:
          batch: this replica's part of the step after `counters.step`.

        Returns:
          float32 [replicas + 1, trained variables]: 1 where a replica's own gradient is not finite; the last row tells
          of the sums over replicas, which can overflow on the wire where no part does.
        """
        counters = self._counters
        scale, step = tf.convert_to_tensor(counters.scale.scale), tf.convert_to_tensor(counters.step)
        sent = gradients.to_wire(self._pass(batch, scale, step).gradients, self._config.wire_dtype)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = tf.one_hot(replica, num_replicas())[:, None] * overflow.flags(sent)[None, :]
        (rows,) = gradients.reduce_sum([mine])
        summed = gradients.reduce_sum(sent, bucket_bytes=self._config.bucket_bytes)
        return tf.concat([rows, overflow.flags(summed)[None, :]], axis=0)

    def _advance(self, judged: gradients.Judged, scale: tf.Tensor) -> None:
        counters = self._counters
        before = ScaleState(scale, *(tf.convert_to_tensor(variable) for variable in counters.scale[1:]))
        after = call_converted(self._loss_scale.update, before, judged.finite)
        for variable, old, new in zip(counters.scale, before, after, strict=True):
            if new is not old:  # what is fixed costs nothing
                # Gradients of nothing tell nothing of the scale.
                variable.assign(tf.where(judged.empty, old, new))
        counters.step.assign_add(1)
        counters.skipped.assign_add(tf.where(judged.applied, tf.constant(0, tf.int64), tf.constant(1, tf.int64)))

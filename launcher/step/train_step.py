"""One replica's training step: microbatches, one reduction, one judgement, a gated update.

    loss sum -> / nominal weight -> * scale -> differentiate -> add up microbatches in float32
    -> reduce -> judge -> update weights, slots and moving statistics, or nothing at all

The step runs in replica context. Its only collectives are those of `gradients.reduce_sum`, outside every
conditional; whatever depends on the judgement is local.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine.as_written import as_written
from launcher.optimizers import Optimizer
from launcher.step import gradients, overflow
from launcher.step.clipping import Clipping
from launcher.step.moving_average import MovingAverage
from launcher.step.moving_statistics import is_moving, seed_states
from launcher.step.precision import LossScale, ScaleState
from launcher.step.regularization import Penalty
from launcher.tasks.base import Task, loss_sums

Batch = dict[str, tf.Tensor]

Watch = Callable[[tf.GradientTape], list[tf.Tensor]]
"""Called under the tape of every microbatch, before its loss: tensors to differentiate the loss by, besides weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What one step does, apart from the model.

    Attributes:
      global_batch_size: examples of one step over all replicas and microbatches.
      microbatches: parts a replica's batch is split in; gradients add up in float32.
      nominal_weight: static weight the loss is divided by before differentiation; the true one follows the reduction.
      wire_dtype: dtype gradients are reduced in, on one replica too, so that the topology does not change the result.
      bucket_bytes: upper bound on the payload of one collective.
      clipping: how the unscaled mean gradient is bounded.
      penalty: penalty on weights by layer type, or None.
      ema_decay: decay of the moving average of weights and moving statistics, or None for no average.
      jit_compile: compile the replica-local forward and backward pass with XLA.
      seed: base of all random numbers drawn inside the model.
    """

    global_batch_size: int
    microbatches: int
    nominal_weight: float
    wire_dtype: tf.DType
    bucket_bytes: int
    clipping: Clipping
    ema_decay: float | None
    penalty: Penalty | None = None
    jit_compile: bool
    seed: int


class StepReport(NamedTuple):
    """Float32 scalars of one step, equal on every replica.

    Attributes:
      loss: sum of weighted losses over the global batch, regularisation included.
      weight: sum of weights over the global batch; 0 skips the step whatever its gradients are.
      metrics: sums of the task's weighted metrics, in the order of `ReplicaStep.metric_names`.
      gradient_norm: global norm of the mean gradient, before clipping.
      finite: 1 when the update was applied, 0 when it was skipped.
      loss_scale: the scale this step used.
      learning_rate: of this step.
      non_finite: which variables' reduced gradients are not finite, as `overflow.pack` tells; zeros after an update.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    metrics: tuple[tf.Tensor, ...]
    gradient_norm: tf.Tensor
    finite: tf.Tensor
    loss_scale: tf.Tensor
    learning_rate: tf.Tensor
    non_finite: tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """Variables that steer a run, one copy a replica and always equal (aggregation NONE: assigns are local).

    Attributes:
      step: int64, steps done, skipped ones included; the data position follows from it.
      skipped: int64, steps skipped so far.
      scale: the four variables of the loss scale's state.
    """

    step: tf.Variable
    skipped: tf.Variable
    scale: ScaleState


class ReplicaStep:
    """The training step of one replica, to be run by `strategy.run`.

    Args:
      statistics: variables that the model's forward pass assigns, see `launcher.step.moving_statistics`.
      watch: what else the loss is differentiated by; see `first_microbatch`.

    Attributes:
      metric_names: of the task, once the step is traced.
      unused: positions of the trained variables that the loss does not depend on, once the step is traced. They are not
        reduced and not updated, so that neither momentum nor weight decay moves them.
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
    ):
        self._task = task
        self._watch = watch
        self._model = model
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._counters = counters
        self._ema = ema
        self._config = config
        self._weights = list(model.trainable_variables)
        self._moving = [variable for variable in statistics if is_moving(variable)]
        self._counts = [variable for variable in statistics if not is_moving(variable)]
        self._seeds = seed_states(model)
        self.metric_names: tuple[str, ...] = ()
        self.unused: frozenset[int] = frozenset()
        self._forward_backward: Any = self._differentiate  # or a tf.function of it
        if config.jit_compile:
            self._forward_backward = tf.function(self._differentiate, jit_compile=True)
        elif config.microbatches > 1:
            self._forward_backward = tf.function(self._differentiate)

    def __call__(self, batch: Batch) -> StepReport:
        config, counters = self._config, self._counters
        scale = tf.convert_to_tensor(counters.scale.scale)
        step = tf.convert_to_tensor(counters.step)
        moving_before = [tf.convert_to_tensor(variable.value) for variable in self._moving]

        counts_before = [tf.convert_to_tensor(variable.value) for variable in self._counts]
        local = self._accumulate(batch, scale, step, moving_before)

        used = [index for index in range(len(self._weights)) if index not in self.unused]
        wire = [tf.cast(local.gradients[index], config.wire_dtype) for index in used]
        sums = [local.loss, local.weight, *local.metrics]
        reduced = gradients.reduce_sum([*wire, *local.moving, *sums], bucket_bytes=config.bucket_bytes)
        reduced_wire, rest = reduced[: len(wire)], reduced[len(wire) :]
        moving_deltas, sums = rest[: len(local.moving)], rest[len(local.moving) :]
        loss, weight, metrics = sums[0], sums[1], tuple(sums[2:])

        judged = gradients.judge(
            reduced_wire,
            scale=scale,
            nominal_weight=config.nominal_weight,
            true_weight=weight,
        )
        learning_rate = self._optimizer.learning_rate(tf.cast(step, tf.float32))
        parts = _num_replicas() * config.microbatches
        moving_after = [old + delta / parts for old, delta in zip(moving_before, moving_deltas, strict=True)]

        def apply() -> tf.Tensor:
            weights = [tf.cast(self._weights[index].value, tf.float32) for index in used]
            clipped = config.clipping.apply(judged.gradients, judged.norm, weights)
            of_used = dict(zip(used, clipped, strict=True))
            of_all = [of_used.get(index) for index in range(len(self._weights))]
            self._optimizer.apply(of_all, tf.cast(step, tf.float32))
            for variable, old, new in zip(self._moving, moving_before, moving_after, strict=True):
                # A 16-bit forward pass can overflow in its statistics alone; those must not stay for ever.
                variable.value.assign(tf.where(tf.reduce_all(tf.math.is_finite(new)), new, old))
            self._ema.update(step - tf.convert_to_tensor(self._counters.skipped))
            return tf.zeros([overflow.num_scalars(len(self._weights))])

        def name() -> tf.Tensor:
            by_index = dict(zip(used, judged.gradients, strict=True))
            return overflow.pack(overflow.flags([by_index.get(i, tf.zeros([])) for i in range(len(self._weights))]))

        # Looked at only where nothing is applied, so that a finite step pays nothing for it.
        non_finite = tf.cond(judged.applied, apply, name)
        for variable, before in zip(self._counts, counts_before, strict=True):
            # Counted once a microbatch so far; a step counts once, a skipped one not at all.
            counted = (tf.convert_to_tensor(variable.value) - before) // config.microbatches
            variable.value.assign(before + tf.where(judged.applied, counted, tf.zeros_like(counted)))
        self._advance(judged)
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

    def first_microbatch(self, batch: Batch, *, scale: tf.Tensor) -> LocalSums:
        """The forward and backward pass of this replica's first microbatch of the step after `counters.step`.

        Changes nothing: moving statistics and counts are as they were.

        Args:
          batch: this replica's part of that step.
          scale: float32 scalar, the loss scale.
        """
        moving = [tf.convert_to_tensor(variable.value) for variable in self._moving]
        counts_before = [tf.convert_to_tensor(variable.value) for variable in self._counts]
        count = self._config.microbatches
        part = {name: tensor[: tensor.shape[0] // count] for name, tensor in batch.items()}
        local = self._microbatch(part, scale, tf.convert_to_tensor(self._counters.step), 0, moving)
        for variable, before in zip(self._counts, counts_before, strict=True):
            variable.value.assign(before)
        return local

    def non_finite(self, batch: Batch) -> tf.Tensor:
        """Which gradients of the step that this batch belongs to are not finite, and on which replica.

        Computes the gradients with the present weights and scale once more and changes nothing.

        Args:
          batch: this replica's part of the step after `counters.step`.

        Returns:
          float32 [replicas + 1, trained variables]: 1 where a replica's own gradient is not finite; the last row tells
          of the sums over replicas, which can overflow on the wire where no part does.
        """
        scale, step = tf.convert_to_tensor(self._counters.scale.scale), tf.convert_to_tensor(self._counters.step)
        moving = [tf.convert_to_tensor(variable.value) for variable in self._moving]
        counts_before = [tf.convert_to_tensor(variable.value) for variable in self._counts]
        local = self._accumulate(batch, scale, step, moving)
        for variable, before in zip(self._counts, counts_before, strict=True):
            variable.value.assign(before)
        sent = [tf.cast(gradient, self._config.wire_dtype) for gradient in local.gradients]
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = tf.one_hot(replica, _num_replicas())[:, None] * overflow.flags(sent)[None, :]
        (rows,) = gradients.reduce_sum([mine])
        summed = gradients.reduce_sum(sent, bucket_bytes=self._config.bucket_bytes)
        return tf.concat([rows, overflow.flags(summed)[None, :]], axis=0)

    def _advance(self, judged: gradients.Judged) -> None:
        counters = self._counters
        before = ScaleState(*(tf.convert_to_tensor(variable) for variable in counters.scale))
        after = self._loss_scale.update(before, judged.finite)
        for variable, old, new in zip(counters.scale, before, after, strict=True):
            # Gradients of nothing tell nothing of the scale. A scale that is fixed is not made to look as if it moved.
            variable.assign(old if new is old else tf.where(judged.empty, old, new))
        counters.step.assign_add(1)
        counters.skipped.assign_add(tf.where(judged.applied, tf.constant(0, tf.int64), tf.constant(1, tf.int64)))

    def _accumulate(
        self, batch: Batch, scale: tf.Tensor, step: tf.Tensor, moving_before: Sequence[tf.Tensor]
    ) -> LocalSums:
        """Adds up the microbatches of this replica in float32."""
        count = self._config.microbatches
        if count == 1:
            return self._microbatch(batch, scale, step, 0, moving_before)
        parts = {
            name: tf.reshape(tensor, [count, tensor.shape[0] // count, *tensor.shape[1:]])
            for name, tensor in batch.items()
        }

        def part(index: tf.Tensor | int) -> Batch:
            return {name: tensor[index] for name, tensor in parts.items()}

        # From zeros, not from the first microbatch: outside the loop, it would be held beside those inside, and two
        # microbatches would need the memory of one.
        zeros = self._zero_sums(part(0), scale)

        def body(index: tf.Tensor, *totals: tf.Tensor) -> tuple[tf.Tensor, ...]:
            more = tf.nest.flatten(self._microbatch(part(index), scale, step, index, moving_before))
            return (index + 1, *(total + value for total, value in zip(totals, more, strict=True)))

        start = (tf.constant(0), *tf.nest.flatten(zeros))
        _, *flat = tf.while_loop(lambda index, *_: index < count, body, start, parallel_iterations=1)
        return tf.nest.pack_sequence_as(zeros, flat)

    def _zero_sums(self, batch: Batch, scale: tf.Tensor) -> LocalSums:
        """The sums over no microbatch; traces the pass over one, which alone tells how many metrics there are."""
        outputs = self._forward_backward.get_concrete_function(batch, scale).structured_outputs
        found = tf.nest.map_structure(lambda output: tf.zeros(output.shape, output.dtype), outputs)
        moving = [tf.zeros(variable.shape, tf.convert_to_tensor(variable.value).dtype) for variable in self._moving]
        grads, watched, loss, weight, metrics = found
        return LocalSums(grads, moving, loss, weight, metrics, watched)

    def _microbatch(
        self,
        batch: Batch,
        scale: tf.Tensor,
        step: tf.Tensor,
        index: tf.Tensor | int,
        moving_before: Sequence[tf.Tensor],
    ) -> LocalSums:
        """Forward and backward pass of one microbatch; leaves the moving statistics as they were."""
        self._set_seeds(step, index)
        grads, watched, loss, weight, metrics = self._forward_backward(batch, scale)
        # Every microbatch starts from the step's statistics and reports its difference. The update of a moving
        # average is affine in the batch statistic, so the mean of the differences is exact on any topology.
        deltas = []
        for variable, before in zip(self._moving, moving_before, strict=True):
            deltas.append(tf.convert_to_tensor(variable.value) - before)
            variable.value.assign(before)
        return LocalSums(grads, deltas, loss, weight, metrics, watched)

    def _differentiate(
        self, batch: Batch, scale: tf.Tensor
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Tensor, tf.Tensor, tuple[tf.Tensor, ...]]:
        variables = [variable.value for variable in self._weights]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in variables:
                tape.watch(variable)
            sources: list[tf.Tensor] = [] if self._watch is None else self._watch(tape)
            loss, weight, metrics = loss_sums(self._task, self._model, batch, True)
            if self._model.losses:
                # Weighted like the examples beside it, a regulariser counts once in the global mean.
                loss += weight * tf.add_n([tf.cast(extra, tf.float32) for extra in self._model.losses])
            if self._config.penalty is not None:
                loss += weight * self._config.penalty(self._model)
            scaled = loss / self._config.nominal_weight * scale
        found, watched = tape.gradient(scaled, (variables, sources))
        self.metric_names = tuple(sorted(metrics))
        self.unused = frozenset(index for index, gradient in enumerate(found) if gradient is None)
        if len(self.unused) == len(variables):
            raise UsageError(
                "the loss depends on no trained variable: does the task's loss() call the model that it is given, and "
                "return a loss computed from its outputs?"
            )
        return (
            [
                tf.zeros(variable.shape) if gradient is None else gradients.dense(gradient)
                for gradient, variable in zip(found, variables, strict=True)
            ],
            [
                tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient)
                for gradient, source in zip(watched, sources, strict=True)
            ],
            loss,
            weight,
            tuple(metrics[name] for name in self.metric_names),
        )

    @as_written
    def _set_seeds(self, step: tf.Tensor, microbatch: tf.Tensor | int) -> None:
        """Gives every seed generator a state of (seed, step, first example of this part of the global batch)."""
        if not self._seeds:
            return
        config = self._config
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        per_replica = config.global_batch_size // _num_replicas()
        # The offset, not the replica, so that 2 replicas of 2 microbatches draw what 4 replicas draw.
        offset = replica * per_replica + microbatch * (per_replica // config.microbatches)
        pair = tf.stack([tf.constant(config.seed & 0x7FFFFFFF, tf.int32), tf.constant(0, tf.int32)])
        pair = tf.random.experimental.stateless_fold_in(pair, tf.cast(step, tf.int32))
        pair = tf.random.experimental.stateless_fold_in(pair, tf.cast(offset, tf.int32))
        states = tf.random.stateless_uniform(
            [len(self._seeds), 2], seed=pair, minval=0, maxval=2**31 - 1, dtype=tf.int32
        )
        for index, variable in enumerate(self._seeds):
            variable.value.assign(tf.cast(states[index], variable.value.dtype))


class LocalSums(NamedTuple):
    """One replica's float32 sums over its microbatches.

    Attributes:
      gradients: of the scaled loss, by each trained variable.
      moving: what the moving statistics gained.
      loss, weight, metrics: as the task gives them, regularisation included.
      watched: gradients by what `ReplicaStep` was told to watch.
    """

    gradients: list[tf.Tensor]
    moving: list[tf.Tensor]
    loss: tf.Tensor
    weight: tf.Tensor
    metrics: tuple[tf.Tensor, ...]
    watched: list[tf.Tensor]


@as_written
def _num_replicas() -> int:
    return tf.distribute.get_replica_context().num_replicas_in_sync

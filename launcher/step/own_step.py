"""One replica's training step by a model's own `train_step`: what it applies is reduced and checked, each time.

    the model's step: (gradient of a scaled, weighted loss -> reduce -> unscale and check -> update) once or more
    -> reduce losses, metrics and moving statistics -> put back what a step that is not finite has changed

What an application changes has to be there for what follows it in the step. So each is gated by the checks so far,
and what the earlier ones changed is put back where a later one is not finite: there is one check for all that the
step changes. All collectives stand outside of conditionals.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from launcher.data.pipeline import WEIGHT, Batch
from launcher.errors import UsageError
from launcher.machine import xla
from launcher.optimizers.several import Optimizers
from launcher.step import gradients, overflow
from launcher.step.clipping import Clipping
from launcher.step.local_pass import LocalSums, Traced, num_replicas, set_seeds
from launcher.step.moving_average import MovingAverage
from launcher.step.statistics import Gains, is_overwritten, moving, present, seed_states
from launcher.step.step_config import StepParts
from launcher.step.train_step import StepReport, reported
from launcher.step.updates import Change, Trained, move_averages, update
from launcher.tasks.keras_model import KerasTask
from launcher.tasks.keras_own_step import OwnSteps
from launcher.tasks.keras_tracing import Tracing

_NO_AVERAGE = MovingAverage([], None)


class OwnStep:
    """The training step of one replica, as `ReplicaStep`, of a task whose model has one of its own."""

    def __init__(self, parts: StepParts):
        self._parts, self._task = parts, cast(KerasTask, parts.task)
        weights, assigned = parts.model.trainable_variables, {*map(id, self._task.step_assigns or ())}
        self._assigned = [one for one in weights if id(one) in assigned]
        self._seeds = [*seed_states(parts.model), self._task.own_steps.seeds.state]
        self._moving = moving(parts.statistics, weights)
        self.traced = Traced()

    def __call__(self, batch: Batch) -> StepReport:
        parts, scale = self._parts, tf.convert_to_tensor(self._parts.counters.scale.scale)
        applications, local = self._run(batch)
        sums = gradients.reduce_sum(local, bucket_bytes=parts.config.bucket_bytes)
        applications.end(list(zip(self._moving, sums.moving, strict=True)))
        parts.counters.advance(parts.loss_scale, applications.checked, scale)
        return reported(sums, applications.checked, scale, applications.learning_rate, applications.non_finite)

    def _run(self, batch: Batch, *, looks_only: bool = False) -> tuple[Applications, LocalSums]:
        """Has the model's step run, after which its moving statistics are as they were."""
        before, num_real = present(self._moving), tf.reduce_sum(batch[WEIGHT])
        applications = Applications(self._parts, num_real, looks_only=looks_only)
        applications.keep(self._assigned)
        set_seeds(self._seeds, self._parts.config, tf.convert_to_tensor(self._parts.counters.step))
        with xla.compiling(self._parts.config.compiled and not looks_only):
            loss, metrics = self._task.train_step(batch, applications.tracing(self._task.own_steps))
        num_uses, expected = applications.num_uses, self._parts.optimizer.num_uses
        if num_uses != expected:
            raise UsageError(
                f"train_step applied optimizers {num_uses} times, and {expected} times when it was traced before: how "
                "often it does must not depend on what changes between two calls"
            )
        weights = range(len(self._parts.model.trainable_variables))
        self.traced = Traced.of(metrics, set(weights) - applications.updated)
        gained = []
        for one, old in zip(self._moving, before, strict=True):
            gained.append(one.gained(old, num_real, 0, 1))
            one.variable.value.assign(old)
        of_metrics = tuple(metrics[name] for name in self.traced.metrics)
        return applications, LocalSums([], gained, loss, num_real, of_metrics, [], [])

    def non_finite(self, batch: Batch) -> tf.Tensor:
        """Flags of gradients, as `ReplicaStep.non_finite` gives them."""
        applications, _ = self._run(batch, looks_only=True)
        rows = gradients.of_each_replica(applications.flags[0])
        return tf.concat([rows, applications.flags[1:]], axis=0)


class Applications:
    """Applications of optimizers by one replica's step while it is traced, and the check of the gradients each time.

    Args:
      num_real: float32 scalar, the replica's examples.
      looks_only: nothing is applied.

    Attributes:
      num_uses: applications so far.
      updated: positions of the weights that had a gradient.
      checked: the check of all applications together, without gradients.
      non_finite: as in `StepReport`.
      flags: float32 [2, weights], 1 where this replica's gradient, or the sum of all, is not finite.
    """

    def __init__(self, parts: StepParts, num_real: tf.Tensor, *, looks_only: bool = False):
        self._parts, self._weights, self._num_real = parts, list(parts.model.trainable_variables), num_real
        self._positions = {id(weight): position for position, weight in enumerate(self._weights)}
        self._optimizers: Optimizers = parts.optimizer
        self._scale = tf.convert_to_tensor(parts.counters.scale.scale)
        # What the gradients of a mean over the examples are multiplied by. A replica without any may have gradients of
        # others' losses, by synchronised statistics.
        self._share = self._scale / parts.config.nominal_weight * tf.maximum(num_real, 1.0)
        self._looks_only = looks_only
        self._before: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self.num_uses = 0
        self.updated: set[int] = set()
        self.learning_rate = zero = tf.constant(0.0)
        none = tf.constant(False)
        self.checked = gradients.Checked([], zero, tf.constant(True), none, tf.constant(True), squares=zero)
        self.non_finite = tf.zeros([overflow.num_scalars(len(self._weights))])
        self.flags = tf.zeros([2, len(self._weights)])

    def tracing(self, steps: OwnSteps) -> Tracing:
        """The `Tracing` of the model's step, which applies by this."""
        return Tracing(
            apply=self.apply,
            num_real=self._num_real,
            total=gradients.reduce_sum([self._num_real])[0] if steps.has_sums else self._num_real,
            seeds=steps.seeds,
            weights=frozenset(self._positions) | {id(weight.value) for weight in self._weights},
            upstream=self._scale / self._parts.config.nominal_weight * self._num_real,
            downstream=self._share,
        )

    def apply(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[keras.Variable] | None
    ) -> None:
        """Reduces the gradients of a mean over this replica's examples, checks them, and updates weights, or not."""
        part, config = self._optimizers.part(optimizer), self._parts.config
        if part is None:
            raise UsageError(f"train_step applies {optimizer.name!r}, which it did not when it was traced before")
        self.num_uses += 1
        places = [self._positions[id(variable)] for variable in (part.updated if variables is None else variables)]
        by_place = {place: one for place, one in zip(places, grads, strict=True) if one is not None}
        self.updated |= set(by_place)
        for place in [*by_place]:
            if is_overwritten(self._weights[place]):  # put together with what else the step assigns
                self._weights[place].value.assign(by_place.pop(place))
        trained = [Trained(place, self._weights[place], None) for place in by_place]
        local = [gradients.dense(one, self._weights[place].shape) * self._share for place, one in by_place.items()]
        sent = gradients.to_reduce_dtype(local, config.reduce_dtype)
        *sums, weight = gradients.reduce_sum([*sent, self._num_real], bucket_bytes=config.bucket_bytes)
        checked = gradients.unscale_and_check(
            sums, scale=self._scale, nominal_weight=config.nominal_weight, true_weight=weight
        )
        if self._looks_only:
            for row, tensors in enumerate((sent, sums)):
                found = tf.scatter_nd([[row, place] for place in by_place], overflow.flags(tensors), self.flags.shape)
                self.flags = tf.maximum(self.flags, found)
            return
        before, squares = self.checked, self.checked.squares + tf.square(checked.norm)
        checked = checked._replace(applied=tf.logical_and(checked.applied, before.applied))
        finite = tf.logical_and(checked.finite, before.finite)
        self.checked = checked._replace(gradients=[], norm=tf.sqrt(squares), finite=finite, squares=squares)
        rate = part.next_rate()
        self.learning_rate = rate if self.num_uses == 1 else self.learning_rate
        if self.num_uses < self._optimizers.num_uses:
            self.keep([*(self._weights[place] for place in by_place), *part.variables])
        bounded = dataclasses.replace(config, clipping=Clipping(**part.clipping))
        parts = dataclasses.replace(self._parts, optimizer=part, ema=_NO_AVERAGE, config=bounded)
        change = Change(trained=trained, checked=checked, learning_rate=rate, parts=parts)
        applied = contextvars.Context().run(update, change)  # where nothing traces a step of the model's own
        flags = [tf.cast(packed, tf.int32) for packed in (self.non_finite, applied)]
        self.non_finite = tf.cast(tf.bitwise.bitwise_or(*flags), tf.float32)

    def keep(self, variables: Sequence[keras.Variable]) -> None:
        """Keeps what these hold, to be put back in the end if the step is not to be applied."""
        for variable in variables:
            self._before.setdefault(id(variable), (variable.value, tf.identity(variable.value)))

    def end(self, moved: Gains) -> None:
        """Moves the moving statistics and averages, or puts back what the step has updated already."""

        def make() -> tf.Tensor:
            move_averages(self._parts, moved, num_replicas())
            return tf.constant(True)

        def put_back() -> tf.Tensor:
            for variable, value in self._before.values():
                # Not `assign`, which for an optimizer's count of updates would call into the cross-replica context.
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
            return tf.constant(False)

        tf.cond(self.checked.applied, make, put_back)

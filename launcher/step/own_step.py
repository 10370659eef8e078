"""One replica's training step by a model's own `train_step`: what it applies is reduced and judged, each time.

    the model's step: (gradient of a scaled, weighted loss -> reduce -> unscale and check -> update) once or more
    -> reduce losses, metrics and moving statistics -> put back what a step that is not finite has changed

What an application changes has to be there for what follows it in the step. So each is gated by the verdicts so far,
and what the earlier ones changed is put back where a later one is not finite: there is one verdict for all that the
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
from launcher.optimizers.several import Optimizers
from launcher.step import gradients, overflow
from launcher.step.clipping import Clipping
from launcher.step.local_pass import LocalSums, num_replicas, set_seeds
from launcher.step.moving_average import MovingAverage
from launcher.step.statistics import Statistic, is_overwritten, moving, present, seed_states
from launcher.step.step_config import StepParts
from launcher.step.train_step import StepReport, report_names
from launcher.step.updates import Change, Trained, update
from launcher.tasks.keras_model import KerasTask
from launcher.tasks.keras_own_step import OwnSteps
from launcher.tasks.keras_tracing import Tracing

_NO_AVERAGE = MovingAverage([], None)


class OwnStep:
    """The training step of one replica, as `ReplicaStep`, of a task whose model has one of its own."""

    def __init__(self, parts: StepParts):
        self._parts, self._task, self._optimizers = parts, cast(KerasTask, parts.task), parts.optimizer
        self._counters, self._config = parts.counters, parts.config
        self._weights = list(parts.model.trainable_variables)
        self._assigned = [one for one in self._weights if id(one) in {*map(id, self._task.step_assigns or ())}]
        self._seeds = [*seed_states(parts.model), self._task.own_steps.seeds.state]
        self._moving = moving(parts.statistics, self._weights)
        self.metric_names: tuple[str, ...] = ()
        self.metric_sizes: tuple[int, ...] = ()
        self.unused: frozenset[int] = frozenset()

    @property
    def report_names(self) -> tuple[str, ...]:
        """As of `ReplicaStep`."""
        return report_names(self.metric_names, self.metric_sizes, len(self._weights))

    def __call__(self, batch: Batch) -> StepReport:
        counters, config = self._counters, self._config
        scale, step = tf.convert_to_tensor(counters.scale.scale), tf.convert_to_tensor(counters.step)
        before = present(self._moving)
        num_real = tf.reduce_sum(batch[WEIGHT])
        verdicts = Verdicts(self._parts, num_real)
        verdicts.keep(self._assigned)
        set_seeds(self._seeds, config, step)
        loss, metrics = self._task.train_step(batch, verdicts.tracing(self._task.own_steps))
        self._trace_ended(metrics, verdicts)
        gained = [one.gained(old, num_real, 0, 1) for one, old in zip(self._moving, before, strict=True)]
        of_metrics = [metrics[name] for name in self.metric_names]
        local = LocalSums([], gained, loss, num_real, tuple(of_metrics), [])
        sums = gradients.reduce_sum(tf.nest.flatten(local), bucket_bytes=config.bucket_bytes)
        sums = tf.nest.pack_sequence_as(local, sums)
        judged = verdicts.judged()
        self._put_back(before)
        verdicts.end(judged, list(zip(self._moving, sums.moving, strict=True)))
        counters.advance(self._parts.loss_scale, judged, scale)
        return StepReport(
            loss=sums.loss,
            weight=sums.weight,
            metrics=sums.metrics,
            gradient_norm=judged.norm,
            finite=tf.cast(judged.applied, tf.float32),
            loss_scale=scale,
            learning_rate=verdicts.learning_rate,
            non_finite=tuple(tf.unstack(verdicts.non_finite)),
        )

    def _put_back(self, before: Sequence[tf.Tensor]) -> None:
        for one, old in zip(self._moving, before, strict=True):
            one.variable.value.assign(old)

    def _trace_ended(self, metrics: dict[str, tf.Tensor], verdicts: Verdicts) -> None:
        if verdicts.num_uses != self._optimizers.num_uses:
            raise UsageError(
                f"train_step applied optimizers {verdicts.num_uses} times, and {self._optimizers.num_uses} times when "
                "it was traced before: how often it does must not depend on what changes between two calls"
            )
        self.metric_names = tuple(sorted(metrics))
        self.metric_sizes = tuple(metrics[name].shape.num_elements() for name in self.metric_names)
        self.unused = frozenset(range(len(self._weights))) - verdicts.updated

    def non_finite(self, batch: Batch) -> tf.Tensor:
        """As of `ReplicaStep`."""
        before = present(self._moving)
        num_real = tf.reduce_sum(batch[WEIGHT])
        verdicts = Verdicts(self._parts, num_real, looks_only=True)
        set_seeds(self._seeds, self._config, tf.convert_to_tensor(self._counters.step))
        self._task.train_step(batch, verdicts.tracing(self._task.own_steps))
        self._put_back(before)
        rows = gradients.of_each_replica(verdicts.flags_sent)
        return tf.concat([rows, verdicts.flags_summed[None, :]], axis=0)


class Verdicts:
    """What one replica's step goes by while it is traced: applies optimizers, and judges each time.

    Args:
      num_real: float32 scalar, the replica's examples.
      looks_only: nothing is applied.

    Attributes:
      num_uses: applications so far.
      updated: positions of the weights that had a gradient.
      non_finite: as in `StepReport`.
      flags_sent, flags_summed: float32 [weights], 1 where this replica's gradient, or the sum of all, is not finite.
    """

    def __init__(self, parts: StepParts, num_real: tf.Tensor, *, looks_only: bool = False):
        self._parts, self._weights, self._num_real = parts, list(parts.model.trainable_variables), num_real
        self._positions = {id(weight): position for position, weight in enumerate(self._weights)}
        self._optimizers: Optimizers = parts.optimizer
        self._config = parts.config
        self._scale = tf.convert_to_tensor(parts.counters.scale.scale)
        # What the gradients of a mean over the examples are multiplied by. A replica without any may have gradients of
        # others' losses, by synchronised statistics.
        self._share = self._scale / parts.config.nominal_weight * tf.maximum(num_real, 1.0)
        self._looks_only = looks_only
        self._checked: list[gradients.Checked] = []
        self._before: dict[int, tuple[tf.Variable, tf.Tensor]] = {}
        self.num_uses = 0
        self.updated: set[int] = set()
        self.learning_rate = tf.constant(0.0)
        self.non_finite = tf.zeros([overflow.num_scalars(len(self._weights))])
        self.flags_sent = self.flags_summed = tf.zeros([len(self._weights)])

    def tracing(self, steps: OwnSteps) -> Tracing:
        """What the model's step is traced by."""
        return Tracing(
            apply=self.apply,
            num_real=self._num_real,
            total=gradients.reduce_sum([self._num_real])[0] if steps.has_sums else self._num_real,
            seeds=steps.seeds,
            weights=frozenset(self._positions) | {id(weight.value) for weight in self._weights},
            upstream=self._scale / self._config.nominal_weight * self._num_real,
            downstream=self._share,
        )

    def apply(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[keras.Variable] | None
    ) -> None:
        """Reduces the gradients of a mean over this replica's examples, judges them, and updates weights, or not."""
        part, config = self._optimizers.part(optimizer), self._config
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
        wire = gradients.to_reduce_dtype(local, config.reduce_dtype)
        *sums, weight = gradients.reduce_sum([*wire, self._num_real], bucket_bytes=config.bucket_bytes)
        checked = gradients.unscale_and_check(
            sums, scale=self._scale, nominal_weight=config.nominal_weight, true_weight=weight
        )
        if self._looks_only:
            self._look(by_place, wire, sums)
            return
        checked = checked._replace(applied=tf.logical_and(checked.applied, self._so_far(lambda one: one.applied)))
        self._checked.append(checked)
        rate = part.next_rate()
        self.learning_rate = rate if self.num_uses == 1 else self.learning_rate
        if self.num_uses < self._optimizers.num_uses:
            self.keep([*(self._weights[place] for place in by_place), *part.variables])
        change = self._change(checked, trained, part, rate, Clipping(**part.clipping))
        applied = contextvars.Context().run(update, change)  # where nothing traces a step of the model's own
        flags = [tf.cast(packed, tf.int32) for packed in (self.non_finite, applied)]
        self.non_finite = tf.cast(tf.bitwise.bitwise_or(*flags), tf.float32)

    def keep(self, variables: Sequence[keras.Variable]) -> None:
        """Keeps what these hold, to be put back in the end if the step is not to be applied."""
        for variable in variables:
            self._before.setdefault(id(variable), (variable.value, tf.identity(variable.value)))

    def _change(
        self,
        checked: gradients.Checked,
        trained: Sequence[Trained],
        part: Any,
        rate: tf.Tensor,
        clipping: Clipping,
        *,
        moving: Sequence[tuple[Statistic, tf.Tensor]] = (),
        ema: MovingAverage = _NO_AVERAGE,
    ) -> Change:
        return Change(
            trained=trained,
            checked=checked,
            num_weights=len(self._weights),
            moving=moving,
            num_microbatches=num_replicas(),
            step=tf.convert_to_tensor(self._parts.counters.step),
            learning_rate=rate,
            parts=dataclasses.replace(
                self._parts, optimizer=part, ema=ema, config=dataclasses.replace(self._config, clipping=clipping)
            ),
        )

    def _so_far(self, of: Any) -> tf.Tensor:
        return tf.reduce_all(tf.stack([tf.constant(True), *map(of, self._checked)]))

    def judged(self) -> gradients.Checked:
        """The one verdict: of all applications together."""
        squares = [tf.square(one.norm) for one in self._checked]
        empty = self._checked[0].empty if self._checked else tf.constant(False)
        norm = tf.sqrt(tf.reduce_sum(tf.stack(squares))) if squares else tf.constant(0.0)
        return gradients.Checked(
            [], norm, self._so_far(lambda one: one.finite), empty, self._so_far(lambda one: one.applied)
        )

    def end(self, judged: gradients.Checked, moving: Sequence[tuple[Statistic, tf.Tensor]]) -> None:
        """Moves the moving statistics and averages, or puts back what the step has updated already."""
        change = self._change(judged, [], None, self.learning_rate, Clipping(), moving=moving, ema=self._parts.ema)

        def make() -> tf.Tensor:
            change.move_averages()
            return tf.constant(True)

        def put_back() -> tf.Tensor:
            for variable, value in self._before.values():
                # Not `assign`, which for an optimizer's count of updates would call into the cross-replica context.
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
            return tf.constant(False)

        tf.cond(judged.applied, make, put_back)

    def _look(self, places: Any, sent: Sequence[tf.Tensor], summed: Sequence[tf.Tensor]) -> None:
        def spread(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
            found = tf.unstack(overflow.flags(tensors))
            by_place = dict(zip(places, found, strict=True))
            return tf.stack([by_place.get(place, tf.constant(0.0)) for place in range(len(self._weights))])

        self.flags_sent = tf.maximum(self.flags_sent, spread(sent))
        self.flags_summed = tf.maximum(self.flags_summed, spread(summed))

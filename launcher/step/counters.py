"""Counters of a run, and the state of its loss scale."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from launcher.machine.no_autograph import call_converted
from launcher.step.gradients import Checked
from launcher.step.precision import LossScale, ScaleState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """The variables that steer a run; one copy a replica and always equal (aggregation NONE: assigns are local).

    Attributes:
      step: int64, steps done, skipped ones included; the data position follows from it.
      skipped: int64, steps skipped so far.
      limits: float32 [2], the mean loss and the gradient norm above which a step is skipped; None for no such rule.
    """

    step: tf.Variable
    skipped: tf.Variable
    scale: ScaleState
    limits: tf.Variable | None = None

    @classmethod
    def make(cls, scale: ScaleState, *, has_limits: bool) -> Counters:
        """Those of a run that begins with a state of the loss scale; under the strategy's scope."""

        def variable(value: tf.Tensor, name: str) -> tf.Variable:
            return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.NONE)

        return cls(
            step=variable(tf.constant(0, tf.int64), "step"),
            skipped=variable(tf.constant(0, tf.int64), "skipped"),
            scale=ScaleState(*(variable(value, name) for name, value in zip(ScaleState._fields, scale, strict=True))),
            limits=variable(tf.fill([2], math.inf), "limits") if has_limits else None,
        )

    def advance(self, loss_scale: LossScale, judged: Checked, scale: tf.Tensor) -> None:
        """Counts a step and moves the loss scale, whose value in this step was `scale`; in replica context."""
        before = ScaleState(scale, *(tf.convert_to_tensor(variable) for variable in self.scale[1:]))
        after = call_converted(loss_scale.update, before, judged.finite)
        for variable, old, new in zip(self.scale, before, after, strict=True):
            if new is not old:  # what is fixed costs nothing
                # An empty global batch leaves the loss scale unchanged.
                variable.assign(tf.where(judged.empty, old, new))
        self.step.assign_add(1)
        self.skipped.assign_add(tf.where(judged.applied, tf.constant(0, tf.int64), tf.constant(1, tf.int64)))

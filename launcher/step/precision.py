"""Numeric policy of a run: compute dtype, the loss scale as a pure function of what was checked, and counters.

A loss scale here is a small frozen object that never touches a variable: `initial()` gives the state and `update(state,
finite)` the next one. Every replica evaluates the same function on the same reduced check, so all replicas agree
without another collective (Keras's own decides on replica 0 before the reduction, which is how it goes wrong).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import gin
import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine.no_autograph import call_converted, no_autograph
from launcher.step.gradients import Checked

FLOAT8 = "mixed_float8"
"""The policy under which layers are made as under mixed_bfloat16, and multiply in 8 bits where they may."""
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16", FLOAT8)


def of_keras(policy: str) -> str:
    """The policy of Keras's that layers are made under."""
    return "mixed_bfloat16" if policy == FLOAT8 else policy


class ScaleState(NamedTuple):
    """The state that a loss scale keeps between steps; scalars, float32 and int32.

    Attributes:
      scale: the factor the loss is multiplied by.
      finite_steps: finite steps since the scale last moved.
      hysteresis_left: overflows still tolerated before the scale falls.
      skips_at_floor: consecutive skipped steps at a scale that can fall no further.
    """

    scale: tf.Tensor
    finite_steps: tf.Tensor
    hysteresis_left: tf.Tensor
    skips_at_floor: tf.Tensor


class LossScale(Protocol):
    """Decides the factor that keeps 16-bit gradients inside their range."""

    def initial(self) -> ScaleState:
        """The state before the first step."""

    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        """The state after a step whose reduced gradients were finite (bool scalar) or not."""


def _state(scale: float, hysteresis: int) -> ScaleState:
    return ScaleState(
        scale=tf.constant(scale, tf.float32),
        finite_steps=tf.constant(0, tf.int32),
        hysteresis_left=tf.constant(hysteresis, tf.int32),
        skips_at_floor=tf.constant(0, tf.int32),
    )


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Falls on overflow, grows after a run of finite steps.

    The rule is that of torch.amp.GradScaler and Keras with hysteresis 1, and that of Megatron-LM with more:
    the first `hysteresis - 1` overflows after a growth skip the step but leave the scale. Unlike those, the
    scale has a floor and a ceiling, so it can neither become 0 nor inf.

    Attributes:
      initial_scale: scale of the first step (Keras's default; PyTorch starts at 2**16).
      growth_factor: the scale is multiplied by this after `growth_interval` consecutive finite steps.
      growth_interval: finite steps before the scale grows (2000 in Micikevicius et al. 2017's released code).
      backoff_factor: the scale is multiplied by this on overflow.
      hysteresis: overflows before the scale falls.
      min_scale: smallest scale.
      max_scale: largest scale (2**24 as in Apex: above, float32 sums of scaled losses lose exactness).
    """

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        bounded = 0 < self.min_scale <= self.initial_scale <= self.max_scale
        self._check(bounded, "0 < min_scale <= initial_scale <= max_scale", "min_scale", "initial_scale", "max_scale")
        moves = self.growth_factor >= 1 and 0 < self.backoff_factor < 1
        self._check(moves, "growth_factor >= 1 and 0 < backoff_factor < 1", "growth_factor", "backoff_factor")
        counts = self.growth_interval >= 1 and self.hysteresis >= 1
        self._check(counts, "growth_interval >= 1 and hysteresis >= 1", "growth_interval", "hysteresis")

    def _check(self, fits: bool, needed: str, *names: str) -> None:
        if not fits:
            got = ", ".join(f"{name}={getattr(self, name)}" for name in names)
            raise UsageError(f"DynamicLossScale needs {needed}, got {got}")

    def initial(self) -> ScaleState:
        return _state(self.initial_scale, self.hysteresis)

    @no_autograph
    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        finite_steps = tf.where(finite, state.finite_steps + 1, 0)
        grows = finite_steps >= self.growth_interval
        hysteresis_left = tf.where(finite, state.hysteresis_left, tf.maximum(state.hysteresis_left - 1, 0))
        falls = tf.logical_and(tf.logical_not(finite), hysteresis_left <= 0)
        grown = tf.minimum(state.scale * self.growth_factor, self.max_scale)
        fallen = tf.maximum(state.scale * self.backoff_factor, self.min_scale)
        at_floor = tf.logical_and(tf.logical_not(finite), state.scale <= self.min_scale)
        return ScaleState(
            scale=tf.where(grows, grown, tf.where(falls, fallen, state.scale)),
            finite_steps=tf.where(grows, 0, finite_steps),
            hysteresis_left=tf.where(grows, self.hysteresis, hysteresis_left),
            skips_at_floor=tf.where(at_floor, state.skips_at_floor + 1, 0),
        )


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedLossScale:
    """The same scale for the whole run; overflowing steps are checked and skipped all the same.

    Attributes:
      scale: the factor; 1 is no scaling.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise UsageError(f"FixedLossScale.scale must be positive, got {self.scale}")

    def initial(self) -> ScaleState:
        return _state(self.scale, 0)

    @no_autograph
    def update(self, state: ScaleState, finite: tf.Tensor) -> ScaleState:
        return state._replace(
            finite_steps=tf.where(finite, state.finite_steps + 1, 0),
            skips_at_floor=tf.where(finite, 0, state.skips_at_floor + 1),
        )


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
        """Counters of a run that begins with a state of the loss scale; under the strategy's scope."""

        def variable(value: tf.Tensor, name: str) -> tf.Variable:
            return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.NONE)

        return cls(
            step=variable(tf.constant(0, tf.int64), "step"),
            skipped=variable(tf.constant(0, tf.int64), "skipped"),
            scale=ScaleState(*(variable(value, name) for name, value in zip(ScaleState._fields, scale, strict=True))),
            limits=variable(tf.fill([2], math.inf), "limits") if has_limits else None,
        )

    def advance(self, loss_scale: LossScale, checked: Checked, scale: tf.Tensor) -> None:
        """Counts a step and moves the loss scale, whose value in this step was `scale`; in replica context."""
        before = ScaleState(scale, *(tf.convert_to_tensor(variable) for variable in self.scale[1:]))
        after = call_converted(loss_scale.update, before, checked.finite)
        for variable, old, new in zip(self.scale, before, after, strict=True):
            if new is not old:  # what is fixed costs nothing
                # An empty global batch leaves the loss scale unchanged.
                variable.assign(tf.where(checked.empty, old, new))
        self.step.assign_add(1)
        self.skipped.assign_add(tf.where(checked.applied, tf.constant(0, tf.int64), tf.constant(1, tf.int64)))


def resolve_loss_scale(requested: Any, policy: str) -> LossScale:
    """The loss scale of a run: "auto" is dynamic under mixed_float16 and none otherwise.

    UsageError where it is neither "auto" nor "none" nor an object as `@DynamicLossScale()` gives it.
    """
    if requested == "auto":
        return DynamicLossScale() if policy == "mixed_float16" else FixedLossScale(scale=1.0)
    if requested == "none":
        return FixedLossScale(scale=1.0)
    if hasattr(requested, "initial") and hasattr(requested, "update"):
        return requested
    raise UsageError(f"train.loss_scale = {requested!r}: use 'auto', 'none', @DynamicLossScale() or @FixedLossScale()")


def of_optimizer(optimizer: Any, otherwise: LossScale) -> LossScale:
    """The dynamic loss scale that a Keras optimizer was given, ours for Keras's default; `otherwise` for none."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return otherwise
    given = {"initial_scale": optimizer.initial_scale, "growth_interval": optimizer.dynamic_growth_steps}
    given["max_scale"] = max(DynamicLossScale.max_scale, given["initial_scale"])  # Keras has no largest
    return DynamicLossScale(**{name: one for name, one in given.items() if one != getattr(DynamicLossScale, name)})


def recorded(policy: str, loss_scale: LossScale) -> dict[str, Any]:
    """Facts that a checkpoint records beside the state of a loss scale, to be compared when a run goes on; plain JSON.

    Of a loss scale of any class, attributes that are numbers, strings or None count as its arguments.
    """
    arguments = {
        name: value
        for name, value in sorted(getattr(loss_scale, "__dict__", {}).items())
        if value is None or isinstance(value, (bool, int, float, str))
    }
    return {"policy": policy, "loss_scale": {"kind": type(loss_scale).__name__, "arguments": arguments}}


def resolve_reduce_dtype(requested: str, policy: str) -> tf.DType:
    """The dtype gradients travel in: "auto" is float16 under mixed_float16 and float32 otherwise.

    float16 keeps three more bits of mantissa than bfloat16 and its narrow range is what the loss scale is for; bfloat16
    sums lose accuracy fast with the number of replicas. An unknown name is a UsageError.
    """
    if requested == "auto":
        requested = "float16" if policy == "mixed_float16" else "float32"
    if requested not in ("float16", "bfloat16", "float32"):
        raise UsageError(f"train.reduce_dtype = {requested!r}: expected 'auto', 'float16', 'bfloat16' or 'float32'")
    return tf.dtypes.as_dtype(requested)

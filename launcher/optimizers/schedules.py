"""Learning rates as functions of the step.

Every schedule here is `warm-up, then a shape`. During the first `warmup` steps the rate rises linearly (Goyal et al.
2017, arXiv 1706.02677): `peak * (step + 1) / warmup`, so that no step is spent on a rate of zero. The shape then
follows `progress = (step - warmup) / (horizon - warmup)`, which runs from 0 to 1, and stays at its end. The horizon is
the length of the run unless `decay_steps` is bound. An argument that is out of range is a UsageError.

Args:
  peak: learning rate after the warm-up.
  warmup_steps: steps of linear warm-up. Bind it or `warmup_fraction`.
  warmup_fraction: linear warm-up as a part of the horizon.
  final: learning rate at the horizon.
  decay_steps: the horizon; None for the run's length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import gin
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph

# (step float32 [], total_steps) -> learning rate float32 []
Schedule = Callable[[tf.Tensor, int], tf.Tensor]


@gin.configurable
def constant(*, peak: float = gin.REQUIRED, warmup_steps: int = 0, warmup_fraction: float = 0.0) -> Schedule:
    """A constant rate after the warm-up.

    Args:
      warmup_fraction: linear warm-up as a part of the run.
    """
    return _warmed("constant", lambda progress, *_: tf.ones_like(progress) * peak, peak, warmup_steps, warmup_fraction)


@gin.configurable
def cosine(
    *,
    peak: float = gin.REQUIRED,
    warmup_steps: int = 0,
    warmup_fraction: float = 0.0,
    final: float = 0.0,
    decay_steps: int | None = None,
) -> Schedule:
    """Half a cosine from `peak` to `final` (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts).

    >>> rate = cosine(peak=0.1, warmup_steps=10)
    >>> [round(float(rate(tf.constant(step), 110)), 4) for step in (0, 10, 60, 110)]
    [0.01, 0.1, 0.05, 0.0]
    """

    def shape(progress: tf.Tensor, *_: object) -> tf.Tensor:
        return final + (peak - final) * 0.5 * (1.0 + tf.cos(math.pi * progress))

    return _warmed("cosine", shape, peak, warmup_steps, warmup_fraction, final, decay_steps)


@gin.configurable
def linear(
    *,
    peak: float = gin.REQUIRED,
    warmup_steps: int = 0,
    warmup_fraction: float = 0.0,
    final: float = 0.0,
    decay_steps: int | None = None,
) -> Schedule:
    """A straight line from `peak` to `final`."""

    def shape(progress: tf.Tensor, *_: object) -> tf.Tensor:
        return peak + (final - peak) * progress

    return _warmed("linear", shape, peak, warmup_steps, warmup_fraction, final, decay_steps)


@gin.configurable
def inverse_square_root(
    *, warmup_steps: int = gin.REQUIRED, peak: float | None = None, width: int | None = None
) -> Schedule:
    """Linear warm-up to `peak`, then `peak * sqrt(warmup_steps / step)`; it knows no horizon.

    With `width` instead of `peak` it is the rate of Vaswani et al. 2017 (arXiv 1706.03762, equation 3),
    `width ** -0.5 * min(step ** -0.5, step * warmup_steps ** -1.5)` with steps counted from 1, whose peak is
    `(width * warmup_steps) ** -0.5`: 7.0e-4 for 512 and 4000.

    Args:
      warmup_steps: steps of linear warm-up, 1 or more.
      peak: learning rate after the warm-up. Bind it or `width`.
      width: width of the model, for the rate of Vaswani et al. 2017.
    """
    check_value("inverse_square_root.warmup_steps", warmup_steps, warmup_steps >= 1, "1 or more")
    if (peak is None) == (width is None):
        raise UsageError(f"inverse_square_root.peak = {peak} and inverse_square_root.width = {width}: bind one of them")
    if width is not None:
        check_value("inverse_square_root.width", width, width >= 1, "1 or more")
        peak = (width * warmup_steps) ** -0.5
    assert peak is not None
    highest = peak

    def shape(_: object, step: tf.Tensor, __: object) -> tf.Tensor:
        return highest * tf.sqrt(warmup_steps / (step + 1.0))

    return _warmed("inverse_square_root", shape, peak, warmup_steps)


@gin.configurable
def step_decay(
    *,
    peak: float = gin.REQUIRED,
    boundaries: Sequence[float] = gin.REQUIRED,
    factor: float = 0.1,
    warmup_steps: int = 0,
    warmup_fraction: float = 0.0,
    decay_steps: int | None = None,
) -> Schedule:
    """The rate is multiplied by `factor` at each boundary, as in He et al. 2016 (arXiv 1512.03385).

    Args:
      boundaries: ascending; all whole numbers of steps (>= 1), or all parts of the horizon (between 0 and 1).
      factor: what each boundary multiplies the rate by.
    """
    check_value("step_decay.factor", factor, 0.0 < factor <= 1.0, "more than 0 and at most 1")
    are_steps = _are_steps(boundaries)

    def shape(_: object, step: tf.Tensor, horizon: int) -> tf.Tensor:
        # From the step with a boundary's number on, counted from 0, the rate is the lower one.
        reached = [float(boundary if are_steps else round(boundary * horizon)) for boundary in boundaries]
        passed = tf.reduce_sum(tf.cast(step >= tf.constant(reached), tf.float32))
        return peak * tf.pow(tf.constant(factor, tf.float32), passed)

    return _warmed("step_decay", shape, peak, warmup_steps, warmup_fraction, decay_steps=decay_steps)


def _warmed(
    name: str,
    shape: Callable[[tf.Tensor, tf.Tensor, int], tf.Tensor],
    peak: float,
    warmup_steps: int,
    warmup_fraction: float = 0.0,
    final: float | None = None,
    decay_steps: int | None = None,
) -> Schedule:
    """The schedule of this name: warm-up, and a shape of the progress after it, the step and the horizon.

    Raises UsageError where an argument is out of range.
    """
    check_value(f"{name}.peak", peak, math.isfinite(peak) and peak > 0.0, "a finite learning rate above 0")
    check_value(f"{name}.final", final, final is None or 0.0 <= final <= peak, f"from 0 to the peak, {peak}")
    check_value(f"{name}.warmup_steps", warmup_steps, warmup_steps >= 0, "0 or more")
    check_value(f"{name}.warmup_fraction", warmup_fraction, 0.0 <= warmup_fraction < 1.0, "from 0 to less than 1")
    if warmup_steps and warmup_fraction:
        raise UsageError(f"{name}.warmup_steps = {warmup_steps} and warmup_fraction = {warmup_fraction}: bind one")
    if decay_steps is not None and decay_steps <= warmup_steps:
        raise UsageError(f"{name}.decay_steps = {decay_steps}: must be more than warmup_steps, {warmup_steps}")

    @no_autograph
    def schedule(step: tf.Tensor, total_steps: int) -> tf.Tensor:
        step, horizon = tf.cast(step, tf.float32), decay_steps or total_steps
        warmup = warmup_steps or round(warmup_fraction * horizon)
        # A warm-up may be longer than a run that was cut short for a trial.
        progress = tf.clip_by_value((step - warmup) / max(1, horizon - warmup), 0.0, 1.0)
        rising = peak * ((step + 1.0) / max(1, warmup))
        return tf.where(step < warmup, rising, shape(progress, step, horizon))

    return schedule


def _are_steps(boundaries: Sequence[float]) -> bool:
    steps = all(isinstance(boundary, int) and boundary >= 1 for boundary in boundaries)
    parts = all(isinstance(boundary, float) and 0.0 < boundary < 1.0 for boundary in boundaries)
    if not boundaries or not (steps or parts) or list(boundaries) != sorted(set(boundaries)):
        raise UsageError(f"step_decay.boundaries = {boundaries!r}: must be ascending steps, or shares of the run")
    return steps

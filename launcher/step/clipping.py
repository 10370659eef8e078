"""Clipping of gradients that are reduced, unscaled and checked: once, the same on every replica.

Clipping before the reduction, as Keras's `clipnorm` does, clips each replica's share and sums what is left: another
function on every topology.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import gin
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph

# Weights this small are clipped as if they had this norm, so that zero-initialised ones can move (Brock et al. 2021).
_SMALLEST_WEIGHT_NORM = 1e-3


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Clipping:
    """How gradients are bounded: the reduced mean, without the loss scale. At most one of the bounds is bound.

    Attributes:
      global_norm: bound of the norm over all gradients together (Pascanu et al. 2013, arXiv 1211.5063).
      value: bound of every element's magnitude.
      layer_norm: bound of each variable's own norm.
      adaptive: bound of the ratio of gradient to weight norm, unit by unit: adaptive gradient clipping (Brock et al.
        2021, arXiv 2102.06171), whose authors use 0.01 to 0.16 and leave the classifier out; here it is in.
    """

    global_norm: float | None = None
    value: float | None = None
    layer_norm: float | None = None
    adaptive: float | None = None

    def __post_init__(self) -> None:
        bounds = self.bounds
        for name, bound in bounds.items():
            check_value(f"Clipping.{name}", bound, bound > 0, "more than 0")
        if len(bounds) > 1:
            given = ", ".join(f"Clipping.{name} = {bound}" for name, bound in bounds.items())
            raise UsageError(f"gradients are clipped one way, not several: {given}; bind one of them")

    @property
    def bounds(self) -> dict[str, float]:
        """Bounds that are set, by name."""
        return {name: bound for name, bound in vars(self).items() if bound is not None}

    @property
    def needs_wholes(self) -> bool:
        """Whether more of a gradient must be known than each element and the norm of all."""
        return self.layer_norm is not None or self.adaptive is not None

    @no_autograph
    def apply(self, gradients: Sequence[tf.Tensor], norm: tf.Tensor, weights: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The float32 gradients of the mean loss, bounded; `norm` is their global norm, `weights` what they change."""
        if self.global_norm is not None:
            shrink = _shrink(norm, tf.constant(self.global_norm, tf.float32))
            return [gradient * shrink for gradient in gradients]
        if self.value is not None:
            return [tf.clip_by_value(gradient, -self.value, self.value) for gradient in gradients]
        if self.layer_norm is not None:
            bound = tf.constant(self.layer_norm, tf.float32)
            return [gradient * _shrink(tf.norm(gradient), bound) for gradient in gradients]
        if self.adaptive is not None:
            norms = [tf.maximum(_unit_norm(weight), _SMALLEST_WEIGHT_NORM) for weight in weights]
            pairs = zip(gradients, norms, strict=True)
            return [gradient * _shrink(_unit_norm(gradient), self.adaptive * norm) for gradient, norm in pairs]
        return list(gradients)


def _shrink(norm: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
    """min(1, bound / norm), and 1 for a norm of 0."""
    return tf.where(norm > bound, tf.math.divide_no_nan(bound, norm), 1.0)


def _unit_norm(tensor: tf.Tensor) -> tf.Tensor:
    """The norm of each output unit's weights (the last axis is the unit), broadcastable; of a vector, of all of it."""
    axes = list(range(tensor.shape.rank - 1)) if tensor.shape.rank > 1 else None
    return tf.sqrt(tf.reduce_sum(tf.square(tensor), axis=axes, keepdims=True))

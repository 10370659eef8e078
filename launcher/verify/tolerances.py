"""How far two topologies may drift apart, and why that far."""

from __future__ import annotations

import dataclasses

import gin

from launcher.errors import UsageError


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerances:
    """Largest deviations from one replica that still count as the same training.

    Attributes:
      loss: mean loss of each step, relative.
      gradient_norm: global norm of each step's gradient, relative.
      weights: final weights and their moving averages, absolute.
      slots: final optimizer slots, relative to the largest value that any slot of the same kind has.
      moving_statistics: final moving statistics, relative to the largest of their variable where that exceeds 1.
    """

    loss: float = 1e-5
    gradient_norm: float = 1e-3
    weights: float = 1e-4
    slots: float = 1e-3
    moving_statistics: float = 1e-4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) >= 0:
                raise UsageError(f"Tolerances.{field.name} = {getattr(self, field.name)}: must be 0 or more")


def for_policy(policy: str) -> Tolerances:
    """The tolerances of one of `launcher.precision.POLICIES`."""
    return {"float32": Tolerances()}.get(
        policy, Tolerances(loss=1e-1, gradient_norm=1.0, weights=1e-1, slots=1.0, moving_statistics=1e-1)
    )

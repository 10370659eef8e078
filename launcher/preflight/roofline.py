"""The roofline of a step, its least time: what its arithmetic, memory traffic and reductions each need by themselves.

The roofline model of Williams et al. 2009 (CACM 52(4)) with a third roof for what connects the devices. Each bound
takes the hardware at its stated best and lets the others cost nothing, so a measured step is slower than the longest.
"""

from __future__ import annotations

import dataclasses

from launcher.preflight.costs import Costs
from launcher.preflight.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bounds of one step from below, in seconds.

    Attributes:
      compute_seconds: matrix arithmetic at the device's peak for its dtypes.
      hbm_seconds: memory traffic at the device's bandwidth.
      wire_seconds: collectives over what connects the devices.
      bound_by: what the step waits for: "compute", or what the devices' memory or their connection is called.
      cost_model_seconds: no bound, but the compiler's own estimate; 0 when it tells none.
      examples_per_second, tokens_per_second: bounds from above for all devices; None for tasks without tokens.
      hours: of the whole run, training alone.
      mfu: bound from above on model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311), the share of the
        16-bit peak that the step's own matrix arithmetic can reach; computing twice (rematerialisation) counts as well.
    """

    compute_seconds: float
    hbm_seconds: float
    wire_seconds: float
    bound_by: str
    cost_model_seconds: float
    examples_per_second: float
    tokens_per_second: float | None
    hours: float
    mfu: float

    @property
    def step_seconds(self) -> float:
        return max(self.compute_seconds, self.hbm_seconds, self.wire_seconds)


def estimate(
    costs: Costs, where: Target, *, global_batch_size: int, tokens_per_example: float | None, steps: int
) -> Roofline:
    """The roofline of a step.

    Args:
      costs: of one device.
      where: the devices.
      global_batch_size: examples of a step.
      tokens_per_example: None for tasks without tokens.
      steps: of the whole run.
    """
    bounds = {
        "compute": where.compute_seconds(costs),
        where.memory_name: where.memory_seconds(costs),
        where.wire_name: sum(where.wire_seconds(one) for one in costs.collectives),
    }
    bound_by = max(bounds, key=lambda name: bounds[name])
    longest = bounds[bound_by]
    rate = global_batch_size / longest if longest else float("inf")
    told = where.cost_model(costs)
    compute, hbm, wire = bounds.values()
    return Roofline(
        compute_seconds=compute,
        hbm_seconds=hbm,
        wire_seconds=wire,
        bound_by=bound_by,
        cost_model_seconds=told[0] if told else 0.0,
        examples_per_second=rate,
        tokens_per_second=None if tokens_per_example is None else rate * tokens_per_example,
        hours=steps * longest / 3600,
        mfu=costs.flops / (where.peak_flops * longest) if longest else 0.0,
    )

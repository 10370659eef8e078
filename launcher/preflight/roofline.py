"""The roofline of a step, its least time: what its arithmetic, memory traffic and reductions each need by themselves.

The roofline model of Williams et al. 2009 (CACM 52(4)) with a third roof for the network between chips. Each bound
takes the hardware at its stated best and lets the others cost nothing, so a measured step is slower than the longest.
"""

from __future__ import annotations

import dataclasses

from launcher.preflight.costs import Collective, Costs
from launcher.preflight.slices import Slice

# How often the bytes of a collective cross a chip's links at least, for n chips times (n - 1) / n: a sum over all is
# scattered and then gathered (Patarasuk and Yuan 2009).
_CROSSINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bounds of one step from below, in seconds.

    Attributes:
      compute_seconds: matrix arithmetic at the chip's peak.
      hbm_seconds: memory traffic at the chip's bandwidth.
      ici_seconds: collectives over the links of the chip that has the fewest.
      cost_model_seconds: no bound, but the compiler's own estimate: its cycles for each operation, one after another,
        at the clock that the peak implies; 0 when it tells none.
      examples_per_second, tokens_per_second: bounds from above for the whole slice; None for tasks without tokens.
      hours: of the whole run, training alone.
      mfu: bound from above on model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311), the share of the peak
        that the step's own matrix arithmetic can reach; computing twice (rematerialisation) counts as well here.
    """

    compute_seconds: float
    hbm_seconds: float
    ici_seconds: float
    cost_model_seconds: float
    examples_per_second: float
    tokens_per_second: float | None
    hours: float
    mfu: float

    @property
    def step_seconds(self) -> float:
        return max(self.compute_seconds, self.hbm_seconds, self.ici_seconds)

    @property
    def bound_by(self) -> str:
        """What the step waits for: "compute", "HBM" or "ICI"."""
        bounds = {"compute": self.compute_seconds, "HBM": self.hbm_seconds, "ICI": self.ici_seconds}
        return max(bounds, key=lambda name: bounds[name])


def estimate(
    costs: Costs, where: Slice, *, global_batch_size: int, tokens_per_example: float | None, steps: int
) -> Roofline:
    """The roofline of a step on a slice.

    Args:
      costs: of one device.
      where: the slice.
      global_batch_size: examples of a step.
      tokens_per_example: None for tasks without tokens.
      steps: of the whole run.
    """
    compute = costs.flops / where.chip.device_peak_flops
    hbm = costs.hbm_bytes / where.chip.device_hbm_bandwidth
    ici = sum(ici_seconds(one, where) for one in costs.collectives)
    longest = max(compute, hbm, ici)
    rate = global_batch_size / longest if longest else float("inf")
    return Roofline(
        compute_seconds=compute,
        hbm_seconds=hbm,
        ici_seconds=ici,
        cost_model_seconds=costs.cycles / where.chip.clock,
        examples_per_second=rate,
        tokens_per_second=None if tokens_per_example is None else rate * tokens_per_example,
        hours=steps * longest / 3600,
        mfu=compute / longest if longest else 0.0,
    )


def ici_seconds(collective: Collective, where: Slice) -> float:
    """Seconds that one collective needs at least, all its turns together.

    All cores of a chip are taken to add up on the chip first.
    """
    chips = where.num_chips
    if chips == 1 or not where.links:
        return 0.0
    crossings = _CROSSINGS.get(collective.kind, 1) * (chips - 1) / chips
    return collective.times * collective.bytes * crossings / (where.links * where.chip.link_bandwidth.value)

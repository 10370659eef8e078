"""The time of a step: the roofline, which is its least, and where the compiler has a cost model, that one's estimate.

The roofline model of Williams et al. 2009 (CACM 52(4)) with a third roof for what connects the devices. Each bound
takes the hardware at its stated best and lets the others cost nothing, so a measured step is slower than the longest.
The estimate knows what the roofline does not: work of the vector unit, and operations that wait for each other.
"""

import dataclasses
from collections.abc import Mapping

from launcher.preflight.compiled.costs import Costs, Operation
from launcher.preflight.targets import Target

VECTOR_UNIT = "vector unit"
"""Bound of operations that fill neither the memory's bandwidth nor the matrix unit."""

# Of 1,024 exponentials on the vector unit: what libtpu 0.0.52 reckons with for those of a softmax on a v5e.
_EXPONENTIAL_CYCLES = 14
_FILLED = 0.5  # share of an operation's time that it needs at least at the peak of what it fills


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Time of one step, in seconds, and what follows from it.

    Attributes:
      compute_seconds: matrix arithmetic at the device's peak for its dtypes, a bound from below.
      hbm_seconds: memory traffic at the device's bandwidth, a bound from below.
      wire_seconds: collectives over what connects the devices, a bound from below.
      estimated: seconds by what they go to, the bounds' names and `VECTOR_UNIT`: the compiler's cost model, operations
        one after another, those without an estimate at their bound, and the collectives that nothing is done beside,
        with their latency. Empty where there is no cost model.
      bound_by: the longest of the bounds: "compute", or what the devices' memory or their connection is called.
      examples_per_second, tokens_per_second: for all devices; None for tasks without tokens.
      hours: of the whole run, training alone.
      mfu: model FLOPs utilisation (Chowdhery et al. 2022, arXiv 2204.02311): the share of the 16-bit peak that what the
        model needs is, nothing that is computed again.
      hfu: hardware FLOPs utilisation, of all that is computed.
    """

    compute_seconds: float
    hbm_seconds: float
    wire_seconds: float
    estimated: Mapping[str, float]
    bound_by: str
    examples_per_second: float
    tokens_per_second: float | None
    hours: float
    mfu: float
    hfu: float

    @property
    def step_seconds(self) -> float:
        """The least."""
        return max(self.compute_seconds, self.hbm_seconds, self.wire_seconds)

    @property
    def estimated_seconds(self) -> float | None:
        """By the cost model, and no less than the least; None without one. Rates, hours and MFU are of this."""
        return max(self.step_seconds, sum(self.estimated.values())) if self.estimated else None

    @property
    def most_for(self) -> str:
        """Part that most of the estimate goes to; without one, the bound."""
        if not self.estimated or self.step_seconds >= sum(self.estimated.values()):
            return self.bound_by
        return max(self.estimated, key=lambda name: self.estimated[name])


def estimate(
    costs: Costs,
    where: Target,
    *,
    global_batch_size: int,
    tokens_per_example: float | None,
    steps: int,
    model_flops: float | None = None,
) -> Roofline:
    """The roofline of a step.

    Args:
      costs: of one device.
      tokens_per_example: None for tasks without tokens.
      steps: of the whole run.
      model_flops: what the model needs of one device; None where that is not known, and all is taken to be needed.
    """
    bounds = {
        "compute": where.compute_seconds(costs),
        where.memory_name: where.memory_seconds(costs),
        where.link_name: sum(where.link_seconds(collective) for collective in costs.collectives),
    }
    estimated = _estimated(costs, where)
    bound_by = max(bounds, key=lambda name: bounds[name])
    seconds = max(bounds[bound_by], sum(estimated.values()))
    rate = global_batch_size / seconds if seconds else float("inf")
    # A place of an image's border that no kernel's weight meets is in the model's count alone.
    needed = costs.flops if model_flops is None else min(model_flops, costs.flops)
    peak = where.peak_flops * seconds
    compute, hbm, wire = bounds.values()
    return Roofline(
        compute_seconds=compute,
        hbm_seconds=hbm,
        wire_seconds=wire,
        estimated=estimated,
        bound_by=bound_by,
        examples_per_second=rate,
        tokens_per_second=None if tokens_per_example is None else rate * tokens_per_example,
        hours=steps * seconds / 3600,
        mfu=needed / peak if peak else 0.0,
        hfu=costs.flops / peak if peak else 0.0,
    )


def _estimated(costs: Costs, where: Target) -> dict[str, float]:
    if not costs.operations or where.clock is None:
        return {}
    found = dict.fromkeys(("compute", where.memory_name, VECTOR_UNIT, where.link_name), 0.0)
    for one in costs.operations:
        seconds, name = of_operation(one, where)
        found[name] += seconds
    waiting = [one for one in costs.collectives if one.waits]
    found[where.link_name] = sum(where.link_seconds(one) + where.latency_seconds(one) for one in waiting)
    return found


def of_operation(operation: Operation, where: Target) -> tuple[float, str]:
    """Seconds that an operation takes in the cost model, without an estimate at least; and what it fills."""
    roofs = {"compute": operation.flops / where.peak_flops, where.memory_name: where.memory_seconds(operation)}
    if operation.cycles is None and where.clock is not None:
        roofs[VECTOR_UNIT] = operation.exponentials * _EXPONENTIAL_CYCLES / 1024 / where.clock
    name = max(roofs, key=lambda name: roofs[name])
    if operation.cycles is None or where.clock is None:
        return roofs[name], name
    seconds = operation.cycles / where.clock
    return seconds, name if roofs[name] >= _FILLED * seconds else VECTOR_UNIT

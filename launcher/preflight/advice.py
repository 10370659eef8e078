"""What could be better about a step that compiles: read off the optimised program, no run needed."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.machine.strategy import recommended_policy
from launcher.preflight.costs import Collective, Costs
from launcher.preflight.hbm import Buffer, HbmUse
from launcher.preflight.hlo import OpSource
from launcher.preflight.roofline import Roofline
from launcher.preflight.targets import Target
from launcher.reporting.units import bytes_text, milliseconds
from launcher.step_program.op_source import short_name

# Below these shares, advice would be noise.
_WORTH_OF_COMPUTE = 0.02
_WORTH_OF_MEMORY = 0.02
_WORTH_OF_TIME = 0.02
_SHOWN = 3


def advise(
    costs: Costs, hbm: HbmUse, where: Target, *, policy: str, bounds: Roofline, shared_gradient_bytes: int = 0
) -> tuple[str, ...]:
    """A sentence for each thing that costs something.

    Args:
      costs, hbm, bounds: of one device.
      where: the devices.
      policy: Keras dtype policy of the run.
      shared_gradient_bytes: of all gradients, as they are reduced, under `train.shard_optimizer`; else 0.
    """
    return (
        *_reductions(costs, bounds, where),
        *_sharing(costs, where, bounds, shared_gradient_bytes),
        *where.advice(costs, hbm),
        *_float32(costs, hbm, policy, where),
        *_recomputed(costs),
        *_host_transfers(costs),
        *_dynamic_shapes(costs),
        *_unknown_loops(costs),
        *_kernels(costs),
    )


def _reductions(costs: Costs, bounds: Roofline, where: Target) -> Iterator[str]:
    if bounds.bound_by == where.wire_name == bounds.most_for:
        yield (
            f"the step waits for its reductions ({milliseconds(bounds.wire_seconds)} against "
            f"{milliseconds(max(bounds.compute_seconds, bounds.hbm_seconds))}): fewer devices or more examples a "
            "replica would use them better"
        )
    small = [one for one in costs.collectives if where.wire_seconds(one) < where.latency_seconds(one)]
    latency = sum(where.latency_seconds(one) for one in small)
    if latency > _WORTH_OF_TIME * (bounds.estimated_seconds or bounds.step_seconds):
        count = sum(one.times for one in small)
        names = list(dict.fromkeys(short_name(str(one.source)) or one.kind for one in small))
        yield (
            f"{count} small collectives wait for the {where.wire_name} about {milliseconds(latency / count)} each, "
            f"whatever their size, {milliseconds(latency)} a step: {', '.join(names[:_SHOWN])}; statistics that each "
            "replica takes for itself need none, and one sum of them all waits once"
        )


def _sharing(costs: Costs, where: Target, bounds: Roofline, gradient_bytes: int) -> Iterator[str]:
    """What `train.shard_optimizer` costs on the wire: nothing is told of its gain, which is in the memory needed."""
    if not gradient_bytes or where.num_replicas == 1:
        return
    whole = Collective(kind="all-reduce", bytes=gradient_bytes, times=1, dtypes=(), source=OpSource())
    alone = where.wire_seconds(whole)
    scattered = sum(one.bytes * one.times for one in costs.collectives if one.kind == "reduce-scatter")
    sums = (
        "each replica gets the sum of its part alone"
        if 2 * scattered > gradient_bytes
        else "every replica gets the whole sum, as without it, for the compiler makes no reduce-scatter here"
    )
    gathers = (
        "TPUStrategy puts the weights together by a sum over all replicas, twice the traffic of an all-gather"
        if where.accelerator == "tpu"
        else "an all-gather puts the weights together"
    )
    yield (
        f"train.shard_optimizer = True takes at least {milliseconds(bounds.wire_seconds)} of the {where.wire_name} a "
        f"step, {bounds.wire_seconds / alone:.1f} times the {milliseconds(alone)} of reducing "
        f"{bytes_text(gradient_bytes)} of gradients without it: {sums}, and {gathers}"
    )


def _label(buffer: Buffer) -> str:
    return short_name(buffer.where) or buffer.name


def _float32(costs: Costs, hbm: HbmUse, policy: str, where: Target) -> Iterator[str]:
    wide = [one for one in costs.matrix_ops if one.dtypes == ("f32", "f32")]
    flops = sum(one.flops for one in wide)
    half, why = recommended_policy(where.strategy())
    if policy == "float32":
        yield (
            f"the policy is float32: train.precision = {half!r} halves the memory of activations "
            f"({why.removeprefix('auto: ')})"
        )
        return
    if costs.flops and flops > _WORTH_OF_COMPUTE * costs.flops:
        names = list(dict.fromkeys(short_name(one.source.op_name) or "a product" for one in wide))
        yield (
            f"{flops / costs.flops:.0%} of the arithmetic multiplies float32 under {policy}: "
            f"{', '.join(names[:_SHOWN])}; cast both operands to {policy.removeprefix('mixed_')}"
        )
    large = [
        buffer
        for buffer in hbm.buffers
        if buffer.kind == "temporary"
        and buffer.array is not None
        and buffer.array.dtype == "f32"
        and buffer.bytes > _WORTH_OF_MEMORY * hbm.available
    ]
    if large:
        parts = [f"{_label(buffer)} {buffer.array}, {bytes_text(buffer.bytes)}" for buffer in large[:_SHOWN]]
        yield f"float32 among the biggest temporaries, which 16 bits would halve: {'; '.join(parts)}"


def _recomputed(costs: Costs) -> Iterator[str]:
    if costs.recomputed:
        size = sum(shape.bytes for one in costs.recomputed for shape in one.shapes)
        names = list(dict.fromkeys(short_name(str(one.source)) or one.name for one in costs.recomputed))
        yield (
            f"the compiler computes {len(costs.recomputed)} results ({bytes_text(size)}) a second time instead of "
            f"keeping them, as memory is short: {', '.join(names[:_SHOWN])}"
        )


def _host_transfers(costs: Costs) -> Iterator[str]:
    if costs.host_transfers:
        names = list(dict.fromkeys(str(one.source) or one.name for one in costs.host_transfers))
        yield f"the step waits for the host {len(costs.host_transfers)} times: {', '.join(names[:_SHOWN])}"


def _dynamic_shapes(costs: Costs) -> Iterator[str]:
    if costs.dynamic:
        names = list(dict.fromkeys(str(one.source) or one.name for one in costs.dynamic))
        yield (
            f"{len(costs.dynamic)} results have shapes that are not known before the step runs: "
            f"{', '.join(names[:_SHOWN])}; their largest size is computed and stored each time"
        )


def _unknown_loops(costs: Costs) -> Iterator[str]:
    if costs.unknown_loops:
        yield (
            f"the compiler does not know how often {costs.unknown_loops} loops turn; they are counted as one turn in "
            "the estimates"
        )


def _kernels(costs: Costs) -> Iterator[str]:
    if costs.kernels:
        yield (
            f"{costs.kernels} operations are kernels of their own (Pallas): their arithmetic is in no estimate, and "
            "they are taken to read all that they are given"
        )

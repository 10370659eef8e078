"""What could be better about a step that compiles: read off the optimised program, no run needed."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.costs import Costs, MatrixOp
from launcher.preflight.hbm import Buffer, HbmUse
from launcher.preflight.roofline import Roofline
from launcher.preflight.slices import Slice
from launcher.reporting.units import bytes_text, milliseconds
from launcher.step_program.op_source import short_name

# Below these shares, advice would be noise.
_WORTH_OF_COMPUTE = 0.02
_WORTH_OF_MEMORY = 0.02
_SHOWN = 3


def advise(costs: Costs, hbm: HbmUse, where: Slice, *, policy: str, bounds: Roofline) -> tuple[str, ...]:
    """A sentence for each thing that costs something.

    Args:
      costs, hbm, bounds: of one device.
      where: the slice.
      policy: Keras dtype policy of the run.
    """
    return (
        *_reductions(bounds),
        *_padded_products(costs, where),
        *_padded_buffers(hbm),
        *_float32(costs, hbm, policy),
        *_host_transfers(costs),
        *_dynamic_shapes(costs),
        *_unknown_loops(costs),
        *_kernels(costs),
    )


def _reductions(bounds: Roofline) -> Iterator[str]:
    if bounds.bound_by == "ICI":
        yield (
            f"the step waits for its reductions ({milliseconds(bounds.ici_seconds)} against "
            f"{milliseconds(max(bounds.compute_seconds, bounds.hbm_seconds))}): fewer chips or more examples a replica "
            "would use them better"
        )


def _padded_products(costs: Costs, where: Slice) -> Iterator[str]:
    mxu, peak = where.chip.mxu, where.chip.device_peak_flops
    wasted = sorted(((one.padded_flops(mxu) - one.flops, one) for one in costs.matrix_ops), key=lambda pair: -pair[0])
    total = sum(waste for waste, _ in wasted)
    if not costs.flops or total < _WORTH_OF_COMPUTE * costs.flops:
        return
    listed = _grouped([(waste, one) for waste, one in wasted if waste > 0])
    parts = []
    for waste, one, count in listed[:_SHOWN]:
        name = short_name(one.source.op_name) or "a product"
        size = f"{one.contracted:,} summed, {one.columns:,} columns, {one.rows:,} rows"
        size += f", {count} of them" if count > 1 else ""
        parts.append(f"{name} ({size}): up to {milliseconds(waste / peak)}")
    yield (
        f"products that do not fill the {mxu}x{mxu} matrix unit and 8 rows cost up to {milliseconds(total / peak)} a "
        f"step beside {milliseconds(costs.flops / peak)} of arithmetic; multiples of {mxu} cost nothing. Most of it: "
        + "; ".join(parts)
    )


def _grouped(wasted: list[tuple[float, MatrixOp]]) -> list[tuple[float, MatrixOp, int]]:
    """Products of one kind of layer and one size together, the most expensive first."""
    groups: dict[tuple[str, int, int], tuple[float, MatrixOp, int]] = {}
    for waste, one in wasted:
        key = (short_name(one.source.op_name), one.contracted, one.columns)
        before = groups.get(key, (0.0, one, 0))
        groups[key] = (before[0] + waste, before[1], before[2] + 1)
    return sorted(groups.values(), key=lambda group: -group[0])


def _padded_buffers(hbm: HbmUse) -> Iterator[str]:
    padded = sorted((buffer for buffer in hbm.buffers if buffer.padding), key=lambda buffer: -buffer.padding)
    worth = [buffer for buffer in padded if buffer.padding > _WORTH_OF_MEMORY * hbm.available]
    if worth:
        parts = [
            f"{_label(buffer)} {buffer.array} takes {bytes_text(buffer.bytes)} for {bytes_text(buffer.array.bytes)}"
            for buffer in worth[:_SHOWN]
            if buffer.array
        ]
        yield f"padding to tiles of 8x128 takes HBM: {'; '.join(parts)}"


def _label(buffer: Buffer) -> str:
    return short_name(buffer.where) or buffer.name


def _float32(costs: Costs, hbm: HbmUse, policy: str) -> Iterator[str]:
    wide = [one for one in costs.matrix_ops if one.dtypes == ("f32", "f32")]
    flops = sum(one.flops for one in wide)
    if policy == "float32":
        yield (
            "the policy is float32: train.precision = 'mixed_bfloat16' halves the memory of activations and needs no "
            "loss scale on a TPU"
        )
        return
    if costs.flops and flops > _WORTH_OF_COMPUTE * costs.flops:
        names = list(dict.fromkeys(short_name(one.source.op_name) or "a product" for one in wide))
        yield (
            f"{flops / costs.flops:.0%} of the arithmetic multiplies float32 under {policy}: "
            f"{', '.join(names[:_SHOWN])}; cast both operands to bfloat16"
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
        yield f"float32 among the biggest temporaries, which bfloat16 would halve: {'; '.join(parts)}"


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

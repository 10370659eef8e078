"""What a step loses to the tiles in which a TPU multiplies and keeps its arrays: read off the optimised program."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.machine.accelerators import Chip
from launcher.preflight.costs import Costs, MatrixOp
from launcher.preflight.hbm import HbmUse
from launcher.reporting.units import bytes_text, milliseconds
from launcher.step_program.op_source import short_name

# Below these shares, advice would be noise.
_WORTH_OF_COMPUTE = 0.02
_WORTH_OF_MEMORY = 0.02
_SHOWN = 3


def advise(costs: Costs, hbm: HbmUse, chip: Chip) -> Iterator[str]:
    """A sentence for each thing that padding costs."""
    yield from _padded_products(costs, chip)
    yield from _padded_buffers(hbm)


def _padded_products(costs: Costs, chip: Chip) -> Iterator[str]:
    mxu, peak = chip.mxu, chip.device_peak_flops
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
            f"{short_name(buffer.where) or buffer.name} {buffer.array} takes {bytes_text(buffer.bytes)} for "
            f"{bytes_text(buffer.array.bytes)}"
            for buffer in worth[:_SHOWN]
            if buffer.array
        ]
        yield f"padding to tiles of 8x128 takes HBM: {'; '.join(parts)}"

"""Advice: what could be better about a step that compiles, read off the optimised program; no run needed."""

from collections.abc import Iterable, Iterator

from launcher.machine.accelerators import Card, Chip
from launcher.machine.strategy import recommended_policy
from launcher.preflight.compiled import gpu_program
from launcher.preflight.compiled.costs import Collective, Costs, MatrixOp, summed
from launcher.preflight.compiled.hbm import Buffer, HbmUse
from launcher.preflight.compiled.hlo import Instruction
from launcher.preflight.roofline import Roofline
from launcher.preflight.targets import Target
from launcher.reporting.units import bytes_text, first, milliseconds
from launcher.step.op_source import short_name

_WORTH = 0.02  # share of the arithmetic, the memory or the time below which advice would be noise
_SHOWN = 3


def advise(
    costs: Costs,
    hbm: HbmUse,
    where: Target,
    *,
    policy: str,
    bounds: Roofline,
) -> tuple[str, ...]:
    """A sentence for each thing that costs something.

    Args:
      costs, hbm, bounds: of one device.
      policy: Keras dtype policy of the run.
    """
    return (
        *_reductions(costs, bounds, where),
        *where.advice(costs, hbm),
        *_float32(costs, hbm, policy, where),
        *_of_program(costs),
    )


def _reductions(costs: Costs, bounds: Roofline, where: Target) -> Iterator[str]:
    if bounds.bound_by == where.link_name == bounds.most_for:
        yield (
            f"the step waits for its reductions ({milliseconds(bounds.wire_seconds)} against "
            f"{milliseconds(max(bounds.compute_seconds, bounds.hbm_seconds))}): fewer devices or more examples a "
            "replica would use them better"
        )
    small = [
        collective
        for collective in costs.collectives
        if where.link_seconds(collective) < where.latency_seconds(collective)
    ]
    latency = sum(where.latency_seconds(collective) for collective in small)
    if latency > _WORTH * (bounds.estimated_seconds or bounds.step_seconds):
        count = sum(collective.times for collective in small)
        names = _first(_label(collective, collective.kind) for collective in small)
        yield (
            f"{count} small collectives wait for the {where.link_name} about {milliseconds(latency / count)} each, "
            f"whatever their size, {milliseconds(latency)} a step: {names}; statistics that each "
            "replica takes for itself need none, and one sum of them all waits once"
        )


def _float32(costs: Costs, hbm: HbmUse, policy: str, where: Target) -> Iterator[str]:
    half, why = recommended_policy(where.strategy())
    if policy == "float32":
        yield f"train.precision = {half!r} halves the memory of float32 activations ({why.removeprefix('auto: ')})"
        return
    wide = [product for product in costs.matrix_ops if product.dtypes == ("f32", "f32")]
    if costs.flops and _flops(wide) > _WORTH * costs.flops:
        yield (
            f"{_flops(wide) / costs.flops:.0%} of the arithmetic multiplies float32 under {policy}: "
            f"{_first(map(_label, wide))}; cast both operands to {policy.removeprefix('mixed_')}"
        )
    large = [
        f"{_name(buffer)} {buffer.array}, {bytes_text(buffer.bytes)}"
        for buffer in hbm.buffers
        if buffer.kind == "temporary"
        and buffer.array is not None
        and buffer.array.dtype == "f32"
        and buffer.bytes > _WORTH * hbm.available
    ]
    if large:
        yield f"float32 among the biggest temporaries, which 16 bits would halve: {'; '.join(large[:_SHOWN])}"


def _of_program(costs: Costs) -> Iterator[str]:
    if costs.recomputed:
        size = sum(shape.bytes for instruction in costs.recomputed for shape in instruction.shapes)
        names = _first(_label(instruction, instruction.name) for instruction in costs.recomputed)
        yield (
            f"the compiler computes {len(costs.recomputed)} results ({bytes_text(size)}) a second time instead of "
            f"keeping them, as memory is short: {names}"
        )
    if costs.host_transfers:
        names = _first(str(instruction.source) or instruction.name for instruction in costs.host_transfers)
        yield f"the step waits for the host {len(costs.host_transfers)} times: {names}"
    if costs.dynamic:
        names = _first(str(instruction.source) or instruction.name for instruction in costs.dynamic)
        yield (
            f"{len(costs.dynamic)} results have shapes that are not known before the step runs: {names}; their largest "
            "size is computed and stored each time"
        )
    if costs.unknown_loops:
        yield f"how often {costs.unknown_loops} loops turn is not known: the estimates count one turn each"
    if costs.kernels:
        yield (
            f"{costs.kernels} operations are kernels of their own (Pallas): their arithmetic is in no estimate, and "
            "they are taken to read all that they are given"
        )
    if costs.attention_kernels:
        yield (
            f"{costs.attention_kernels} operations are kernels of attention: of their time only a floor is known, what "
            "their products, exponentials and one reading of their operands need, and none of it was measured"
        )
    if costs.library_kernels:
        yield (
            f"the workspace of {costs.library_kernels} kernels of cuDNN is not known, nor in the memory needed: cuDNN "
            "chooses it on the GPU"
        )


def padding(costs: Costs, hbm: HbmUse, chip: Chip) -> Iterator[str]:
    """Losses of a step to the tiles in which a TPU multiplies and keeps its arrays, a sentence each."""
    mxu, peak = chip.mxu, chip.device_peak_flops
    wasted = summed(
        (
            (_label(product), product.contracted, product.columns, product.rows),
            1,
            product.padded_flops(mxu) - product.flops,
        )
        for product in costs.matrix_ops
    )
    total = sum(waste for _, _, waste in wasted)
    if costs.flops and total >= _WORTH * costs.flops:
        parts = []
        for (label, contracted, columns, rows), count, waste in wasted[:_SHOWN]:
            size = f"{contracted:,} summed, {columns:,} columns, {rows:,} rows"
            size += f", {count:.0f} of them" if count > 1 else ""
            parts.append(f"{label} ({size}): up to {milliseconds(waste / peak)}")
        yield (
            f"products that do not fill the {mxu}x{mxu} matrix unit and 8 rows cost up to {milliseconds(total / peak)} "
            f"a step beside {milliseconds(costs.flops / peak)} of arithmetic; multiples of {mxu} cost nothing. Most of "
            f"it: {'; '.join(parts)}"
        )
    padded = [buffer for buffer in hbm.buffers if buffer.array and buffer.padding > _WORTH * hbm.available]
    if padded:
        parts = [
            f"{_name(buffer)} {buffer.array} takes {bytes_text(buffer.bytes)} for {bytes_text(buffer.array.bytes)}"
            for buffer in sorted(padded, key=lambda buffer: -buffer.padding)[:_SHOWN]
            if buffer.array
        ]
        yield f"padding to tiles of 8x128 takes HBM: {'; '.join(parts)}"


def tensor_cores(costs: Costs, card: Card) -> Iterator[str]:
    """Reasons that keep products from the full speed of Tensor Cores, a sentence each, with the layers it is of.

    That sizes of 16-bit products should be multiples of 8, and of TF32 products of 4, is NVIDIA's rule for all of its
    libraries (Deep Learning Performance Guide: 16 bytes); recent versions of them use Tensor Cores for others as well,
    at a lower rate.
    """
    reasons: dict[str, list[MatrixOp]] = {}
    odd = []
    for product in costs.matrix_ops:
        why = gpu_program.unit_of(product, card)[2]
        if why:
            reasons.setdefault(why, []).append(product)
        elif _odd(product):
            odd.append(product)
    for why, ops in sorted(reasons.items(), key=lambda item: -_flops(item[1])):
        if _flops(ops) > _WORTH * costs.flops:
            yield (
                f"{_flops(ops) / costs.flops:.0%} of the arithmetic runs on {gpu_program.CUDA_CORES} ({why}), "
                f"{milliseconds(_flops(ops) / card.float32_flops.value)} at least instead of "
                f"{milliseconds(_flops(ops) / card.tensor_flops.value)} on {gpu_program.TENSOR_CORES} in 16 bits: "
                f"{_first(label for label, _ in summed((_label(product), product.flops) for product in ops))}"
            )
    if _flops(odd) > _WORTH * costs.flops:
        sized = (
            (f"{_label(product)} ({', '.join(map(str, dict.fromkeys(_odd(product))))})", product.flops)
            for product in odd
        )
        layers = _first(label for label, _ in summed(sized))
        yield (
            f"{_flops(odd) / costs.flops:.0%} of the arithmetic has sizes that are no multiples of 8 (float32: of 4), "
            f"which keeps the libraries from their best kernels: {layers}"
        )


def _odd(product: MatrixOp) -> list[int]:
    unit = 8 if gpu_program.is_16_bit(product) else 4
    return [size for size in product.sizes if size % unit]


def _flops(ops: Iterable[MatrixOp]) -> float:
    return sum(product.flops for product in ops)


def _first(names: Iterable[str]) -> str:
    return first(list(dict.fromkeys(names)))


def _label(one: MatrixOp | Collective | Instruction, otherwise: str = "a product") -> str:
    return short_name(one.source.op_name) or otherwise


def _name(buffer: Buffer) -> str:
    return short_name(buffer.where) or buffer.name

"""What of a step's arithmetic runs on a GPU's Tensor Cores, what does not and why: read off the program.

That sizes of 16-bit products should be multiples of 8, and of TF32 products of 4, is NVIDIA's rule for all of its
libraries (Deep Learning Performance Guide: 16 bytes); recent versions of them use Tensor Cores for others as well, at a
lower rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from launcher.machine.accelerators import Card
from launcher.preflight.costs import Costs, MatrixOp
from launcher.reporting.units import milliseconds
from launcher.step_program.op_source import short_name

_WORTH = 0.02
_SHOWN = 3
_HALF = {"f16": "float16", "bf16": "bfloat16"}
_TENSOR_CORES, _TF32, _CUDA_CORES = "Tensor Cores", "Tensor Cores in TF32", "CUDA cores"


def engine(one: MatrixOp, card: Card) -> tuple[str, float, str]:
    """What multiplies, its FLOP/s at most, and why it is not the Tensor Cores; "" where it is."""
    kinds = set(one.dtypes)
    if kinds <= {"f16"} or (kinds <= set(_HALF) and card.has_bfloat16):
        return _TENSOR_CORES, card.tensor_flops.value, ""
    if kinds <= set(_HALF):
        return _CUDA_CORES, card.float32_flops.value, f"{card.name} has no bfloat16 in its Tensor Cores"
    if not kinds <= {"f32", *_HALF}:
        return _CUDA_CORES, card.float32_flops.value, f"dtype {one.dtypes[0]}"
    if card.tf32_flops is None:
        return _CUDA_CORES, card.float32_flops.value, f"float32, and {card.name} has no TF32"
    if one.full_precision:
        return _CUDA_CORES, card.float32_flops.value, "float32 in full precision, as gpu.tf32 = False asks for"
    return _TF32, card.tf32_flops.value, ""


def shares(costs: Costs, card: Card) -> list[tuple[str, float, float]]:
    """(engine and dtype, FLOPs, seconds at its peak) of a step's arithmetic, the most FLOPs first."""
    found: dict[str, tuple[float, float]] = {}
    for one in costs.matrix_ops:
        name, rate, _ = engine(one, card)
        key = f"{'x'.join(dict.fromkeys(one.dtypes))} on {name}"
        flops, seconds = found.get(key, (0.0, 0.0))
        found[key] = flops + one.flops, seconds + one.flops / rate
    return sorted(((name, *pair) for name, pair in found.items()), key=lambda share: -share[1])


def advise(costs: Costs, card: Card) -> Iterator[str]:
    """A sentence for each thing that keeps products from the full speed of Tensor Cores, with the layers it is of."""
    reasons: dict[str, list[MatrixOp]] = {}
    for one in costs.matrix_ops:
        if why := engine(one, card)[2]:
            reasons.setdefault(why, []).append(one)
    for why, ops in sorted(reasons.items(), key=lambda item: -_flops(item[1])):
        if _flops(ops) > _WORTH * costs.flops:
            yield (
                f"{_flops(ops) / costs.flops:.0%} of the arithmetic runs on {_CUDA_CORES} ({why}), "
                f"{milliseconds(_flops(ops) / card.float32_flops.value)} at least instead of "
                f"{milliseconds(_flops(ops) / card.tensor_flops.value)} on {_TENSOR_CORES} in 16 bits: {_layers(ops)}"
            )
    odd = [one for one in costs.matrix_ops if engine(one, card)[0] != _CUDA_CORES and _odd(one)]
    if _flops(odd) > _WORTH * costs.flops:
        yield (
            f"{_flops(odd) / costs.flops:.0%} of the arithmetic has sizes that are no multiples of 8 (float32: of 4), "
            f"which keeps the libraries from their best kernels: {_layers(odd, sizes=True)}"
        )


def _odd(one: MatrixOp) -> list[int]:
    unit = 8 if set(one.dtypes) <= set(_HALF) else 4
    return [size for size in one.sizes if size % unit]


def _flops(ops: Iterable[MatrixOp]) -> float:
    return sum(one.flops for one in ops)


def _layers(ops: Iterable[MatrixOp], *, sizes: bool = False) -> str:
    """The layers that most of the arithmetic is in."""
    found: dict[str, float] = {}
    for one in ops:
        label = short_name(one.source.op_name) or "a product"
        label += f" ({', '.join(map(str, dict.fromkeys(_odd(one))))})" if sizes else ""
        found[label] = found.get(label, 0.0) + one.flops
    listed = sorted(found, key=lambda label: -found[label])
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return f"{', '.join(listed[:_SHOWN])}{more}"

"""Costs of a step on a GPU, from its program before and after parts of it become calls of libraries, and its kernels.

Such calls cannot be counted any more, so arithmetic is counted before, and memory traffic, collectives and kernels in
the program that runs.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable

from launcher.machine.accelerators import Card
from launcher.preflight.compiled import costs as costs_lib
from launcher.preflight.compiled.costs import FREE, Costs, MatrixOp
from launcher.preflight.compiled.hlo import Instruction, Module

# Leans on XLA: names and configurations of GPU instructions show kernels, and what is computed again. Noticed by
# tests/preflight/test_gpu_preflight.py. Then: read a dump of the new version; the tables of kernels and the advice need
# them.
_REMATERIALISED = re.compile(r"\.remat\d*\b")
_FUSION_KIND = re.compile(r'"kind":"(__[\w$]+)"')
_BY_8_BITS = "__cublas$lt$matmul$f8"
_LIBRARIES = {
    "__cudnn$conv": "cuDNN convolution",
    "__cudnn": "cuDNN",
    _BY_8_BITS: "cuBLAS in 8 bits",
    "__cublas": "cuBLAS",
}
TENSOR_CORES, CUDA_CORES = "Tensor Cores", "CUDA cores"
_HALF = {"f16", "bf16"}
_FLOAT8 = {"f8e4m3fn", "f8e5m2"}


def count(optimised: Module, before_libraries: Module | None) -> Costs:
    """Costs of a program; for arguments, see `targets.Target.count`."""
    after = costs_lib.count(optimised)
    before = costs_lib.count(before_libraries) if before_libraries is not None else after
    return dataclasses.replace(
        after,
        flops=before.flops,
        matrix_ops=_with_8_bits(before.matrix_ops, optimised),
        unknown_loops=before.unknown_loops,
        kernels_by_kind=_kernels(optimised),
        recomputed=tuple(
            instruction
            for instruction, _ in costs_lib.executed(optimised.entry)
            if _REMATERIALISED.search(instruction.name) and instruction.opcode not in FREE
        ),
    )


def _with_8_bits(products: Iterable[MatrixOp], optimised: Module) -> tuple[MatrixOp, ...]:
    """The products with the dtypes of those that cuBLAS multiplies in 8 bits, known by size and place in the model."""
    calls: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for instruction, times in costs_lib.executed(optimised.entry):
        if instruction.target == _BY_8_BITS:
            one, other = (operand.shapes[0] for operand in instruction.operands[:2])
            flops = 2 * times * math.sqrt(one.elements * other.elements * instruction.shapes[0].elements)
            calls.setdefault((instruction.source.op_name, round(flops)), []).append((one.dtype, other.dtype))
    found = []
    for product in products:
        same = calls.get((product.source.op_name, round(product.flops)))
        found.append(dataclasses.replace(product, dtypes=same.pop()) if same else product)
    return tuple(found)


def _kernels(optimised: Module) -> dict[str, int]:
    """Numbers of kernels of each kind that a step starts, the most frequent first."""
    counts: Counter[str] = Counter()
    for instruction, times in costs_lib.executed(optimised.entry):
        if instruction.opcode not in FREE and not instruction.opcode.endswith(("-done", "-update")):
            counts[_kind(instruction)] += times
    return dict(counts.most_common())


def _kind(instruction: Instruction) -> str:
    if instruction.opcode == "custom-call":
        target = instruction.target
        return next((kind for start, kind in _LIBRARIES.items() if target.startswith(start)), target)
    if instruction.opcode != "fusion":
        return instruction.opcode.removesuffix("-start")
    kind = _FUSION_KIND.search(instruction.config)
    if kind is None:
        return "other fusion"
    if "gemm" in kind[1]:
        return "Triton GEMM"
    return "Triton fusion" if "triton" in kind[1] else kind[1].strip("_").replace("_", " ")


def is_16_bit(product: MatrixOp) -> bool:
    """Whether both operands have 16 bits."""
    return set(product.dtypes) <= _HALF


def unit_of(product: MatrixOp, card: Card) -> tuple[str, float, str]:
    """The unit that multiplies, its FLOP/s at most, and why it is not the Tensor Cores; "" where it is."""
    kinds = set(product.dtypes)
    if kinds <= {"f16"} or (is_16_bit(product) and card.has_bfloat16):
        return TENSOR_CORES, card.tensor_flops.value, ""
    if kinds <= _FLOAT8:
        return TENSOR_CORES, card.float8_flops, ""
    if is_16_bit(product):
        why = f"{card.name} has no bfloat16 in its Tensor Cores"
    elif not kinds <= {"f32", *_HALF}:
        why = f"dtype {product.dtypes[0]}"
    elif card.tf32_flops is None:
        why = f"float32, and {card.name} has no TF32"
    elif product.full_precision:
        why = "float32 in full precision, as gpu.tf32 = False asks for"
    else:
        return f"{TENSOR_CORES} in TF32", card.tf32_flops.value, ""
    return CUDA_CORES, card.float32_flops.value, why


def seconds_in_16_bits(costs: Costs, card: Card) -> float | None:
    """The least time of the arithmetic if no product had operands of 8 bits; None where none has."""
    found = [set(product.dtypes) <= _FLOAT8 for product in costs.matrix_ops]
    if not any(found):
        return None
    wide = [
        dataclasses.replace(product, dtypes=("bf16", "bf16")) if narrow else product
        for narrow, product in zip(found, costs.matrix_ops, strict=True)
    ]
    return sum(seconds for _, seconds, _ in shares(dataclasses.replace(costs, matrix_ops=tuple(wide)), card))


def shares(costs: Costs, card: Card) -> list[tuple[str, float, float]]:
    """(unit and dtype, seconds at its peak, FLOPs) of a step's arithmetic, the most FLOPs first."""

    def share(product: MatrixOp) -> tuple[str, float, float]:
        name, rate, _ = unit_of(product, card)
        return f"{'x'.join(dict.fromkeys(product.dtypes))} on {name}", product.flops / rate, product.flops

    return costs_lib.summed(map(share, costs.matrix_ops))

"""What a step costs on a GPU, from its program before and after parts of it become calls of libraries, and its kernels.

Such calls cannot be counted any more, so arithmetic is counted before, and memory traffic, collectives and kernels in
the program that runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from launcher.machine.accelerators import Card
from launcher.preflight.compiled import costs as costs_lib
from launcher.preflight.compiled.costs import FREE, Costs, MatrixOp
from launcher.preflight.compiled.hlo import Instruction, Module

# Leans on XLA: names and configurations of GPU instructions show kernels, and what is computed again. Noticed by
# tests/preflight/test_gpu_preflight.py. Then: read a dump of the new version; the tables of kernels and the advice need
# them.
_REMATERIALISED = re.compile(r"\.remat\d*\b")
_FUSION_KIND = re.compile(r'"kind":"(__[\w$]+)"')
_LIBRARIES = {"__cudnn$conv": "cuDNN convolution", "__cudnn": "cuDNN", "__cublas": "cuBLAS"}
TENSOR_CORES, CUDA_CORES = "Tensor Cores", "CUDA cores"
_HALF = {"f16", "bf16"}


def count(optimised: Module, before_libraries: Module | None) -> Costs:
    """Costs of a program; for arguments, see `targets.Target.count`."""
    after = costs_lib.count(optimised)
    before = costs_lib.count(before_libraries) if before_libraries is not None else after
    return dataclasses.replace(
        after,
        flops=before.flops,
        matrix_ops=before.matrix_ops,
        unknown_loops=before.unknown_loops,
        kernels_by_kind=_kernels(optimised),
        recomputed=tuple(
            instruction
            for instruction, _ in costs_lib.executed(optimised.entry)
            if _REMATERIALISED.search(instruction.name) and instruction.opcode not in FREE
        ),
    )


def _kernels(optimised: Module) -> dict[str, int]:
    """How many kernels of each kind a step starts, the most frequent first."""
    counts: Counter[str] = Counter()
    for instruction, times in costs_lib.executed(optimised.entry):
        if instruction.opcode not in FREE and not instruction.opcode.endswith(("-done", "-update")):
            counts[_kind(instruction)] += times
    return dict(counts.most_common())


def _kind(one: Instruction) -> str:
    if one.opcode == "custom-call":
        return next((kind for start, kind in _LIBRARIES.items() if one.target.startswith(start)), one.target)
    if one.opcode != "fusion":
        return one.opcode.removesuffix("-start")
    kind = _FUSION_KIND.search(one.config)
    if kind is None:
        return "other fusion"
    if "gemm" in kind[1]:
        return "Triton GEMM"
    return "Triton fusion" if "triton" in kind[1] else kind[1].strip("_").replace("_", " ")


def is_16_bit(one: MatrixOp) -> bool:
    """Whether both operands have 16 bits."""
    return set(one.dtypes) <= _HALF


def engine(one: MatrixOp, card: Card) -> tuple[str, float, str]:
    """What multiplies, its FLOP/s at most, and why it is not the Tensor Cores; "" where it is."""
    kinds = set(one.dtypes)
    if kinds <= {"f16"} or (is_16_bit(one) and card.has_bfloat16):
        return TENSOR_CORES, card.tensor_flops.value, ""
    if is_16_bit(one):
        why = f"{card.name} has no bfloat16 in its Tensor Cores"
    elif not kinds <= {"f32", *_HALF}:
        why = f"dtype {one.dtypes[0]}"
    elif card.tf32_flops is None:
        why = f"float32, and {card.name} has no TF32"
    elif one.full_precision:
        why = "float32 in full precision, as gpu.tf32 = False asks for"
    else:
        return f"{TENSOR_CORES} in TF32", card.tf32_flops.value, ""
    return CUDA_CORES, card.float32_flops.value, why


def shares(costs: Costs, card: Card) -> list[tuple[str, float, float]]:
    """(engine and dtype, FLOPs, seconds at its peak) of a step's arithmetic, the most FLOPs first."""
    found: dict[str, tuple[float, float]] = {}
    for one in costs.matrix_ops:
        name, rate, _ = engine(one, card)
        key = f"{'x'.join(dict.fromkeys(one.dtypes))} on {name}"
        flops, seconds = found.get(key, (0.0, 0.0))
        found[key] = flops + one.flops, seconds + one.flops / rate
    return sorted(((name, *pair) for name, pair in found.items()), key=lambda share: -share[1])

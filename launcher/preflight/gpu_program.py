"""What a step costs on a GPU, from its program before and after parts of it become calls of libraries, and its kernels.

Such calls cannot be counted any more, so arithmetic is counted before, and memory traffic, collectives and kernels in
the program that runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

from launcher.preflight import costs as costs_lib
from launcher.preflight.costs import Costs
from launcher.preflight.hlo import Instruction, Module

# Leans on XLA: names and configurations of GPU instructions show kernels, and what is computed again. Noticed by
# tests/preflight/test_gpu_preflight.py. Then: read a dump of the new version; the tables of kernels and the advice need
# them.
_REMATERIALISED = re.compile(r"\.remat\d*\b")
_FUSION_KIND = re.compile(r'"kind":"(__[\w$]+)"')
# Instructions that start no kernel.
_NO_KERNEL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "async-start", "async-update", "async-done", "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip
_LIBRARIES = {"__cudnn$conv": "cuDNN convolution", "__cudnn": "cuDNN", "__cublas": "cuBLAS"}


def count(optimised: Module, before_libraries: Module | None) -> Costs:
    """Costs of a program; for arguments, see `targets.Target.count`."""
    after = costs_lib.count(optimised)
    before = costs_lib.count(before_libraries) if before_libraries is not None else after
    return dataclasses.replace(
        after,
        flops=before.flops,
        matrix_ops=before.matrix_ops,
        unknown_loops=before.unknown_loops,
        kernels_by_kind=kernels(optimised),
        recomputed=tuple(
            one
            for computation, _ in costs_lib.executed(optimised)
            for one in computation.instructions.values()
            if _REMATERIALISED.search(one.name) and one.opcode not in _NO_KERNEL
        ),
    )


def kernels(optimised: Module) -> dict[str, int]:
    """How many kernels of each kind a step starts, the most frequent first."""
    found: Counter[str] = Counter()
    for computation, times in costs_lib.executed(optimised):
        for one in computation.instructions.values():
            if one.opcode not in _NO_KERNEL and not one.opcode.endswith(("-done", "-update")):
                found[_kind(one)] += times
    return dict(found.most_common())


def _kind(one: Instruction) -> str:
    if one.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', one.attributes)
        name = target[1] if target else "custom-call"
        return next((kind for start, kind in _LIBRARIES.items() if name.startswith(start)), name)
    if one.opcode != "fusion":
        return one.opcode.removesuffix("-start")
    kind = _FUSION_KIND.search(one.attributes)
    if kind is None:
        return "other fusion"
    if "gemm" in kind[1]:
        return "Triton GEMM"
    return "Triton fusion" if "triton" in kind[1] else kind[1].strip("_").replace("_", " ")

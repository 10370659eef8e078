"""Kernels of attention: what each computes, by its name and shapes, as the compiler sees nothing of what is inside.

Known are JAX's splash attention for TPUs, cuDNN's fused attention and the Pallas kernel for Triton. Of a causal one,
only what it cannot leave out is counted, and of none how it masks: a floor.
"""

import dataclasses
import re
from collections.abc import Sequence

from launcher.preflight.compiled.hlo import Array, Instruction

PALLAS = "tpu_custom_call"  # Pallas and Mosaic
_TRITON = "__gpu$xla.gpu.triton"
_CUDNN = "__cudnn$fmha"
_LIBRARIES = ("__cudnn", "__cublas")

# Leans on JAX and XLA: kernels of attention have these names, and queries and keys in front. Noticed by
# tests/preflight/test_kernels.py. Then: see a dump of the new version; until then nothing is known of their arithmetic.
_SPLASH = re.compile(r"\bsplash_m[hq]a_(fwd|dkv|dq)_")
_OF_TRITON = re.compile(r'\bname = "mha_(forward|backward)"')
_CAUSAL = re.compile(r'"mask_type": ?"CAUSAL"')
# Products of queries x keys x width: scores and outputs; or scores again and the gradients of weights, values, keys and
# queries, of which a part may stand in a kernel of its own and needs the first two as well.
_PRODUCTS = {"fwd": 2, "forward": 2, "dkv": 4, "dq": 3, "backward": 4 + 3}
_ALL_AT_ONCE = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionKernel:
    """One call of a kernel of attention."""

    flops: float  # of its matrix products
    exponentials: float  # of scores
    sizes: tuple[int, int, int]  # queries of all heads and rows, width of a head, keys of a row
    dtypes: tuple[str, str]  # of queries and keys
    is_library: bool  # cuDNN's, which takes memory of its own when it runs


def is_kernel(call: Instruction) -> bool:
    """Whether an instruction is a program of its own, in which the compiler sees nothing."""
    return call.target in (PALLAS, _TRITON) or call.target.startswith(_CUDNN)


def reads_all(call: Instruction) -> bool:
    """Whether a custom call is known to read all of its operands."""
    return call.target.startswith(_LIBRARIES) or attention(call) is not None


def attention(call: Instruction) -> AttentionKernel | None:
    """Arithmetic of a kernel of attention; None of anything else."""
    if not is_kernel(call):
        return None
    target = call.target
    is_library = target.startswith(_CUDNN)
    name = {PALLAS: _SPLASH.search(call.source.op_name), _TRITON: _OF_TRITON.search(call.config)}.get(target)
    operands = [operand.shapes[0] for operand in call.operands]
    arrays = [array for array in operands if array.dtype in ("bf16", "f16", "f32") and len(array.dims) > 2]
    if not (name or is_library) or len(arrays) < 3:
        return None
    query, key = arrays[:2]
    # [heads, length, width], with the batch in front where there is one; NVIDIA's have [batch, length, heads, width].
    keys, rows = key.dims[-2 if target == PALLAS else -3], query.elements // query.dims[-1]
    products = _PRODUCTS[name[1]] if name else _ALL_AT_ONCE if "Backward" in target else 2
    passes, share = 1, 0.5  # over the scores, and how many of them at least
    if target == PALLAS:
        share = _share_of_blocks(operands)
        # Gradients of the queries, too, for each block of keys.
        if any(len(shape.dims) > len(query.dims) for shape in call.shapes):
            products = _ALL_AT_ONCE
    elif is_library:
        share = share if _CAUSAL.search(call.config) else 1.0
    elif name and name[1] == "backward":
        passes = 2
    return AttentionKernel(
        flops=2.0 * products * share * rows * keys * query.dims[-1],
        exponentials=passes * share * rows * keys,
        sizes=(rows, query.dims[-1], keys),
        dtypes=(query.dtype, key.dtype),
        is_library=is_library,
    )


def _share_of_blocks(operands: Sequence[Array]) -> float:
    """Share of the blocks of scores that splash attention computes: with a causal mask, up to the diagonal.

    It is then given the places of the queries, beside the segments of queries and keys or nothing; and the blocks'
    numbers [heads, of queries, of keys] in front.
    """
    causal = sum(array.dtype == "s32" for array in operands) % 2 == 1
    blocks = min(operands[0].dims[-2:], default=1)
    return 0.5 * (1 + 1 / blocks) if causal else 1.0

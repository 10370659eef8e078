"""Forms that attention is computed in: the scores of all positions at once ("plain"), in blocks, or by a kernel."""

import dataclasses
from collections.abc import Callable
from typing import Any

from . import attention_kernel
from .blockwise_attention import Blocks

FORMS = ("auto", "plain", "blocks", "kernel")

# The length from which blocks are chosen, queries and keys alike. CPU: they are faster from about there on, and slower
# at 512. TPU, by the compiler: at 512 they need a fifth fewer cycles and half the memory. GPU, by the compiler: from
# there on the scores take more memory than the rest of a layer; blocks have 1.4 to 1.5 times the traffic at any length.
_FROM = {"cpu": 1024, "gpu": 2048, "tpu": 512}
# How far a kernel of a library is known.
_SEEN = {
    "gpu": "run on one H200, its losses not yet shown to be plain attention's",
    "tpu": "not yet seen to run on one",
}
# Longest block, and bytes of the scores of one. On a TPU, more than 32 MiB leave its vector memory; on a CPU, longer
# blocks gained nothing.
_LONGEST, _BYTES = {"cpu": 512, "gpu": 1024, "tpu": 1024}, {"cpu": 2**24, "gpu": 2**25, "tpu": 2**25}
_UNIT = 128  # what a block's length is a multiple of, unless it is the whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """The form in which an attention layer computes its outputs; all are equal up to rounding."""

    requested: str = "plain"  # or "blocks", "kernel", or "auto" for what suits the shapes
    accelerator: str = "cpu"  # or "gpu", or "tpu"
    proven: bool = False  # the kernel was seen to compute the same on this device
    compiling: Callable[[], bool] = bool  # tells while a model is called whether XLA compiles that

    def blocks(self, *, batch: Any, queries: Any, keys: Any, heads: int, causal: bool = False) -> Blocks | None:
        """The blocks for scores [batch, heads, queries, keys]; None for all at once.

        Blocks need shapes that are known when a graph is made: without them, as in an exported model, it is plain.
        """
        if self.requested == "plain" or not _known(batch, queries, keys):
            return None
        if self.requested != "blocks" and queries * keys < _FROM[self.accelerator] ** 2:
            return None
        longest, most = _LONGEST[self.accelerator], _BYTES[self.accelerator]
        while longest > _UNIT and 4 * heads * longest**2 > most:
            longest //= 2
        sizes = [_evenly(length, longest) for length in (queries, keys)]
        rows = max(1, most // (4 * heads * sizes[0] * sizes[1]))
        if self.accelerator == "tpu" and sizes == [queries, keys]:
            rows = batch  # XLA then drops the loop, which is faster; only the second computation is left
        rows = max(one for one in range(1, batch + 1) if batch % one == 0 and one <= rows)
        return Blocks(
            batch=batch, queries=queries, keys=keys, rows=rows, query_block=sizes[0], key_block=sizes[1], causal=causal
        )

    def wants_kernel(self, batch: Any, queries: Any, keys: Any) -> bool:
        """Whether a kernel is asked for, and such sizes are known; "auto" asks where one was seen to run."""
        return (self.requested == "kernel" or (self.requested == "auto" and self.proven)) and _known(
            batch, queries, keys
        )

    def keeps_axes(self) -> bool:
        """Whether products are written over the axes as they are, and the compiler is left to move them.

        A TPU's moves none then. A GPU's writes 7% more to memory so (lm_gpu.gin), and a CPU's kernels take longer.
        """
        return self.accelerator == "tpu" and self.compiling()

    def describe(self, *, batch: Any, queries: Any, keys: Any, heads: int) -> str:
        """The form chosen for scores [batch, heads, queries, keys], as a person reads it."""
        found = self.blocks(batch=batch, queries=queries, keys=keys, heads=heads)
        if found is None:
            return "plain"
        rows = "1 row" if found.rows == 1 else f"{found.rows} rows"
        return f"blocks of {found.query_block} x {found.key_block} tokens, {rows} at a time"

    def why(self, otherwise: str = "") -> str:
        """The reason for what is chosen; `otherwise` is what "auto" takes without a kernel, if not blocks."""
        name, least = self.accelerator.upper(), f"{_FROM[self.accelerator]:,}"
        otherwise = otherwise or f"blocks from {least} x {least} tokens"
        if self.requested == "kernel" and not self.proven:
            return f"train.attention; compiled for a {name}, {_SEEN[self.accelerator]}"
        if self.requested != "auto":
            return "train.attention"
        kernel = attention_kernel.KERNELS.get(self.accelerator)
        if self.proven:
            return f"auto: {kernel} wherever it fits, else {otherwise}"
        untried = f"; 'kernel' is {kernel}, {_SEEN[self.accelerator]}" if kernel else ""
        return f"auto: {otherwise} on a {name}{untried}"


def _known(*sizes: Any) -> bool:
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _evenly(length: int, longest: int) -> int:
    """The length of the fewest equal blocks, none longer than `longest`, rounded up."""
    count = -(-length // longest)
    return length if count == 1 else -(-length // (count * _UNIT)) * _UNIT

"""Compiled programs, and what is read off them: instructions, costs and memory."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """Outcome of compiling a program.

    Attributes:
      error: why it refuses the program, in its own words; None when it compiled.
      memory: bytes a device: "argument", "output", "alias" (outputs that take an argument's memory), "temp" and
        "generated_code"; empty when refused.
      cost: XLA's own count: "flops" and "bytes accessed" a device; empty when refused.
      hlo: the optimised program, XLA's HloProto, a character a byte; may be empty when refused.
      without_triton: why a GPU's program compiled only without Triton's matrix products; "" where it did with them.
      buffers: such a proto of where its buffers lie and when they live, where `hlo` does not have it.
      seconds: what the compilation took when it was done.
      cached: whether that was before this call.
      before_libraries: such a proto of the program before its convolutions and products became calls of libraries; may
        be empty.
    """

    error: str | None
    memory: Mapping[str, int]
    cost: Mapping[str, float]
    hlo: str
    seconds: float
    cached: bool
    before_libraries: str = ""
    buffers: str = ""
    without_triton: str = ""

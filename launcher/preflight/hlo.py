"""Optimised HLO, read from its text: computations, instructions, shapes with their layout on a TPU.

The syntax is XLA's own (xla/hlo/parser), of which only what `HloModule::ToString` prints is understood.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping

HBM = 0
"""Memory space that a layout without `S(n)` means."""
HOST = 5
"""Memory space of the host, XLA's Layout::kHostMemorySpace."""

_BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32,
    "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
_ARRAY = re.compile(r"([a-z]+[a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(r"(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_TILE = re.compile(r"\(([\d,*]+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One dense array.

    Attributes:
      dtype: HLO's name, such as "bf16".
      dims: logical dimensions.
      dynamic: whether a dimension is only an upper bound.
      minor_to_major: order of the dimensions in memory.
      tiles: tilings, the first one over the minor dimensions.
      space: memory space, 0 for HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    dynamic: bool = False
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = HBM

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without padding."""
        return -(-self.elements * _BITS.get(self.dtype, 32) // 8)

    @property
    def padded_bytes(self) -> int:
        """As it lies in memory: the first tile's dimensions are rounded up."""
        if not self.tiles or not self.dims:
            return self.bytes
        physical = [self.dims[axis] for axis in reversed(self.minor_to_major)]
        tile = self.tiles[0]
        for place, size in enumerate(reversed(tile), start=1):
            if place <= len(physical):
                physical[-place] = -(-physical[-place] // size) * size
        missing = math.prod(tile[: max(0, len(tile) - len(physical))])
        return -(-math.prod(physical) * missing * _BITS.get(self.dtype, 32) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class OpSource:
    """Where an instruction is from.

    Attributes:
      op_name: path of names that the framework gave, or "".
      line: "file:line" of the user's code, or "".
    """

    op_name: str = ""
    line: str = ""

    def __str__(self) -> str:
        return " at ".join(part for part in (self.op_name, self.line) if part)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      shapes: its result's arrays, more than one for a tuple.
      operands: names.
      called: names of computations, by what they are: "calls", "body", "condition", "to_apply" or "branches".
      attributes: everything behind the operands, as text.
    """

    name: str
    opcode: str
    shapes: tuple[Array, ...]
    operands: tuple[str, ...]
    called: Mapping[str, tuple[str, ...]]
    attributes: str
    source: OpSource
    is_root: bool

    @property
    def cycles(self) -> int:
        """Clock cycles that the TPU compiler's own cost model gives it; 0 where it says nothing."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match else 0

    @property
    def trip_count(self) -> int | None:
        """Turns of a loop, where the compiler says them."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(match[1]) if match else None

    def attribute(self, name: str) -> str:
        """Text of one attribute without braces, such as "window"; "" without it."""
        match = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))", self.attributes)
        return (match[1] or match[2] or "") if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: Mapping[str, Instruction]

    @functools.cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """Instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {
            int(one.operands[0]): one
            for one in self.instructions.values()
            if one.opcode == "parameter" and one.operands
        }

    @property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    computations: Mapping[str, Computation]
    entry: Computation


def parse(text: str, line_of: Callable[[str], str] = lambda op_name: "") -> Module:
    """Reads a module.

    Args:
      text: as XLA prints it.
      line_of: "file:line" of the user's code that an operation is from, by its name; "" where it is not known.

    Raises:
      ValueError: there is no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    line_of = functools.cache(line_of)
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if current is None:
            match = _COMPUTATION.match(line)
            if match:
                current = {}
                computations[match[2]] = Computation(match[2], current)
                entry = computations[match[2]] if match[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line, line_of)
            if instruction is not None:
                current[instruction.name] = instruction
    if entry is None:
        raise ValueError("the text has no ENTRY computation, so it is no HLO module")
    return Module(computations, entry)


def _instruction(line: str, line_of: Callable[[str], str]) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    rest = match[3]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else _array_end(rest)
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    inside, attributes = rest[opcode.end() : close], rest[close + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or tuple(
        part.strip() for part in inside.split(",") if part.strip()
    )
    called = {
        kind: tuple(name.strip().lstrip("%") for name in names.strip("{}").split(","))
        for kind, names in _CALLED.findall(attributes)
    }
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        shapes=arrays(rest[:end]),
        operands=operands,
        called=called,
        attributes=attributes,
        source=_source(attributes, line_of),
        is_root=bool(match[1]),
    )


def arrays(text: str) -> tuple[Array, ...]:
    """All arrays in a shape's text, those of nested tuples one after another."""
    return tuple(_array(match) for match in _ARRAY.finditer(text))


@functools.lru_cache(maxsize=8192)
def _array_of(dtype: str, dims: str, layout: str) -> Array:
    order, _, tiling = layout.partition(":")
    space = re.search(r"S\((\d+)\)", tiling)
    tiles = tiling[tiling.index("T") :] if "T(" in tiling else ""
    tiles = re.split(r"[A-Z]", tiles[1:])[0] if tiles else ""
    return Array(
        dtype=dtype,
        dims=tuple(int(dim.strip().lstrip("<=")) for dim in dims.split(",") if dim.strip()),
        dynamic="<" in dims,
        minor_to_major=tuple(int(axis) for axis in order.split(",") if axis.strip()),
        tiles=tuple(
            tuple(int(size) for size in tile.split(",") if size.strip().isdigit()) for tile in _TILE.findall(tiles)
        ),
        space=int(space[1]) if space else HBM,
    )


def _array(match: re.Match[str]) -> Array:
    return _array_of(match[1], match[2], match[3] or "")


def _array_end(text: str) -> int:
    match = _ARRAY.match(text)
    return match.end() if match else text.find(" ")


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text) - 1


def _source(attributes: str, line_of: Callable[[str], str]) -> OpSource:
    name = _OP_NAME.search(attributes)
    return OpSource(op_name=name[1], line=line_of(name[1])) if name else OpSource()

"""Optimised HLO, read from its text: computations, instructions, shapes with their layout on a TPU.

The syntax is XLA's own (xla/hlo/parser), of which only what `HloModule::ToString` prints is understood. It is read by
statements: what belongs together, whatever line breaks its strings, braces and comments have.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping

HBM = 0
"""Memory space that a layout without `S(n)` means."""
HOST = 5
"""Memory space of the host, XLA's Layout::kHostMemorySpace."""

_BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32,
    "u32": 32, "s64": 64, "u64": 64, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8, "f8e4m3fn": 8,
    "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
# What the compiler writes for an operation that its cost model does not know.
_UNKNOWN_CYCLES = 2**63 - 1
_QUOTED = r'"(?:[^"\\]|\\.)*"'  # a string, in which nothing else is looked for
_SKIPPED = rf"{_QUOTED}|/\*.*?\*/"
_TOKEN = re.compile(rf"{_SKIPPED}|[{{}}()\[\]\n]", re.DOTALL)
_ROUND = re.compile(rf"{_SKIPPED}|[()]", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_OPENS = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(\(.*)?\{\s*", re.DOTALL)
_STEPS = {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}
_ARRAY = re.compile(r"([a-z]+[a-z0-9]*)\[([\d\s,<=]*)\](?:\{([^}]*)\})?")
# Leans on XLA: the text of optimised HLO has this form. Noticed by tests/preflight/test_hlo.py. Then: read a dump of
# the new version; until then the report says what was not read, and gives no times.
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)", re.DOTALL)
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    rf"{_QUOTED}|\b(calls|body|condition|to_apply|branch_computations|called_computations|true_computation|"
    r"false_computation|select|scatter)=(\{[^}]*\}|%?[\w.\-]+)",
    re.DOTALL,
)
_OP_NAME = re.compile(rf"metadata=\{{(?:{_QUOTED}|[^\"}}])*?op_name=({_QUOTED})", re.DOTALL)
_TILE = re.compile(r"\(([\d,*]+)\)")
_SHOWN = 80


@dataclasses.dataclass(frozen=True)
class Array:
    """One dense array."""

    dtype: str  # HLO's name, such as "bf16"
    dims: tuple[int, ...]  # logical dimensions
    dynamic: bool = False  # whether a dimension is only an upper bound
    minor_to_major: tuple[int, ...] = ()  # order of the dimensions in memory
    tiles: tuple[tuple[int, ...], ...] = ()  # the first one over the minor dimensions
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
    """Where an instruction is from, as far as known."""

    op_name: str = ""  # path of names that the framework gave
    line: str = ""  # "file:line" of the user's code

    def __str__(self) -> str:
        return " at ".join(part for part in (self.op_name, self.line) if part)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Array, ...]  # its result's arrays, more than one for a tuple
    operands: tuple[str, ...]  # names
    called: Mapping[str, tuple[str, ...]]  # names of computations, by what they are, such as "calls" or "body"
    attributes: str  # everything behind the operands, as text
    source: OpSource
    is_root: bool

    @property
    def cycles(self) -> int | None:
        """Clock cycles that the TPU compiler's own cost model gives it; None where it says nothing or does not know."""
        # Leans on libtpu: its cost model leaves `estimated_cycles` in the HLO. Noticed by tests/preflight/test_hlo.py,
        # tests/preflight/test_costs.py. Then: without it there are lower bounds and no estimate.
        match = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(match[1]) if match and int(match[1]) < _UNKNOWN_CYCLES else None

    @property
    def trip_count(self) -> int | None:
        """Turns of a loop, where the compiler says them."""
        # Leans on XLA: a loop's turns are in `known_trip_count`. Noticed by tests/preflight/test_costs.py. Then:
        # without it they are worked out from the loop's condition, or the loop is reported as not read.
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(match[1]) if match else None

    def attribute(self, name: str) -> str:
        """Text of one attribute without braces or quotes, such as "window"; "" without it."""
        for match in _attribute_pattern(name).finditer(self.attributes):
            if match[1] is not None:
                return match[1].strip('{}"')
        return ""


@functools.cache
def _attribute_pattern(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{name}=(\{{[^}}]*\}}|{_QUOTED}|[^\s,]+)|{_QUOTED}", re.DOTALL)


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
    """A program.

    Attributes:
      computations: by name.
      entry: the one that the device begins with; has no instructions when the text has none.
      unread: what of the text was not understood, a phrase each. Unless it is empty, nothing can be counted in the
        module: what is missing may be most of it.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    unread: tuple[str, ...] = ()


def parse(text: str, line_of: Callable[[str], str] = lambda op_name: "") -> Module:
    """Reads a module, and says what of it could not be read.

    Args:
      text: as XLA prints it.
      line_of: "file:line" of the user's code that an operation is from, by its name; "" where it is not known.
    """
    computations: dict[str, Computation] = {}
    entry = None
    unread: list[str] = []
    line_of = functools.cache(line_of)
    current: dict[str, Instruction] = {}
    for kind, statement in _statements(text):
        if kind is _Kind.OPENS:
            match = _OPENS.match(statement)
            assert match is not None
            current = {}
            computations[match[2]] = Computation(match[2], current)
            entry = computations[match[2]] if match[1] else entry
        elif kind is _Kind.INSIDE:
            instruction = _instruction(statement, line_of)
            if instruction is None or instruction.name in current:
                unread.append(f"the line {_shown(statement)}")
            else:
                current[instruction.name] = instruction
        elif kind is _Kind.CUT_OFF:
            unread.append(f"the end, after {_shown(statement)}")
        elif kind is _Kind.OUTSIDE and _instruction(statement, line_of) is not None:
            unread.append(f"the line {_shown(statement)} outside of a computation")
    if entry is None:
        unread.append("where the program begins")
    unread += [what for computation in computations.values() for what in _missing(computation, computations)]
    return Module(computations, entry or Computation("", {}), tuple(unread))


class _Kind(enum.Enum):
    """What a statement of HLO's text is."""

    OPENS = enum.auto()  # the head of a computation
    CLOSES = enum.auto()  # the brace that ends it
    INSIDE = enum.auto()  # anything else in a computation
    OUTSIDE = enum.auto()
    CUT_OFF = enum.auto()  # the text ends before the statement, or the computation that it is in, does


def _statements(text: str) -> Iterator[tuple[_Kind, str]]:
    """Every statement of a module with its kind, in order; blank lines left out."""
    start = depth = 0
    inside = False
    for token in _TOKEN.finditer(text if text.endswith("\n") else f"{text}\n"):
        if token[0] != "\n":
            depth += _STEPS.get(token[0], 0)
            continue
        statement = text[start : token.start()]
        if not inside and depth == 1 and _OPENS.fullmatch(statement):
            kind, inside = _Kind.OPENS, True
        elif inside and depth == -1 and statement.lstrip().startswith("}"):
            kind, inside = _Kind.CLOSES, False
        elif depth > 0 or statement.rstrip().endswith((",", "=")):
            continue
        else:
            kind = _Kind.INSIDE if inside else _Kind.OUTSIDE
        start, depth = token.end(), 0
        if statement.strip():
            yield kind, statement
    if text[start:].strip() or inside:
        yield _Kind.CUT_OFF, text[start:]


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`; -1 without it."""
    depth = 0
    for token in _ROUND.finditer(text, start):
        depth += _STEPS.get(token[0], 0)
        if depth == 0:
            return token.start()
    return -1


def _without_comments(text: str) -> str:
    return _COMMENT.sub("", text) if "/*" in text else text


def _shown(statement: str) -> str:
    words = " ".join(statement.split())
    return repr(words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…")


def _missing(computation: Computation, computations: Mapping[str, Computation]) -> Iterator[str]:
    """What a computation needs and was not read."""
    if not any(one.is_root for one in computation.instructions.values()):
        yield f"the result of computation {computation.name}"
    for one in computation.instructions.values():
        for shape in one.shapes:
            if shape.dtype not in _BITS:
                yield f"the dtype {shape.dtype} of {one.name}"
        for called in itertools.chain.from_iterable(one.called.values()):
            if called not in computations:
                yield f"computation {called}, which {one.name} calls"
        if one.opcode not in ("constant", "parameter"):
            for operand in one.operands:
                if operand not in computation.instructions:
                    yield f"the operand {operand} of {one.name}"


def _instruction(statement: str, line_of: Callable[[str], str]) -> Instruction | None:
    match = _INSTRUCTION.fullmatch(statement)
    if match is None:
        return None
    rest = match[3]
    end = _shape_end(rest)
    opcode = _OPCODE.match(rest, end)
    shapes = _shapes(rest[:end])
    if opcode is None or shapes is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    if close < 0:
        return None
    inside, attributes = rest[opcode.end() : close], rest[close + 1 :]
    named = _OP_NAME.search(attributes)
    op_name = named[1][1:-1] if named else ""
    return Instruction(
        name=match[2],
        opcode=opcode[1],
        shapes=shapes,
        operands=_operands(_without_comments(inside)),
        called={
            kind: tuple(name.strip().lstrip("%") for name in names.strip("{}").split(",") if name.strip())
            for kind, names in _CALLED.findall(attributes)
            if kind
        },
        attributes=attributes,
        source=OpSource(op_name, line_of(op_name) if op_name else ""),
        is_root=bool(match[1]),
    )


def _operands(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"%([\w.\-]+)", text)) or tuple(part.strip() for part in text.split(",") if part.strip())


def _shape_end(text: str) -> int:
    if text.startswith("("):
        return _closing(text, 0) + 1
    match = _ARRAY.match(text)
    return match.end() if match else text.find(" ")


@functools.lru_cache(maxsize=8192)
def _shapes(text: str) -> tuple[Array, ...] | None:
    """Arrays of a whole shape; None when there is something else in it."""
    text = _without_comments(text)
    return None if re.sub(r"[\s(),]", "", _ARRAY.sub("", text)) else arrays(text)


def arrays(text: str) -> tuple[Array, ...]:
    """All arrays in a shape's text, those of nested tuples one after another."""
    return tuple(_array(dtype, dims, layout) for dtype, dims, layout in _ARRAY.findall(text))


@functools.lru_cache(maxsize=8192)
def _array(dtype: str, dims: str, layout: str) -> Array:
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

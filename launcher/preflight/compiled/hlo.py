"""Optimised HLO, read from XLA's own dump: computations, instructions, shapes with their layout, memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from launcher.preflight.compiled import hlo_protos

HBM = 0
"""Memory space of a layout that names none."""
HOST = 5
"""Memory space of the host, XLA's Layout::kHostMemorySpace."""

# What the compiler writes for an operation that its cost model does not know.
_UNKNOWN_CYCLES = 2**63 - 1


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
        return -(-self.elements * self._bits // 8)

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
        return -(-math.prod(physical) * missing * self._bits // 8)

    @property
    def _bits(self) -> int:
        width = re.search(r"\d+", self.dtype)
        return int(width[0]) if width else 8 * (self.dtype == "pred")

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
    """One operation of a computation."""

    name: str
    opcode: str
    shapes: tuple[Array, ...]  # its result's arrays, more than one for a tuple
    operands: tuple[str, ...]  # names
    called: tuple[str, ...]  # names of computations, of a loop its body before its condition
    proto: Any  # HloInstructionProto
    source: OpSource
    is_root: bool

    @property
    def target(self) -> str:
        """Of a custom call, what it calls; "" of anything else."""
        return self.proto.custom_call_target

    @property
    def config(self) -> str:
        """What the compiler noted for its own backend, most often as JSON."""
        return self.proto.backend_config.decode("utf-8", "replace")

    @property
    def cycles(self) -> int | None:
        """Clock cycles that the TPU compiler's own cost model gives it; None where it says nothing or does not know."""
        # Leans on libtpu: its cost model leaves `estimated_cycles` in the HLO. Noticed by tests/preflight/test_hlo.py,
        # tests/preflight/test_costs.py. Then: without it there are lower bounds and no estimate.
        match = re.search(r'"estimated_cycles":"(\d+)"', self.config)
        return int(match[1]) if match and int(match[1]) < _UNKNOWN_CYCLES else None

    @property
    def trip_count(self) -> int | None:
        """Turns of a loop, where the compiler says them."""
        # Leans on XLA: a loop's turns are in `known_trip_count`. Noticed by tests/preflight/test_costs.py. Then:
        # without it they are worked out from the loop's condition, or the loop is reported as not read.
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.config)
        return int(match[1]) if match else None


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
        return {one.proto.parameter_number: one for one in self.instructions.values() if one.opcode == "parameter"}

    @property
    def root(self) -> Instruction:
        return next(one for one in self.instructions.values() if one.is_root)


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: by name.
      entry: the one that the device begins with; has no instructions when nothing was read.
      unread: what was not understood, a phrase each. Unless it is empty, nothing can be counted in the module: what is
        missing may be most of it.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    unread: tuple[str, ...] = ()


def parse(dump: str, line_of: Callable[[str], str] = lambda op_name: "") -> Module:
    """Reads a module, and says what of it could not be read.

    Args:
      dump: XLA's HloProto, a character a byte.
      line_of: "file:line" of the user's code that an operation is from, by its name; "" where it is not known.
    """
    unread: list[str] = []
    module, line_of = proto_of(dump, unread).hlo_module, functools.cache(line_of)
    names = {one.id: one.name for one in module.computations}
    computations = {one.name: _computation(one, names, line_of, unread) for one in module.computations}
    entry = computations.get(module.entry_computation_name)
    unread += _never_run(computations, entry) if entry else ["where the program begins"]
    return Module(computations, entry or Computation("", {}), tuple(unread))


def proto_of(dump: str, unread: list[str]) -> Any:
    """A dump as HloProto; of one that is damaged as much as there is, which `unread` is told."""
    proto = hlo_protos.HloProto()
    try:
        proto.ParseFromString(dump.encode("latin-1"))
    except DecodeError as error:
        unread.append(f"the whole of it ({error})")
    return proto


def _computation(
    proto: Any, computations: Mapping[int, str], line_of: Callable[[str], str], unread: list[str]
) -> Computation:
    names = {one.id: one.name for one in proto.instructions}
    instructions: dict[str, Instruction] = {}
    for one in proto.instructions:
        shapes, op_name = arrays(one.shape), one.metadata.op_name
        missing = [f"the operand {each}" for each in one.operand_ids if each not in names]
        missing += [f"computation {each}" for each in one.called_computation_ids if each not in computations]
        missing += [f"the dtype {shape.dtype}" for shape in shapes if shape.dtype.isdecimal()]
        unread += [f"{what} of {one.name}" for what in (*missing, *hlo_protos.unknown(one))]
        instructions[one.name] = Instruction(
            name=one.name,
            opcode=one.opcode,
            shapes=shapes,
            operands=tuple(names.get(each, "") for each in one.operand_ids),
            called=tuple(computations.get(each, "") for each in one.called_computation_ids),
            proto=one,
            source=OpSource(op_name, line_of(op_name) if op_name else ""),
            is_root=one.id == proto.root_id,
        )
    if proto.root_id not in names or len(instructions) < len(names):
        unread.append(f"all of computation {proto.name}")
    return Computation(proto.name, instructions)


def _never_run(computations: Mapping[str, Computation], entry: Computation) -> Iterator[str]:
    """Computations that nothing reaches from where the program begins."""
    reached, waiting = set(), [entry]
    while waiting:
        found = waiting.pop()
        if found.name not in reached:
            reached.add(found.name)
            called = [name for one in found.instructions.values() for name in one.called]
            waiting += [computations[name] for name in called if name in computations]
    return (f"what runs computation {name}" for name in computations if name not in reached)


def arrays(shape: Any) -> tuple[Array, ...]:
    """All arrays in a ShapeProto, those of nested tuples one after another."""
    if shape.element_type == hlo_protos.TUPLE:
        return tuple(array for part in shape.tuple_shapes for array in arrays(part))
    layout = shape.layout
    return (
        Array(
            dtype=hlo_protos.dtype(shape.element_type),
            dims=tuple(shape.dimensions),
            dynamic=any(shape.is_dynamic_dimension),
            minor_to_major=tuple(layout.minor_to_major),
            # A negative size joins two dimensions.
            tiles=tuple(tuple(size for size in tile.dimensions if size > 0) for tile in layout.tiles),
            space=layout.memory_space,
        ),
    )

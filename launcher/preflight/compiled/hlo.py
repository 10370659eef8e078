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
    """Origin of an instruction, as far as known."""

    op_name: str = ""  # path of names that the framework gave
    line: str = ""  # "file:line" of the user's code

    def __str__(self) -> str:
        return " at ".join(part for part in (self.op_name, self.line) if part)


@dataclasses.dataclass(eq=False)
class Instruction:
    """One operation of a computation; equal to itself alone."""

    name: str
    opcode: str
    shapes: tuple[Array, ...]  # its result's arrays, more than one for a tuple
    proto: Any  # HloInstructionProto
    source: OpSource
    computation: Computation  # where it stands
    operands: list[Instruction] = dataclasses.field(default_factory=list)
    users: list[Instruction] = dataclasses.field(default_factory=list)  # once for each time that they take it
    called: list[Computation] = dataclasses.field(default_factory=list)  # of a loop its body before its condition

    @property
    def target(self) -> str:
        """Name of what a custom call calls; "" of anything else."""
        return self.proto.custom_call_target

    @property
    def config(self) -> str:
        """Notes of the compiler for its own backend, most often as JSON."""
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


@dataclasses.dataclass(eq=False)
class Computation:
    """A function of a program: instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root_id: int = 0

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """Its parameters by their numbers."""
        taken = (each for each in self.instructions.values() if each.opcode == "parameter")
        return {parameter.proto.parameter_number: parameter for parameter in taken}

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(each for each in self.instructions.values() if each.proto.id == self.root_id)


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

    @property
    def instructions(self) -> Iterator[Instruction]:
        """All of them, one computation after another."""
        return (each for computation in self.computations.values() for each in computation.instructions.values())


def parse(dump: str, line_of: Callable[[str], str] = lambda op_name: "") -> Module:
    """Reads a module, and says what of it could not be read.

    Args:
      dump: XLA's HloProto, a character a byte.
      line_of: "file:line" of the user's code that an operation is from, by its name; "" where it is not known.
    """
    unread: list[str] = []
    module, line_of = proto_of(dump, unread).hlo_module, functools.cache(line_of)
    by_id = {each.id: Computation(each.name) for each in module.computations}
    for each in module.computations:
        unread += _fill(by_id[each.id], each, by_id, line_of)
    computations = {each.name: each for each in by_id.values()}
    entry = computations.get(module.entry_computation_name)
    unread += [] if entry else ["where the program begins"]
    return Module(computations, entry or Computation(""), tuple(unread))


def proto_of(dump: str, unread: list[str]) -> Any:
    """A dump as HloProto; of one that is damaged as much as there is, which `unread` is told."""
    proto = hlo_protos.HloProto()
    try:
        proto.ParseFromString(dump.encode("latin-1"))
    except DecodeError as error:
        unread.append(f"the whole of it ({error})")
    return proto


def _fill(
    computation: Computation, proto: Any, computations: Mapping[int, Computation], line_of: Callable[[str], str]
) -> Iterator[str]:
    """Gives a computation its instructions; yields what of them was not understood."""
    made: dict[int, Instruction] = {}
    for each in proto.instructions:
        op_name = each.metadata.op_name
        source = OpSource(op_name, line_of(op_name) if op_name else "")
        made[each.id] = Instruction(each.name, each.opcode, arrays(each.shape), each, source, computation)
    for instruction in made.values():
        computation.instructions[instruction.name] = instruction
        for number in instruction.proto.operand_ids:
            if number not in made:
                yield f"the operand {number} of {instruction.name}"
                continue
            instruction.operands.append(made[number])
            made[number].users.append(instruction)
        for number in instruction.proto.called_computation_ids:
            if number not in computations:
                yield f"computation {number} of {instruction.name}"
                continue
            instruction.called.append(computations[number])
        dtypes = [f"the dtype {shape.dtype}" for shape in instruction.shapes if shape.dtype.isdecimal()]
        yield from (f"{what} of {instruction.name}" for what in (*dtypes, *hlo_protos.unknown(instruction.proto)))
    computation.root_id = proto.root_id
    if proto.root_id not in made or len(computation.instructions) < len(made):
        yield f"all of computation {proto.name}"


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

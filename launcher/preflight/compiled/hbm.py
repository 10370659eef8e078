"""Memory use of a device: totals as the compiler counts them, and the buffers that are live when most is needed."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from launcher.errors import UsageError
from launcher.machine.accelerators import Constant
from launcher.preflight.compiled import Compilation
from launcher.preflight.compiled.hlo import HBM, Array, Module, arrays, proto_of
from launcher.preflight.compiled.hlo_protos import unknown

# Leans on libtpu: a refusal for memory gives its figures in these words. Noticed by tests/preflight/test_preflight.py.
# Then: take the new words; until then it is a refusal without figures.
_OUT_OF_HBM = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_LISTED = 12  # buffers
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A piece of a device's memory."""

    kind: str  # "argument", "output" or "temporary"
    name: str  # of an argument or output, what it is; else of the instruction whose result it holds
    bytes: int  # as it lies in memory
    array: Array | None
    where: str  # framework's name and line of user code, as far as known

    @property
    def padding(self) -> int:
        """Bytes that are only there because of the layout."""
        return max(0, self.bytes - self.array.bytes) if self.array else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HbmUse:
    """Memory of one device.

    Attributes:
      available: bytes a program may use.
      needed: bytes in all; the compiler's own figure when it refused.
      reserved: what is needed beside the program, by what for; empty where the compiler reckons with it.
      arguments, outputs, temporaries, code: parts; outputs that take an argument's memory are not counted again. Zero
        where unknown.
      fits: whether the compiler took the program; where it would take any, whether all that is needed is there.
      buffers: the biggest, at the moment when most is needed.
      unread: what the dump says of memory that was not understood, a phrase each.
    """

    available: float
    needed: float
    arguments: int
    outputs: int
    temporaries: int
    code: int
    fits: bool
    buffers: tuple[Buffer, ...]
    reserved: Mapping[str, Constant] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()

    @property
    def excess(self) -> float:
        """Bytes that are missing; 0 when it fits."""
        return 0.0 if self.fits else max(0.0, self.needed - self.available)

    @property
    def least_parts(self) -> float:
        """In how many microbatches as many examples must at least be, for it to fit; infinite where none can be enough.

        No temporary shrinks more than in proportion, and neither variables nor the batch shrink at all.
        """
        if self.fits:
            return 1.0
        lasting = self.arguments + self.outputs
        return (self.needed - lasting) / (self.available - lasting) if lasting < self.available else math.inf


def refused_for_hbm(error: str | None) -> tuple[float, float] | None:
    """Bytes needed and bytes there, when the compiler says that a program does not fit in HBM."""
    match = _OUT_OF_HBM.search(error or "") or _USED.search(error or "")
    return (float(match[1]) * _UNITS[match[2]], float(match[3]) * _UNITS[match[4]]) if match else None


def account(
    compilation: Compilation,
    module: Module | None,
    *,
    argument_names: Sequence[str],
    result_names: Sequence[str],
    available: float,
    reserved: Callable[[float], Mapping[str, Constant]] = lambda needed: {},
) -> HbmUse:
    """Puts together what the compiler tells of memory.

    Args:
      compilation: one that compiled, or was refused for its need of HBM.
      module: its optimised HLO, for the names of buffers.
      argument_names, result_names: of the program, in order.
      available: bytes of HBM that a program may use, where the compiler does not say.
      reserved: what is needed beside a program of so many bytes, where the compiler does not reckon with it.
    """
    unread: list[str] = []
    dump = proto_of(compilation.buffers or compilation.hlo, unread)
    unread += unknown(dump.buffer_assignment)
    allocations = [each for each in dump.buffer_assignment.buffer_allocations if _is_ours(each)]
    buffers = _buffers(dump, allocations, module, argument_names, result_names)
    refusal, memory = refused_for_hbm(compilation.error), compilation.memory
    beside: Mapping[str, Constant] = {}
    if refusal is None and memory:
        arguments, outputs = memory["argument"], memory["output"] - memory["alias"]
        temporaries, code = memory["temp"], memory["generated_code"]
    else:
        arguments, outputs, temporaries = (
            sum(each.size for each in allocations if _kind(each) == kind)
            for kind in ("argument", "output", "temporary")
        )
        code = 0
    needed: float = arguments + outputs + temporaries + code
    fits = True
    if refusal is not None:
        (needed, available), fits = refusal, False
    elif not memory:
        if not allocations:
            raise UsageError("--mode=preflight: the compiler's dump does not say where the program's buffers lie")
        beside = reserved(needed)
        needed += sum(constant.value for constant in beside.values())
        fits = needed <= available
    return HbmUse(
        available=available,
        needed=needed,
        arguments=arguments,
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        fits=fits,
        buffers=tuple(sorted(buffers, key=lambda buffer: -buffer.bytes)[:_LISTED]),
        reserved=beside,
        unread=tuple(dict.fromkeys(unread)),
    )


class _Value(NamedTuple):
    """A LogicalBufferProto at its place in an allocation."""

    id: int
    name: str
    size: int
    offset: int
    array: Array | None  # its shape, if it is no tuple


def _is_ours(allocation: Any) -> bool:
    """Whether an allocation is in HBM and belongs to the whole program."""
    return allocation.color == HBM and not allocation.is_thread_local


def _kind(allocation: Any) -> str:
    if allocation.is_entry_computation_parameter:
        return "argument"
    return "output" if allocation.maybe_live_out else "temporary"


def _buffers(
    dump: Any,
    allocations: Sequence[Any],
    module: Module | None,
    argument_names: Sequence[str],
    result_names: Sequence[str],
) -> Iterator[Buffer]:
    sources = _sources(module) if module is not None else {}
    results = _results(module, result_names) if module is not None else {}
    traces = {each.buffer_allocation_index: each.events for each in dump.buffer_assignment.heap_simulator_traces}
    logical = {each.id: each.defined_at for each in dump.buffer_assignment.logical_buffers}
    defined = {each.id: each for computation in dump.hlo_module.computations for each in computation.instructions}
    for allocation in allocations:
        values = [_value(each, logical, defined) for each in allocation.assigned]
        kind, number = _kind(allocation), allocation.parameter_number
        if kind == "temporary":
            for value in _live_at_peak(values, traces.get(allocation.index, ())):
                where = sources.get(value.name, "")
                yield Buffer(kind=kind, name=value.name, bytes=value.size, array=value.array, where=where)
        elif values:
            first = max(values, key=lambda value: value.size)
            is_named = kind == "argument" and number < len(argument_names)
            name = argument_names[number] if is_named else results.get(first.name, first.name)
            yield Buffer(kind=kind, name=name, bytes=allocation.size, array=first.array, where="")


def _value(assigned: Any, logical: Mapping[int, Any], defined: Mapping[int, Any]) -> _Value:
    at = logical[assigned.logical_buffer_id]
    instruction = defined[at.instruction_id]
    shape = instruction.shape
    for index in at.shape_index:
        shape = shape.tuple_shapes[index]
    array = None if shape.tuple_shapes else next(iter(arrays(shape)), None)
    return _Value(assigned.logical_buffer_id, instruction.name, assigned.size, assigned.offset, array)


def _sources(module: Module) -> dict[str, str]:
    sources: dict[str, str] = {}
    for instruction in module.instructions:
        # A copy that the compiler made for itself is from where its operand is from.
        inherited = (sources[operand.name] for operand in instruction.operands if operand.name in sources)
        if source := str(instruction.source) or next(inherited, ""):
            sources[instruction.name] = source
    return sources


def _results(module: Module, names: Sequence[str]) -> dict[str, str]:
    """The program's results by the instructions that make them, where each has one."""
    roots = (each for each in module.entry.instructions.values() if each.proto.id == module.entry.root_id)
    made = [operand.name for root in roots for operand in root.operands]
    return dict(zip(made[::-1], names[::-1], strict=True)) if len(made) == len(names) else {}


def _live_at_peak(values: Sequence[_Value], events: Iterable[Any]) -> Iterable[_Value]:
    """Values that live together when they take most; one for each place in memory. All, when nothing is known."""
    known = {value.id: value for value in values}
    users: Counter[int] = Counter()
    shares: dict[int, int] = {}
    live: dict[int, _Value] = {}
    peak: dict[int, _Value] = {}
    most = total = 0
    for event in events:
        if event.kind == event.SHARE_WITH:
            shares[event.buffer_id] = shares.get(event.share_with_canonical_id, event.share_with_canonical_id)
        place = shares.get(event.buffer_id, event.buffer_id)
        users[place] += -1 if event.kind == event.FREE else 1
        if place not in live and users[place] > 0 and place in known:
            live[place] = known[place]
            total += live[place].size
        elif place in live and users[place] <= 0:
            total -= live.pop(place).size
        if total > most:
            most, peak = total, dict(live)
    at_peak: dict[int, _Value] = {}
    for value in peak.values() if peak else values:
        if value.size >= at_peak.get(value.offset, value).size:
            at_peak[value.offset] = value
    return at_peak.values()

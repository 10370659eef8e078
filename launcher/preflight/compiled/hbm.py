"""Memory use of a device: totals as the compiler counts them, and the buffers that are live when most is needed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from launcher.machine.accelerators import Constant
from launcher.preflight.compiled import Compilation
from launcher.preflight.compiled.hlo import Array, Module, arrays

# Leans on libtpu: a refusal for memory gives its figures in these words. Noticed by tests/preflight/test_preflight.py.
# Then: take the new words; until then it is a refusal without figures.
_OUT_OF_HBM = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_LISTED = 12  # buffers
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Leans on XLA: the dump of the buffer assignment has this form. Noticed by tests/preflight/test_preflight.py,
# tests/preflight/test_gpu_preflight.py. Then: change the patterns; the table of biggest buffers needs them, the verdict
# on TPUs does not.
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+),(?: color (\d+),)? (.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^ {4}(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


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
    allocations = _allocations(compilation.buffer_assignment)
    found = _buffers(allocations, compilation.live_ranges, module, argument_names, result_names)
    refusal, memory = refused_for_hbm(compilation.error), compilation.memory
    beside: Mapping[str, Constant] = {}
    if refusal is None and memory:
        arguments, outputs = memory["argument"], memory["output"] - memory["alias"]
        temporaries, code = memory["temp"], memory["generated_code"]
        needed: float = arguments + outputs + temporaries + code
        fits = True
    else:
        arguments, outputs, temporaries = (
            sum(one.size for one in allocations if one.kind == kind) for kind in ("argument", "output", "temporary")
        )
        code = 0
        if refusal is not None:
            (needed, available), fits = refusal, False
        else:
            needed = arguments + outputs + temporaries
            beside = reserved(needed)
            needed += sum(one.value for one in beside.values())
            fits = needed <= available
    return HbmUse(
        available=available,
        needed=needed,
        arguments=arguments,
        outputs=outputs,
        temporaries=temporaries,
        code=code,
        fits=fits,
        buffers=tuple(sorted(found, key=lambda one: -one.bytes)[:_LISTED]),
        reserved=beside,
    )


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    index: str
    size: int
    offset: int
    shape: str


@dataclasses.dataclass(frozen=True)
class _Allocation:
    size: int
    kind: str
    parameter: int | None
    values: list[_Value]


def _allocations(text: str) -> list[_Allocation]:
    """Those in HBM that belong to the whole program."""
    found: list[_Allocation] = []
    is_ours = False
    for line in text.splitlines():
        if header := _ALLOCATION.match(line):
            is_ours = header[3] in (None, "0") and "thread-local" not in header[4]
            if is_ours:
                parameter = re.search(r"parameter (\d+)", header[4])
                kind = "output" if "maybe-live-out" in header[4] else "temporary"
                kind = "argument" if "parameter " in header[4] else kind
                found.append(_Allocation(int(header[2]), kind, int(parameter[1]) if parameter else None, []))
        elif is_ours and (value := _VALUE.match(line)):
            found[-1].values.append(_Value(value[1], value[2] or "{}", int(value[3]), int(value[4]), value[5]))
    return found


def _buffers(
    allocations: Sequence[_Allocation],
    live_ranges: str,
    module: Module | None,
    argument_names: Sequence[str],
    result_names: Sequence[str],
) -> Iterator[Buffer]:
    sources = _sources(module) if module is not None else {}
    temporaries: list[_Value] = []
    for allocation in allocations:
        if allocation.kind == "temporary":
            temporaries += allocation.values
        elif allocation.values:
            first = max(allocation.values, key=lambda value: value.size)
            name = first.name
            if allocation.parameter is not None and allocation.parameter < len(argument_names):
                name = argument_names[allocation.parameter]
            elif module is not None:
                name = _result_name(module, name, result_names)
            yield Buffer(kind=allocation.kind, name=name, bytes=allocation.size, array=_array(first), where="")
    for value in _live_at_peak(temporaries, live_ranges):
        where = sources.get(value.name, "")
        yield Buffer(kind="temporary", name=value.name, bytes=value.size, array=_array(value), where=where)


def _array(value: _Value) -> Array | None:
    """The value's shape, if it is no tuple."""
    shapes = () if value.shape.startswith("(") else arrays(value.shape)
    return shapes[0] if shapes else None


def _sources(module: Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for computation in module.computations.values():
        for name, one in computation.instructions.items():
            # A copy that the compiler made for itself is from where its operand is from.
            source = str(one.source) or next((found[operand] for operand in one.operands if operand in found), "")
            if source:
                found[name] = source
    return found


def _result_name(module: Module, name: str, result_names: Sequence[str]) -> str:
    root = next((one for one in module.entry.instructions.values() if one.is_root), None)
    if root is not None and name in root.operands and len(root.operands) == len(result_names):
        return result_names[root.operands.index(name)]
    return name


def _live_at_peak(values: Sequence[_Value], live_ranges: str) -> list[_Value]:
    """Those that live together when they take most; one for each place in memory. All, when nothing is known."""
    matches = filter(None, map(_RANGE.match, live_ranges.splitlines()))
    ranges = {(match[1], match[2]): (int(match[3]), int(match[4])) for match in matches}
    known = [(value, ranges[value.name, value.index]) for value in values if (value.name, value.index) in ranges]
    if not known:
        return list(values)
    changes: Counter[int] = Counter()
    for value, (start, end) in known:
        changes[start] += value.size
        changes[end + 1] -= value.size
    times = sorted(changes)
    totals = list(itertools.accumulate(changes[time] for time in times))
    peak = times[totals.index(max(totals))]
    at_peak: dict[int, _Value] = {}
    for value, (start, end) in known:
        if start <= peak <= end and value.size >= at_peak.get(value.offset, value).size:
            at_peak[value.offset] = value
    return list(at_peak.values())

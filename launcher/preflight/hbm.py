"""Memory use of a device: totals as the compiler counts them, and the buffers that are live when most is needed."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

from launcher.machine.accelerators import Constant
from launcher.preflight.compilation import Compilation
from launcher.preflight.hlo import Array, Module, arrays

# Leans on libtpu: a refusal for memory gives its figures in these words. Noticed by tests/preflight/test_preflight.py.
# Then: take the new words; until then it is a refusal without figures.
_OUT_OF_HBM = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Leans on XLA: the dump of the buffer assignment has this form. Noticed by tests/preflight/test_preflight.py,
# tests/preflight/test_gpu_preflight.py. Then: change the patterns; the table of biggest buffers needs them, the verdict
# on TPUs does not.
_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+),(?: color (\d+),)? (.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^ {4}(\S+?)(\{[\d,]*\}):(\d+)-(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """A piece of a device's memory.

    Attributes:
      kind: "argument", "output" or "temporary".
      name: of an argument or output, what it is; else of the instruction whose result it holds.
      bytes: as it lies in memory.
      array: its shape.
      where: framework's name and line of user code, as far as known.
    """

    kind: str
    name: str
    bytes: int
    array: Array | None
    where: str

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
    for pattern in (_OUT_OF_HBM, _USED):
        match = pattern.search(error or "")
        if match:
            return float(match[1]) * _UNITS[match[2]], float(match[3]) * _UNITS[match[4]]
    return None


def account(
    compilation: Compilation,
    module: Module | None,
    *,
    argument_names: Sequence[str],
    result_names: Sequence[str],
    available: float,
    reserved: Callable[[float], Mapping[str, Constant]] = lambda needed: {},
    count: int = 12,
) -> HbmUse:
    """Puts together what the compiler tells of memory.

    Args:
      compilation: one that compiled, or was refused for its need of HBM.
      module: its optimised HLO, for the names of buffers.
      argument_names, result_names: of the program, in order.
      available: bytes of HBM that a program may use, where the compiler does not say.
      reserved: what is needed beside a program of so many bytes, where the compiler does not reckon with it.
      count: how many buffers to list.
    """
    found = _buffers(compilation, module, argument_names, result_names)
    listed = tuple(sorted(found, key=lambda one: -one.bytes)[:count])
    refusal = refused_for_hbm(compilation.error)
    if refusal is None and compilation.memory:
        memory = compilation.memory
        outputs = memory["output"] - memory["alias"]
        parts = (memory["argument"], outputs, memory["temp"], memory["generated_code"])
        return HbmUse(
            available=available,
            needed=sum(parts),
            arguments=parts[0],
            outputs=parts[1],
            temporaries=parts[2],
            code=parts[3],
            fits=True,
            buffers=listed,
        )
    totals = _totals(compilation.buffer_assignment)
    beside = {} if refusal else reserved(sum(totals.values()))
    needed = refusal[0] if refusal else sum(totals.values()) + sum(one.value for one in beside.values())
    return HbmUse(
        available=refusal[1] if refusal else available,
        needed=needed,
        arguments=totals["argument"],
        outputs=totals["output"],
        temporaries=totals["temporary"],
        code=0,
        fits=refusal is None and needed <= available,
        buffers=listed,
        reserved=beside,
    )


@dataclasses.dataclass(frozen=True)
class _Value:
    name: str
    index: str
    size: int
    offset: int
    shape: str


@dataclasses.dataclass
class _Allocation:
    size: int
    kind: str
    parameter: int | None
    values: list[_Value]


def _allocations(text: str) -> list[_Allocation]:
    """Those in HBM that belong to the whole program."""
    found: list[_Allocation] = []
    current: _Allocation | None = None
    for line in text.splitlines():
        header = _ALLOCATION.match(line)
        if header:
            current = None
            if header[3] in (None, "0") and "thread-local" not in header[4]:
                current = _Allocation(int(header[2]), _kind(header[4]), _parameter(header[4]), [])
                found.append(current)
            continue
        value = _VALUE.match(line)
        if value and current is not None:
            current.values.append(_Value(value[1], value[2] or "{}", int(value[3]), int(value[4]), value[5]))
    return found


def _kind(header: str) -> str:
    if "parameter " in header:
        return "argument"
    return "output" if "maybe-live-out" in header else "temporary"


def _parameter(header: str) -> int | None:
    match = re.search(r"parameter (\d+)", header)
    return int(match[1]) if match else None


def _totals(text: str) -> dict[str, int]:
    totals = {"argument": 0, "output": 0, "temporary": 0}
    for allocation in _allocations(text):
        totals[allocation.kind] += allocation.size
    return totals


def _buffers(
    compilation: Compilation, module: Module | None, argument_names: Sequence[str], result_names: Sequence[str]
) -> list[Buffer]:
    found = []
    sources = _sources(module)
    temporaries: list[_Value] = []
    for allocation in _allocations(compilation.buffer_assignment):
        if allocation.kind == "temporary":
            temporaries += allocation.values
            continue
        first = max(allocation.values, key=lambda value: value.size, default=None)
        if first is None:
            continue
        name = first.name
        if allocation.parameter is not None and allocation.parameter < len(argument_names):
            name = argument_names[allocation.parameter]
        elif module is not None:
            name = _result_name(module, first.name, result_names) or name
        found.append(_buffer(allocation.kind, name, first, allocation.size, sources))
    for value in _live_at_peak(temporaries, compilation.live_ranges):
        found.append(_buffer("temporary", value.name, value, value.size, sources))
    return found


def _buffer(kind: str, name: str, value: _Value, size: int, sources: dict[str, str]) -> Buffer:
    shapes = [] if value.shape.startswith("(") else arrays(value.shape)
    where = sources.get(value.name, "") if kind == "temporary" else ""
    return Buffer(kind=kind, name=name, bytes=size, array=shapes[0] if shapes else None, where=where)


def _sources(module: Module | None) -> dict[str, str]:
    if module is None:
        return {}
    found: dict[str, str] = {}
    for computation in module.computations.values():
        for name, one in computation.instructions.items():
            # A copy that the compiler made for itself is from where its operand is from.
            before = [found[operand] for operand in one.operands if operand in found]
            source = str(one.source) or (before[0] if before else "")
            if source:
                found[name] = source
    return found


def _result_name(module: Module, name: str, result_names: Sequence[str]) -> str | None:
    root = next((one for one in module.entry.instructions.values() if one.is_root), None)
    operands = root.operands if root else ()
    if name in operands and len(operands) == len(result_names):
        return result_names[operands.index(name)]
    return None


def _live_at_peak(values: Sequence[_Value], live_ranges: str) -> list[_Value]:
    """Those that live together when they take most; one for each place in memory. All, when nothing is known."""
    ranges = {
        (match[1], match[2]): (int(match[3]), int(match[4]))
        for match in (_RANGE.match(line) for line in live_ranges.splitlines())
        if match
    }
    known = [(value, ranges[value.name, value.index]) for value in values if (value.name, value.index) in ranges]
    if not known:
        return list(values)
    changes: dict[int, int] = {}
    for value, (start, end) in known:
        changes[start] = changes.get(start, 0) + value.size
        changes[end + 1] = changes.get(end + 1, 0) - value.size
    most, peak, total = -1, 0, 0
    for time in sorted(changes):
        total += changes[time]
        if total > most:
            most, peak = total, time
    at_peak: dict[int, _Value] = {}
    for value, (start, end) in known:
        if start <= peak <= end and value.size >= at_peak.get(value.offset, value).size:
            at_peak[value.offset] = value
    return list(at_peak.values())

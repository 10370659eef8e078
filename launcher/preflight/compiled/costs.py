"""Costs of one step on a device, counted in the optimised HLO: FLOPs of the matrix units, HBM traffic, collectives.

Loops count as often as they turn, which XLA's own cost analysis does not do.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.preflight.compiled import hlo_protos
from launcher.preflight.compiled import kernels as kernels_lib
from launcher.preflight.compiled.hlo import HBM, HOST, Array, Computation, Instruction, Module, OpSource
from launcher.preflight.compiled.trip_counts import turns

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# A TPU's reduction of which each replica keeps a part: a fusion of an all-reduce and of what takes the part.
# Leans on libtpu: a reduce-scatter is a fusion of this name. Noticed by tests/preflight/test_costs.py. Then: find the
# new name; its bytes would count as an all-reduce.
_REDUCE_SCATTER = "all-reduce-scatter"
# One that a TPU moves on while it computes stands in each of the fusions that do so, also those in loops.
# Leans on libtpu: these say by this attribute which one it is. Noticed by tests/preflight/test_costs.py. Then: find the
# new attribute; collectives would count several times.
_CHAIN = "chain_id"
# Names and views of what is already there, and bodies that are counted themselves.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "async-start", "async-update", "async-done", "partition-id", "replica-id", "opt-barrier",
}  # fmt: skip
_HOST = {"infeed", "outfeed"}
_HOST_ALWAYS_TARGETS = ("callback", "HostExecute", "SendToHost", "RecvFromHost")
_PARTIAL_READS = ("dynamic-slice", "slice", "gather")
# What changes parts of its first operand and leaves the rest where it is, and which operand has the parts.
_CHANGED = {"dynamic-update-slice": 1, "scatter": -1}
# Of a TPU's program: memory that nothing is written to yet, and names of what is there already.
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
# What calls a computation for a few elements at a time, within its own time and traffic.
_APPLIES = {
    "fusion", "reduce", "reduce-window", "map", "sort", "topk", "scatter", "select-and-scatter", "all-reduce",
    "all-reduce-start", "reduce-scatter",
}  # fmt: skip
_WORTH_NAMING = 0.001  # share of the HBM traffic of an operation without an estimate
_SUBLANES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixOp:
    """A convolution or matrix product, or those of a kernel of attention.

    Attributes:
      flops: of all its turns, a multiply-add being two.
      contracted: products that are added up for one element of the result, places of padding left out.
      columns: produced features. They and the contracted ones fill the matrix unit.
      rows: elements of the result for each column, in one turn.
      dtypes: of its two operands.
      sizes: of a product rows, summed ones and columns; of a convolution, in whatever order, examples and features.
      bytes: of operands and result.
      full_precision: whether float32 must not be rounded on the way, as TF32 does.
    """

    source: OpSource
    flops: float
    contracted: int
    columns: int
    rows: int
    dtypes: tuple[str, str]
    sizes: tuple[int, ...] = ()
    bytes: int = 0
    full_precision: bool = False
    is_convolution: bool = False

    def padded_flops(self, mxu: int) -> float:
        """FLOPs with features and rows rounded up to what a matrix unit of `mxu` columns takes at once."""

        def excess(size: int, unit: int) -> float:
            return -(-size // unit) * unit / size

        return self.flops * excess(self.contracted, mxu) * excess(self.columns, mxu) * excess(self.rows, _SUBLANES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A reduction or exchange between replicas."""

    kind: str  # HLO's name, such as "all-reduce"
    bytes: int  # of what is reduced or gathered, in one turn
    times: int  # that it turns
    dtypes: tuple[str, ...]
    source: OpSource
    waits: bool = True  # whether the device does nothing else meanwhile
    results: int = 0  # bytes that each device has of it, in one turn

    @property
    def crossings(self) -> int:
        """Number of times that its bytes cross a device's links at least, for n devices times (n - 1) / n.

        A sum over all is scattered and then gathered (Patarasuk and Yuan 2009).
        """
        return 2 if self.kind == "all-reduce" else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An instruction that the device steps through, with all its turns."""

    source: OpSource
    opcode: str
    cycles: int | None  # of the compiler's own cost model; None where it has no estimate
    flops: float  # of the matrix products and convolutions in it
    hbm_bytes: int  # read and written
    exponentials: float = 0.0  # of a kernel that the cost model knows nothing of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one step on one device: FLOPs, memory traffic and collectives.

    Attributes:
      flops: of matrix products and convolutions.
      hbm_bytes: read from and written to HBM, padding included; what stays on the chip is not counted.
      operations: those that the compiler's own cost model has cycles for, and those worth mentioning that it has none
        for, collectives left out; empty where it has cycles for none, or none for a kernel of which nothing is known,
        which may be most of the step.
      unestimated: how many worth mentioning it has no cycles for.
      kernels: operations that are programs of their own, of whose arithmetic nothing is known.
      attention_kernels: those that are attention, whose arithmetic is counted.
      library_kernels: how many of these take a workspace that nobody knows before they run.
      host_transfers: instructions that wait for the host.
      dynamic: instructions whose shape is not known before they run.
      unknown_loops: loops whose turns the compiler does not know, counted once.
      kernels_by_kind: how many of each a step starts; empty where the program does not tell.
      recomputed: instructions that the compiler added, which compute again what would not have fitted in memory.
    """

    flops: float
    hbm_bytes: int
    matrix_ops: tuple[MatrixOp, ...]
    collectives: tuple[Collective, ...]
    host_transfers: tuple[Instruction, ...]
    dynamic: tuple[Instruction, ...]
    unknown_loops: int
    operations: tuple[Operation, ...] = ()
    unestimated: int = 0
    kernels: int = 0
    attention_kernels: int = 0
    library_kernels: int = 0
    kernels_by_kind: Mapping[str, int] = dataclasses.field(default_factory=dict)
    recomputed: tuple[Instruction, ...] = ()

    @property
    def biggest_convolution(self) -> int:
        """Bytes of its operands and result; 0 without any."""
        return max((each.bytes for each in self.matrix_ops if each.is_convolution), default=0)


def summed(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows of a name and numbers, with those of a name added up, the largest last number first."""
    sums: dict[Any, np.ndarray] = {}
    for name, *numbers in rows:
        sums[name] = np.add(sums.get(name, 0), numbers)
    return sorted(((name, *numbers.tolist()) for name, numbers in sums.items()), key=lambda row: -row[-1])


def count(module: Module) -> Costs:
    """Counts a whole module, of which all was read."""
    matrix_ops: list[MatrixOp] = []
    chains: dict[str, Collective] = {}
    host: list[Instruction] = []
    dynamic: list[Instruction] = []
    kernels: list[tuple[Instruction, kernels_lib.AttentionKernel | None]] = []
    unknown_loops = hbm_bytes = 0
    operations: list[tuple[Instruction, Operation]] = []
    beside = {called for each in module.instructions if each.opcode == "async-start" for called in each.called}
    for instruction, times in executed(module.entry):
        inside = list(_with_fused(instruction))
        products = [_matrix_op(each, times) for each in inside if each.opcode in ("convolution", "dot")]
        kernel = kernels_lib.attention(instruction)
        if kernel is not None:
            products.append(_of_kernel(instruction, kernel, times))
        if kernels_lib.is_kernel(instruction):
            kernels.append((instruction, kernel))
        matrix_ops += products
        moved = times * _hbm_bytes(instruction)
        hbm_bytes += moved
        cycles = instruction.cycles
        if cycles is not None or not (instruction.computation in beside or _runs_beside(instruction)):
            named = (each.source for each in (instruction, *reversed(inside)) if each.source.op_name)
            operation = Operation(
                source=next(named, instruction.source),
                opcode=instruction.opcode,
                cycles=None if cycles is None else times * cycles,
                flops=sum(product.flops for product in products),
                hbm_bytes=moved,
                exponentials=times * kernel.exponentials if kernel else 0.0,
            )
            operations.append((instruction, operation))
        unknown_loops += instruction.opcode == "while" and turns(instruction) is None
        for each in inside:
            if each.opcode.removesuffix("-start") in _COLLECTIVES:
                collective = _collective(each, times, waits=each.computation not in beside)
                chain = each.proto.frontend_attributes.map.get(_CHAIN) or f"alone {len(chains)}"
                chains[chain] = min(chains.get(chain, collective), collective, key=lambda known: known.times)
            if _is_host_transfer(each):
                host.append(each)
            if any(shape.dynamic for shape in each.shapes) and each.opcode != "get-tuple-element":
                dynamic.append(each)
    least = _WORTH_NAMING * hbm_bytes
    weighty = [
        operation
        for instruction, operation in operations
        if operation.cycles is not None or _matters(instruction) or operation.hbm_bytes > least
    ]
    unknown = sum(operation.cycles is None for operation in weighty)
    told = len(weighty) > unknown
    hidden = any(kernel is None and call.cycles is None for call, kernel in kernels)
    known = [kernel for _, kernel in kernels if kernel is not None]
    return Costs(
        flops=sum(product.flops for product in matrix_ops),
        hbm_bytes=hbm_bytes,
        operations=tuple(weighty) if told and not hidden else (),
        unestimated=unknown if told else 0,
        kernels=len(kernels) - len(known),
        attention_kernels=len(known),
        library_kernels=sum(kernel.is_library for kernel in known),
        matrix_ops=tuple(matrix_ops),
        collectives=tuple(chains.values()),
        host_transfers=tuple(host),
        dynamic=tuple(dynamic),
        unknown_loops=unknown_loops,
    )


def _is_free(instruction: Instruction) -> bool:
    return instruction.opcode in FREE or instruction.target in _FREE_TARGETS


def _runs_beside(instruction: Instruction) -> bool:
    """Whether the cost model has no cycles for operations like it, as they are free or run beside others."""
    opcode = instruction.opcode
    moves = opcode in _COLLECTIVES or any(called.name.startswith(_REDUCE_SCATTER) for called in instruction.called)
    return _is_free(instruction) or moves or opcode.endswith(("-start", "-done"))


def _matters(instruction: Instruction) -> bool:
    """Whether an operation may take any time, however little it reads."""
    known = instruction.opcode in ("convolution", "dot", "fusion") or "estimated_cycles" in instruction.config
    return known or kernels_lib.is_kernel(instruction)


def executed(computation: Computation, times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Instructions that the device steps through, with how often; not those inside fusions.

    A loop whose turns are not known is taken to turn once, all branches of a conditional to be taken.

    Args:
      computation: the one to begin with, most often a module's entry, which is executed `times` times.
    """
    instructions = computation.instructions.values()
    yield from ((each, times) for each in instructions)
    for each in instructions:
        inside = times * (turns(each) or 1) if each.opcode == "while" else times
        for called in () if each.opcode in _APPLIES else each.called:
            yield from executed(called, inside)


def _with_fused(instruction: Instruction, fused: bool = False) -> Iterator[Instruction]:
    """An instruction and, of a fusion, those inside."""
    yield instruction
    if instruction.opcode == "fusion" or (fused and instruction.opcode not in _APPLIES):
        for called in instruction.called:
            for each in called.instructions.values():
                yield from _with_fused(each, fused=True)


# ---------------------------------------------------------------------------------------------------- matrix products


def _matrix_op(instruction: Instruction, times: int) -> MatrixOp:
    (left, right), (out,) = (operand.shapes[0] for operand in instruction.operands), instruction.shapes
    count_flops = _product if instruction.opcode == "dot" else _convolution
    flops, columns, sizes = count_flops(instruction.proto, left, right, out)
    return MatrixOp(
        source=instruction.source,
        flops=flops * times,
        contracted=max(1, round(flops / 2 / max(1, out.elements))),
        columns=columns,
        rows=max(1, out.elements // max(1, columns)),
        dtypes=(left.dtype, right.dtype),
        sizes=sizes,
        bytes=left.bytes + right.bytes + out.bytes,
        full_precision=hlo_protos.HIGHEST in instruction.proto.precision_config.operand_precision,
        is_convolution=instruction.opcode == "convolution",
    )


def _of_kernel(call: Instruction, kernel: kernels_lib.AttentionKernel, times: int) -> MatrixOp:
    rows, width, keys = kernel.sizes
    sizes: dict[str, Any] = {"contracted": width, "columns": keys, "rows": rows, "sizes": kernel.sizes}
    return MatrixOp(source=call.source, flops=kernel.flops * times, dtypes=kernel.dtypes, **sizes)


def _product(proto: Any, left: Array, right: Array, out: Array) -> tuple[float, int, tuple[int, ...]]:
    """FLOPs, columns and sizes of a matrix product."""
    axes = proto.dot_dimension_numbers
    contracted = math.prod(left.dims[axis] for axis in axes.lhs_contracting_dimensions)
    taken = [*axes.rhs_contracting_dimensions, *axes.rhs_batch_dimensions]
    columns = right.elements // math.prod(right.dims[axis] for axis in taken)
    batch = math.prod(left.dims[axis] for axis in axes.lhs_batch_dimensions)
    rows = left.elements // max(1, contracted * batch)
    return 2.0 * out.elements * contracted, columns, (rows, contracted, columns)


def _convolution(proto: Any, left: Array, right: Array, out: Array) -> tuple[float, int, tuple[int, ...]]:
    """FLOPs as XLA's HloCostAnalysis counts them, where the kernel meets padding or holes none; columns and sizes."""
    axes, valid = proto.convolution_dimension_numbers, 1
    for place, along in enumerate(proto.window.dimensions):
        valid *= valid_positions(
            size=left.dims[axes.input_spatial_dimensions[place]],
            kernel=right.dims[axes.kernel_spatial_dimensions[place]],
            output=out.dims[axes.output_spatial_dimensions[place]],
            stride=along.stride,
            low=along.padding_low,
            base_dilation=along.base_dilation,
            window_dilation=along.window_dilation,
        )
    inputs, columns = (
        right.dims[axis] for axis in (axes.kernel_input_feature_dimension, axes.kernel_output_feature_dimension)
    )
    batch = left.dims[axes.input_batch_dimension] // (proto.batch_group_count or 1)
    return 2.0 * batch * inputs * columns * valid, columns, (batch, inputs, columns)


@functools.lru_cache(maxsize=4096)
def valid_positions(
    *, size: int, kernel: int, output: int, stride: int, low: int, base_dilation: int, window_dilation: int
) -> int:
    """Pairs of a kernel's place and an output's along one axis that meet an input, not padding nor a hole."""
    places = np.arange(output)[:, np.newaxis] * stride + np.arange(kernel) * window_dilation - low
    inside = (places >= 0) & (places <= (size - 1) * base_dilation)
    return int(np.count_nonzero(inside & (places % base_dilation == 0)))


# -------------------------------------------------------------------------------------------------------- HBM traffic


def _hbm_bytes(instruction: Instruction) -> int:
    opcode, operands, shapes = instruction.opcode, instruction.operands, instruction.shapes
    if _is_free(instruction) or opcode.endswith("-done"):
        return 0
    if opcode.endswith("-start"):
        # Its result is both ends of the move, of which one may be the whole of what only a part is taken from.
        ends = shapes[:2] if len(shapes) > 1 else (*shapes, *shapes)
        return min(end.padded_bytes for end in ends) * len(_in_hbm(ends))
    if opcode in _CHANGED:
        part = operands[_CHANGED[opcode]].shapes[0]
        return part.padded_bytes * len(_in_hbm([part, *shapes]))
    if opcode in _PARTIAL_READS:
        (part,) = shapes
        return part.padded_bytes * len(_in_hbm([operands[0].shapes[0], part]))
    if opcode == "custom-call" and not kernels_lib.reads_all(instruction):
        # Of which its operands are more than it may read; a result may be one of them, changed in parts.
        return 0 if instruction.called or instruction.proto.output_operand_aliasing else _written(None, instruction)
    fused = instruction.called[0] if opcode == "fusion" else None
    read = 0
    for place, operand in enumerate(operands):
        if operand.opcode == "constant":
            continue
        whole = _padded_bytes(operand)
        parameter = fused.parameters.get(place) if fused else None
        read += min(whole, _read(parameter)) if parameter and whole else whole
    return read + _written(fused, instruction)


def _in_hbm(shapes: Sequence[Array]) -> list[Array]:
    return [shape for shape in shapes if shape.space == HBM]


def _padded_bytes(instruction: Instruction) -> int:
    return sum(shape.padded_bytes for shape in _in_hbm(instruction.shapes))


def _read(value: Instruction) -> int:
    """Bytes of a value inside a fusion that are read, when all that is done is to take or change parts of it; else more
    than there are.
    """
    everything = 1 << 62
    total = 0 if value.users else everything
    for user in value.users:
        if user.opcode == "fusion":
            inner = user.called[0].parameters
            total += sum(_read(inner[place]) for place, operand in enumerate(user.operands) if operand is value)
        elif user.opcode == "bitcast":
            total += _read(user)
        elif user.operands.index(value) or user.operands.count(value) > 1:
            return everything
        elif user.opcode in _PARTIAL_READS:
            total += sum(shape.padded_bytes for shape in user.shapes)
        elif user.opcode == "scatter":  # what is there and what comes there are put together
            total += user.operands[_CHANGED[user.opcode]].shapes[0].padded_bytes
        elif user.opcode not in _CHANGED:
            return everything
    return total


def _written(fused: Computation | None, instruction: Instruction) -> int:
    """Bytes of an instruction's results that it writes; of what a fusion changes in place, only the parts."""
    if fused is not None:
        results = fused.root.operands if fused.root.opcode == "tuple" else [fused.root]
        if len(results) == len(instruction.shapes):
            pairs = zip(instruction.shapes, results, strict=True)
            return sum(_made(made, shape.padded_bytes) for shape, made in pairs if shape.space == HBM)
    return _padded_bytes(instruction)


def _made(made: Instruction, whole: int) -> int:
    """Bytes of a value inside a fusion that are not where they were in an operand of it."""
    parts = 0
    while made.opcode in ("bitcast", *_CHANGED):
        if made.opcode in _CHANGED:
            parts += made.operands[_CHANGED[made.opcode]].shapes[0].padded_bytes
        made = made.operands[0]
    # An operand that is a result as it is was copied.
    return min(parts, whole) if made.opcode == "parameter" and parts else whole


# --------------------------------------------------------------------------------------- between devices, and the host


def _collective(instruction: Instruction, times: int, *, waits: bool) -> Collective:
    kind, started, shapes = (
        instruction.opcode.removesuffix("-start"),
        instruction.opcode.endswith("-start"),
        instruction.shapes,
    )
    # One that has started has its operands in front of its results.
    results = shapes[len(shapes) // 2 :] if started and kind != "all-reduce" else shapes
    # A sum by its result: a TPU widens bfloat16 operands on the way into one in float32.
    by_result = kind in ("all-reduce", "all-gather")
    arrays = results if by_result else tuple(operand.shapes[0] for operand in instruction.operands)
    if instruction.computation.name.startswith(_REDUCE_SCATTER):
        kind, results = "reduce-scatter", instruction.computation.root.shapes
    elif kind not in ("all-reduce", "all-gather", "reduce-scatter"):
        results = arrays
    return Collective(
        kind=kind,
        bytes=sum(array.bytes for array in arrays),
        times=times,
        dtypes=tuple(sorted({array.dtype for array in arrays})),
        source=instruction.source,
        waits=waits and not started,
        results=sum(array.bytes for array in results),
    )


def _is_host_transfer(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call" and any(target in instruction.target for target in _HOST_ALWAYS_TARGETS):
        return True
    if instruction.opcode == "copy-start" and any(shape.space == HOST for shape in instruction.shapes):
        return True
    return instruction.opcode in _HOST or instruction.proto.is_host_transfer

"""Costs of one step on a device, counted in the optimised HLO: FLOPs of the matrix units, HBM traffic, collectives.

Loops count as often as they turn, which XLA's own cost analysis does not do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
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
_LANES, _SUBLANES = 128, 8


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
        """How often its bytes cross a device's links at least, for n devices times (n - 1) / n.

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
    """Of one step on one device.

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
        return max((one.bytes for one in self.matrix_ops if one.is_convolution), default=0)


def count(module: Module) -> Costs:
    """Counts a whole module, of which all was read."""
    matrix_ops: list[MatrixOp] = []
    chains: dict[str, Collective] = {}
    host: list[Instruction] = []
    dynamic: list[Instruction] = []
    kernels: list[tuple[Instruction, kernels_lib.AttentionKernel | None]] = []
    unknown_loops = hbm_bytes = 0
    operations: list[tuple[Instruction, Operation]] = []
    beside = {
        name
        for computation in module.computations.values()
        for one in computation.instructions.values()
        if one.opcode == "async-start"
        for name in one.called
    }
    for computation, times in executed(module):
        for one in computation.instructions.values():
            inside = list(_with_fused(module, computation, one))
            products = [_matrix_op(at, each, times) for at, each in inside if each.opcode in ("convolution", "dot")]
            of_kernel = kernels_lib.attention(computation, one)
            if of_kernel is not None:
                products.append(_of_kernel(one, of_kernel, times))
            if kernels_lib.is_kernel(one):
                kernels.append((one, of_kernel))
            matrix_ops += products
            moved = times * _hbm_bytes(module, computation, one)
            hbm_bytes += moved
            if one.cycles is not None or not (computation.name in beside or _runs_beside(one)):
                named = (each.source for _, each in reversed(inside) if each.source.op_name)
                operation = Operation(
                    source=one.source if one.source.op_name else next(named, one.source),
                    opcode=one.opcode,
                    cycles=None if one.cycles is None else times * one.cycles,
                    flops=sum(product.flops for product in products),
                    hbm_bytes=moved,
                    exponentials=times * of_kernel.exponentials if of_kernel else 0.0,
                )
                operations.append((one, operation))
            unknown_loops += one.opcode == "while" and turns(module, computation, one) is None
            for at, each in inside:
                if each.opcode.removesuffix("-start") in _COLLECTIVES:
                    moved_once = _collective(at, each, times, waits=at.name not in beside)
                    chain = each.proto.frontend_attributes.map.get(_CHAIN)
                    known = chains.get(chain, moved_once) if chain else moved_once
                    chains[chain or f"alone {len(chains)}"] = min(known, moved_once, key=lambda one: one.times)
                if _is_host_transfer(each):
                    host.append(each)
                if any(shape.dynamic for shape in each.shapes) and each.opcode != "get-tuple-element":
                    dynamic.append(each)
    least = _WORTH_NAMING * hbm_bytes
    weighty = [
        (one, each) for one, each in operations if each.cycles is not None or _matters(one) or each.hbm_bytes > least
    ]
    unknown = [one for one, each in weighty if each.cycles is None]
    told, hidden = len(weighty) > len(unknown), any(known is None and one.cycles is None for one, known in kernels)
    return Costs(
        flops=sum(one.flops for one in matrix_ops),
        hbm_bytes=hbm_bytes,
        operations=tuple(each for _, each in weighty) if told and not hidden else (),
        unestimated=len(unknown) if told else 0,
        kernels=sum(known is None for _, known in kernels),
        attention_kernels=sum(known is not None for _, known in kernels),
        library_kernels=sum(known is not None and known.is_library for _, known in kernels),
        matrix_ops=tuple(matrix_ops),
        collectives=tuple(chains.values()),
        host_transfers=tuple(host),
        dynamic=tuple(dynamic),
        unknown_loops=unknown_loops,
    )


def _is_free(one: Instruction) -> bool:
    return one.opcode in FREE or one.target in _FREE_TARGETS


def _runs_beside(one: Instruction) -> bool:
    """Whether the cost model has no cycles for operations like it, as they are free or run beside others."""
    moves = one.opcode in _COLLECTIVES or any(name.startswith(_REDUCE_SCATTER) for name in one.called)
    return _is_free(one) or moves or one.opcode.endswith(("-start", "-done"))


def _matters(one: Instruction) -> bool:
    """Whether an operation may take any time, however little it reads."""
    known = one.opcode in ("convolution", "dot", "fusion") or "estimated_cycles" in one.config
    return known or kernels_lib.is_kernel(one)


def executed(
    module: Module, computation: Computation | None = None, times: int = 1
) -> Iterator[tuple[Computation, int]]:
    """Computations whose instructions the device steps through, with how often; not those inside fusions.

    A loop whose turns are not known is taken to turn once, all branches of a conditional to be taken. Begins with
    the entry, or with a `computation` that is executed `times` times.
    """
    computation = module.entry if computation is None else computation
    yield computation, times
    for one in computation.instructions.values():
        inside = times * (turns(module, computation, one) or 1) if one.opcode == "while" else times
        for name in () if one.opcode in _APPLIES else one.called:
            yield from executed(module, module.computations[name], inside)


def _with_fused(
    module: Module, computation: Computation, one: Instruction, fused: bool = False
) -> Iterator[tuple[Computation, Instruction]]:
    """An instruction of a computation and, of a fusion, those inside."""
    yield computation, one
    if one.opcode == "fusion" or (fused and one.opcode not in _APPLIES):
        for name in one.called:
            inner = module.computations[name]
            for each in inner.instructions.values():
                yield from _with_fused(module, inner, each, fused=True)


def _operand(computation: Computation, one: Instruction, index: int) -> Array:
    return computation.instructions[one.operands[index]].shapes[0]


# ---------------------------------------------------------------------------------------------------- matrix products


def _matrix_op(computation: Computation, one: Instruction, times: int) -> MatrixOp:
    left, right, out = _operand(computation, one, 0), _operand(computation, one, 1), one.shapes[0]
    if one.opcode == "dot":
        flops, columns, sizes = _product(one, left, right, out)
    else:
        flops, columns, sizes = _convolution(one, left, right, out)
    return MatrixOp(
        source=one.source,
        flops=flops * times,
        contracted=max(1, round(flops / 2 / max(1, out.elements))),
        columns=columns,
        rows=max(1, out.elements // max(1, columns)),
        dtypes=(left.dtype, right.dtype),
        sizes=sizes,
        bytes=left.bytes + right.bytes + out.bytes,
        full_precision=hlo_protos.HIGHEST in one.proto.precision_config.operand_precision,
        is_convolution=one.opcode == "convolution",
    )


def _of_kernel(one: Instruction, kernel: kernels_lib.AttentionKernel, times: int) -> MatrixOp:
    rows, width, keys = kernel.sizes
    sizes: dict[str, Any] = {"contracted": width, "columns": keys, "rows": rows, "sizes": kernel.sizes}
    return MatrixOp(source=one.source, flops=kernel.flops * times, dtypes=kernel.dtypes, **sizes)


def _product(one: Instruction, left: Array, right: Array, out: Array) -> tuple[float, int, tuple[int, ...]]:
    """FLOPs, columns and sizes of a matrix product."""
    axes = one.proto.dot_dimension_numbers
    contracted = math.prod(left.dims[axis] for axis in axes.lhs_contracting_dimensions)
    taken = [*axes.rhs_contracting_dimensions, *axes.rhs_batch_dimensions]
    columns = right.elements // math.prod(right.dims[axis] for axis in taken)
    batch = math.prod(left.dims[axis] for axis in axes.lhs_batch_dimensions)
    rows = left.elements // max(1, contracted * batch)
    return 2.0 * out.elements * contracted, columns, (rows, contracted, columns)


def _convolution(one: Instruction, left: Array, right: Array, out: Array) -> tuple[float, int, tuple[int, ...]]:
    """FLOPs as XLA's HloCostAnalysis counts them, where the kernel meets padding or holes none; columns and sizes."""
    axes, valid = one.proto.convolution_dimension_numbers, 1
    for place, along in enumerate(one.proto.window.dimensions):
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
    batch = left.dims[axes.input_batch_dimension] // (one.proto.batch_group_count or 1)
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


def _hbm_bytes(module: Module, computation: Computation, one: Instruction) -> int:
    if _is_free(one) or one.opcode.endswith("-done"):
        return 0
    if one.opcode.endswith("-start"):
        # Its result is both ends of the move, of which one may be the whole of what only a part is taken from.
        ends = one.shapes[:2] if len(one.shapes) > 1 else (*one.shapes, *one.shapes)
        return min(end.padded_bytes for end in ends) * len(_in_hbm(ends))
    if one.opcode in _CHANGED:
        part = _operand(computation, one, _CHANGED[one.opcode])
        return part.padded_bytes * len(_in_hbm([part, *one.shapes]))
    if one.opcode in _PARTIAL_READS:
        (part,) = one.shapes
        return part.padded_bytes * len(_in_hbm([_operand(computation, one, 0), part]))
    if one.opcode == "custom-call" and not kernels_lib.reads_all(computation, one):
        # Of which its operands are more than it may read; a result may be one of them, changed in parts.
        return 0 if one.called or one.proto.output_operand_aliasing else _written(None, one)
    fused = module.computations[one.called[0]] if one.opcode == "fusion" else None
    read = 0
    for place, name in enumerate(one.operands):
        operand = computation.instructions.get(name)
        if operand is None or operand.opcode == "constant":
            continue
        whole = sum(shape.padded_bytes for shape in _in_hbm(operand.shapes))
        parameter = fused.parameters.get(place) if fused else None
        read += min(whole, _read(module, fused, parameter.name)) if fused and parameter and whole else whole
    return read + _written(fused, one)


def _in_hbm(shapes: Sequence[Array]) -> list[Array]:
    return [shape for shape in shapes if shape.space == HBM]


def _read(module: Module, fused: Computation, name: str) -> int:
    """Bytes of a value inside a fusion that are read, when all that is done is to take or change parts of it; else more
    than there are.
    """
    everything = 1 << 62
    users = fused.users.get(name, [])
    total = 0 if users else everything
    for user in users:
        if user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            places = [place for place, operand in enumerate(user.operands) if operand == name]
            total += sum(_read(module, inner, inner.parameters[place].name) for place in places)
        elif user.opcode == "bitcast":
            total += _read(module, fused, user.name)
        elif user.operands.index(name) or user.operands.count(name) > 1:
            return everything
        elif user.opcode in _PARTIAL_READS:
            total += sum(shape.padded_bytes for shape in user.shapes)
        elif user.opcode == "scatter":  # what is there and what comes there are put together
            total += _operand(fused, user, _CHANGED[user.opcode]).padded_bytes
        elif user.opcode not in _CHANGED:
            return everything
    return total


def _written(fused: Computation | None, one: Instruction) -> int:
    """Bytes of an instruction's results that it writes; of what a fusion changes in place, only the parts."""
    if fused is not None:
        root = fused.root
        results = [fused.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(results) == len(one.shapes):
            pairs = zip(one.shapes, results, strict=True)
            return sum(_made(fused, made, shape.padded_bytes) for shape, made in pairs if shape.space == HBM)
    return sum(shape.padded_bytes for shape in _in_hbm(one.shapes))


def _made(fused: Computation, made: Instruction, whole: int) -> int:
    """Bytes of a value inside a fusion that are not where they were in an operand of it."""
    parts = 0
    while made.opcode in ("bitcast", *_CHANGED):
        if made.opcode in _CHANGED:
            parts += _operand(fused, made, _CHANGED[made.opcode]).padded_bytes
        made = fused.instructions[made.operands[0]]
    # An operand that is a result as it is was copied.
    return min(parts, whole) if made.opcode == "parameter" and parts else whole


# --------------------------------------------------------------------------------------- between devices, and the host


def _collective(computation: Computation, one: Instruction, times: int, *, waits: bool) -> Collective:
    kind = one.opcode.removesuffix("-start")
    if kind == "all-reduce":  # by its result: a TPU widens bfloat16 operands on the way into a float32 sum
        arrays = list(one.shapes)
    elif kind == "all-gather":  # one that has started has its operands in front of its results
        arrays = list(one.shapes[len(one.shapes) // 2 if one.opcode.endswith("-start") else 0 :])
    else:
        arrays = [_operand(computation, one, place) for place in range(len(one.operands))]
    results = arrays
    if computation.name.startswith(_REDUCE_SCATTER):
        kind, results = "reduce-scatter", list(computation.root.shapes)
    elif kind == "reduce-scatter":
        results = list(one.shapes[len(one.shapes) // 2 if one.opcode.endswith("-start") else 0 :])
    return Collective(
        kind=kind,
        bytes=sum(array.bytes for array in arrays),
        times=times,
        dtypes=tuple(sorted({array.dtype for array in arrays})),
        source=one.source,
        waits=waits and not one.opcode.endswith("-start"),
        results=sum(array.bytes for array in results),
    )


def _is_host_transfer(one: Instruction) -> bool:
    if one.opcode in _HOST or one.proto.is_host_transfer:
        return True
    if one.opcode == "custom-call":
        return any(target in one.target for target in _HOST_ALWAYS_TARGETS)
    if one.opcode == "copy-start":
        return any(shape.space == HOST for shape in one.shapes)
    return False

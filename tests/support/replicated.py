"""What of a traced function every replica of a TPU would run, and what a TPU could not run.

TPUStrategy marks the operations that belong to a replica with the attribute `_tpu_replicate`; with all functions that
these call they are what XLA compiles into one program. The rest of the graph is run by the host.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator

import tensorflow as tf
from graph_walk import CONDITIONALS, LOOPS
from tensorflow.python.framework import kernels
from tensorflow.python.tpu import tpu_replication

_REPLICATED = "_tpu_replicate"
_REDUCTION = "CrossReplicaSum"
# What ties the program to its replicas, and the reduction, which only the TPU's own compiler knows.
_OF_THE_TPU = {"TPUReplicateMetadata", "TPUCompilationResult", _REDUCTION}
_OUTSIDE = ("_xla_outside_compilation", "_xla_map_outside_compilation")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a replica.

    Attributes:
      op, name: its type and name.
      dtype: attribute T, if it has one.
      shapes: of its outputs.
      before: "operation.attribute" of every function around the replicated computation, outermost first.
      path: the same of the functions inside it.
      inputs: what it reads, as the graph names it.
      left_out: whether it is marked to be run by the host in the middle of the step.
    """

    op: str
    name: str
    dtype: str | None
    shapes: tuple[tf.TensorShape, ...]
    before: tuple[str, ...]
    path: tuple[str, ...]
    inputs: tuple[str, ...]
    left_out: bool

    def __str__(self) -> str:
        return f"{self.op} ({' > '.join((*self.path, self.name))})"

    @property
    def elements(self) -> int | None:
        return self.shapes[0].num_elements()


def operations(function: tf.types.experimental.ConcreteFunction) -> list[Operation]:
    """Every operation of the replicated computations that the function runs, once for each call."""
    graph = function.graph.as_graph_def(add_shapes=True)
    library = {called.signature.name: called.node_def for called in graph.library.function}
    return list(_walk(graph.node, library, (), None))


def _walk(nodes, library, before: tuple[str, ...], path: tuple[str, ...] | None) -> Iterator[Operation]:
    for node in nodes:
        here = () if path is None and _REPLICATED in node.attr else path
        if here is not None:
            yield Operation(
                op=node.op,
                name=node.name,
                dtype=tf.dtypes.as_dtype(node.attr["T"].type).name if node.attr["T"].type else None,
                shapes=tuple(map(tf.TensorShape, node.attr["_output_shapes"].list.shape)),
                before=before,
                path=here,
                inputs=tuple(node.input),
                left_out=any(name in node.attr for name in _OUTSIDE),
            )
        for attribute, value in node.attr.items():
            for called in [value.func] if value.HasField("func") else value.list.func:
                step = f"{node.op}.{attribute}"
                inside = (before, (*here, step)) if here is not None else ((*before, step), None)
                yield from _walk(library[called.name], library, *inside)


@functools.cache
def compilable() -> frozenset[str]:
    """Types of operations that XLA can compile: those with a kernel for its CPU, less those that TPUs have not.

    Nearly all of XLA's kernels (tensorflow/compiler/tf2xla/kernels) are for every backend, and this TensorFlow lists
    them for the one that it has. Nothing that a host alone does is among them: printing, summaries, strings, files,
    lookup tables, Python functions, data sets and iterators, clocks, or collectives between processes' devices.
    """
    tf.function(tf.identity, jit_compile=True)(0.0)  # which registers them
    known = {kernel.op for kernel in kernels.get_all_registered_kernels().kernel if kernel.device_type == "XLA_CPU_JIT"}
    collective = {op for op in known if op.startswith("Collective")}
    return frozenset(
        (known | _OF_THE_TPU) - collective - tpu_replication._DENYLISTED_OPS - tpu_replication._UNSUPPORTED_OPS
    )


def reductions(found: list[Operation]) -> Counter:
    """How many reductions there are of which dtype and number of elements."""
    return Counter((one.dtype, one.elements) for one in found if one.op == _REDUCTION)


def faults(found: list[Operation]) -> list[str]:
    """Why a TPU could not run these operations as one program, or not as fast; a line for each."""
    lines = [f"run by the host: {one}" for one in found if one.left_out or one.op not in compilable()]
    for one in found:
        if not _is_static(one):
            lines.append(f"shape not static: {one} {', '.join(map(str, one.shapes))}")
    for one in found:
        around = [step for step in one.path if step.split(".")[0] in (*CONDITIONALS, *LOOPS)]
        if one.op == _REDUCTION and around:
            lines.append(f"reduction inside {around[0]}: {one}")
    return lines


def _is_static(one: Operation) -> bool:
    # The sixth output of this operation is room for cuDNN, which XLA makes empty. Its gradient is asked for, too.
    if one.op == "FusedBatchNormV3":
        return all(shape.is_fully_defined() for shape in one.shapes[:5])
    if one.op == "ZerosLike" and re.fullmatch(r".*FusedBatchNormV3(_\d+)?:(reserve_space_3:0|5)", one.inputs[0]):
        return True
    # XLA knows from static shapes which axes a gradient is summed over; TensorFlow before 2.18 asks all the same.
    return one.op == "BroadcastGradientArgs" or all(shape.is_fully_defined() for shape in one.shapes)


def loops_around(found: list[Operation]) -> set[tuple[str, ...]]:
    """The conditionals and loops of the host in which the replicated computations stand."""
    kinds = (*CONDITIONALS, *LOOPS)
    return {tuple(step for step in one.before if step.split(".")[0] in kinds) for one in found}


def replicas(function: tf.types.experimental.ConcreteFunction) -> int:
    """How many replicas the function starts."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for called in graph.library.function for node in called.node_def)]
    (started,) = {node.attr["num_replicas"].i for node in nodes if node.op == "TPUReplicateMetadata"}
    return started

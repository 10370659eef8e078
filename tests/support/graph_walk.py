"""Finds every collective of a traced function, and the branches and loops it stands in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

CONDITIONALS = ("If", "StatelessIf", "Case", "StatelessCase")
LOOPS = ("While", "StatelessWhile")
# Of these, only groups and communicators are set up; no replica's data moves.
_SETTING_UP = ("CollectiveAssignGroupV2", "CollectiveInitializeCommunicator")
_OTHER_COLLECTIVES = ("CrossReplicaSum", "AllToAll", "XlaAllReduce", "XlaReduceScatter")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation that adds up or moves data between replicas.

    Attributes:
      op: type of the operation; "AddN" when it adds up tensors of several devices.
      device: where it stands.
      dtype: what it moves.
      elements: how many each replica gives, or None when that is not static.
      path: "operation.attribute" of every function around it, outermost first, e.g. ("While.body", "If.then_branch").
    """

    op: str
    device: str
    dtype: str
    elements: int | None
    path: tuple[str, ...]

    @property
    def in_conditional(self) -> bool:
        return any(step.split(".")[0] in CONDITIONALS for step in self.path)

    @property
    def loops(self) -> int:
        return sum(step.split(".")[0] in LOOPS for step in self.path)


def collectives(function: tf.types.experimental.ConcreteFunction) -> list[Collective]:
    """Every collective in the function's graph and in the functions that its operations call, once for each call."""
    graph = function.graph.as_graph_def(add_shapes=True)
    library = {called.signature.name: called.node_def for called in graph.library.function}
    return list(_walk(graph.node, library, ()))


def _walk(nodes, library, path: tuple[str, ...]) -> Iterator[Collective]:
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        # Control flow of TensorFlow 1 has no branches to walk into: what stands in them cannot be told.
        assert node.op not in ("Switch", "Merge"), f"{node.name}: {node.op} in {path}"
        if _is_collective(node, by_name):
            dtype = tf.dtypes.as_dtype(node.attr["T"].type).name
            yield Collective(node.op, node.device, dtype, _elements(node), path)
        for attribute, value in node.attr.items():
            for called in [value.func] if value.HasField("func") else value.list.func:
                assert called.name in library, f"{node.name}: {called.name} is not in the graph's library"
                yield from _walk(library[called.name], library, (*path, f"{node.op}.{attribute}"))


def _is_collective(node, by_name) -> bool:
    if node.op == "AddN":
        return len({by_name[name].device for name in _inputs(node) if name in by_name}) > 1
    if node.op.startswith(("Collective", "Nccl")):
        return node.op not in _SETTING_UP
    return node.op in _OTHER_COLLECTIVES


def _inputs(node) -> list[str]:
    return [name.split(":")[0] for name in node.input if not name.startswith("^")]


def _elements(node) -> int | None:
    shapes = node.attr["_output_shapes"].list.shape
    return tf.TensorShape(shapes[0]).num_elements() if shapes else None

"""Sums in one order, whatever else the machine does, and of 16-bit floats in float32.

`AddN` writes into whichever of its inputs nobody else reads any more, and begins with that one. Where other operations
read them, too, time decides which one that is, and with three tensors and more the last bit of the sum. TensorFlow adds
up by `AddN` the gradients of what is used several times, and the parts of several devices; Grappler makes one of every
tree of additions. Here each becomes sums of two, which have one order. `Snapshot` keeps Grappler from joining them: it
is no addition, and copies nothing where nobody else reads its input.

CPU kernels add many 16-bit floats up in 16 bits, as GPUs, TPUs and XLA do not: `BiasAddGrad` stops at 256 in bfloat16,
whatever else there is to add. Here their operands are cast to float32, and what comes out is cast back.
"""

import contextlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

# Leans on TensorFlow: Grappler joins trees of additions into AddN, never across a Snapshot, and errors name their node
# so. Noticed by tests/step/test_summation.py. Then: find an operation that Grappler does not see through; until then
# runs may differ in the last bit.
_NODE = re.compile(r"(?P<begin>Detected at node (?P<name>\S+) defined at .*\n)<stack traces unavailable>\n?")
# Leans on TensorFlow: CPU kernels add up in the dtype of this input; Snapshot can stand in for them, as its output has
# their name. Noticed by tests/step/test_summation.py. Then: leave out what adds up in float32.
_ROWS = ("BiasAddGrad", "Mean", "Prod", "SegmentMean", "SegmentSum", "Sum", "UnsortedSegmentSum")
_NARROW = {"ScatterNd": 1, **dict.fromkeys(_ROWS, 0)}
# Grappler puts the function in the place of these.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


class InOrder:
    """A `tf.function` whose sums, and those in all that it calls, have one order, for devices to which XLA gives none.

    Args:
      function: takes and returns tensors, or what is made of them; its results depend on all that it does.
      on_cpu: whether TensorFlow's CPU kernels run it.
    """

    def __init__(self, function: Callable[..., Any], on_cpu: bool):
        self._function, self._on_cpu = function, on_cpu
        self._written = tf.function(self._call_written, autograph=False)
        self._ordered = tf.function(self._call, autograph=False)
        # Of the function as it was written, and of the bodies of its loops, branches and calls.
        self._graphs: dict[int, tf.Graph] = {}

    def __call__(self, *args: Any) -> Any:
        try:
            return self._ordered(*args)
        except tf.errors.OpError as error:
            told = _NODE.sub(self._with_traceback, error.message)
            raise type(error)(error.node_def, error.op, told).with_traceback(error.__traceback__) from None

    def get_concrete_function(self, *args: Any) -> tf.types.experimental.ConcreteFunction:
        """Traces what will be called; returns the function as it was written, whose shapes are all known."""
        self._ordered.get_concrete_function(*args)
        return self._traced

    def _with_traceback(self, told: re.Match[str]) -> str:
        """What TensorFlow says of an operation, with the lines that made it, which a graph does not carry."""
        for graph in self._graphs.values():
            with contextlib.suppress(KeyError, ValueError):
                frames = traceback.format_list(list(graph.get_operation_by_name(told["name"]).traceback))
                return f"{told['begin']}{''.join(frames)}"
        return told[0]

    def _call_written(self, *args: Any) -> Any:
        def seen(operation: tf.Operation) -> str:
            self._graphs[id(operation.graph)] = operation.graph
            return operation.device

        # A function of devices is called for each operation, in whatever graph it is made.
        with tf.compat.v1.get_default_graph().device(seen):
            return self._function(*args)

    def _call(self, *args: Any) -> Any:
        self._traced = traced = self._written.get_concrete_function(*args)
        graph = traced.graph.as_graph_def()
        if not _rewrite(graph, self._on_cpu):
            return traced(*args)

        def imported(*given: tf.Tensor) -> list[tf.Tensor]:
            inputs = {placeholder.name: value for placeholder, value in zip(traced.inputs, given, strict=True)}
            outputs = [output.name for output in traced.outputs]
            return tf.graph_util.import_graph_def(graph, input_map=inputs, return_elements=outputs, name="")

        # Without `wrap_function` the runtime would not know the imported library.
        signature = [tf.TensorSpec(placeholder.shape, placeholder.dtype) for placeholder in traced.inputs]
        ordered = tf.compat.v1.wrap_function(imported, signature)
        given = [*tf.nest.flatten(args, expand_composites=True), *traced.captured_inputs]
        return tf.nest.pack_sequence_as(traced.structured_outputs, ordered(*given), expand_composites=True)


def _rewrite(graph: Any, on_cpu: bool) -> bool:
    """Changes the sums of a graph and of its library, whose functions get new names; False where none had to be."""
    library = {function.signature.name: function for function in graph.library.function}
    bodies = [graph.node, *(function.node_def for function in library.values())]
    called = {one.name for nodes in bodies for node in nodes if node.op in _CALLS for one in _functions(node)}
    changed = _Sums(graph.node, {}, in_function=False).rewrite(on_cpu)
    for name, function in library.items():
        # XLA has an order of its own.
        if not ("_XlaMustCompile" in function.attr and function.attr["_XlaMustCompile"].b):
            returns = function.ret if name in called else {}
            changed |= _Sums(function.node_def, returns, in_function=True).rewrite(on_cpu)
        function.signature.name += "_in_order"
    for one in [one for nodes in bodies for node in nodes for one in _functions(node) if one.name in library]:
        one.name += "_in_order"
    return changed


class _Sums:
    """The additions of a graph or of a function's body.

    Args:
      nodes: of it.
      returns: what it returns, where its call gives way to it.
      in_function: whether inputs are named as in a function's body.
    """

    def __init__(self, nodes: Any, returns: Any, *, in_function: bool):
        self._nodes, self._returns, self._in_function = nodes, returns, in_function
        self._by_name = {node.name: node for node in nodes}
        self._readers = Counter(map(_producer, [*returns.values(), *(name for node in nodes for name in _data(node))]))
        self._changed = False

    def rewrite(self, widens: bool) -> bool:
        """Returns whether there was anything to change; where it `widens`, sums of 16-bit floats are float32's."""
        for node in [one for one in self._nodes if widens and one.op in _NARROW]:
            if tf.as_dtype(node.attr["T"].type) in (tf.float16, tf.bfloat16):
                self._widen(node)
        for node in [one for one in self._nodes if one.op == "AddN" and _adds(one) and len(_data(one)) > 2]:
            total, *others, last = _data(node)
            for other in others:
                total = self._new("AddV2", "z", [total, other], node)
            node.input[:] = [total, last, *(name for name in node.input if name[0] == "^")]
            node.attr["N"].i = 2
        for node in [one for one in self._nodes if one.op in _CALLS or _adds(one)]:
            for place, name in enumerate(_data(node)):
                node.input[place] = self._apart(name)
        for output, name in self._returns.items():
            self._returns[output] = self._apart(name)
        return self._changed

    def _apart(self, name: str) -> str:
        """What to read instead of an input, so that it and its reader are not made one addition."""
        node = self._by_name.get(_producer(name))
        while node is not None and node.op == "Identity" and self._readers[node.name] == 1:
            node = self._by_name.get(_producer(node.input[0]))
        alone = node is not None and _adds(node) and self._readers[node.name] == 1
        return self._new("Snapshot", "output", [name], node) if alone else name

    def _widen(self, node: Any) -> None:
        """Has a sum of 16-bit floats computed in float32; the node's name stays that of what it gives."""
        place, narrow, float32 = _NARROW[node.op], node.attr["T"].type, tf.float32.as_datatype_enum
        wide = self._nodes.add()
        wide.CopyFrom(node)
        wide.name += "/in_float32"
        wide.attr["T"].type = float32
        wide.input[place] = self._new("Cast", "y", [node.input[place]], node, SrcT=narrow, DstT=float32)
        found = f"{wide.name}:output:0" if self._in_function else wide.name
        node.input[:] = [self._new("Cast", "y", [found], node, SrcT=float32, DstT=narrow)]
        node.op = "Snapshot"
        node.attr.clear()
        node.attr["T"].type = narrow

    def _new(self, op: str, output: str, inputs: Iterable[str], like: Any, **dtypes: int) -> str:
        """The output of a new operation with the device of another one, and its dtype but where others are given."""
        name = f"{like.name}/{op}_{len(self._nodes)}"
        self._by_name[name] = self._nodes.add(op=op, name=name, device=like.device, input=inputs)
        for attribute, dtype in (dtypes or {"T": like.attr["T"].type}).items():
            self._by_name[name].attr[attribute].type = dtype
        self._readers[name], self._changed = 1, True
        return f"{name}:{output}:0" if self._in_function else name


def _functions(node: Any) -> Iterator[Any]:
    for value in node.attr.values():
        yield from [value.func] if value.HasField("func") else value.list.func


def _adds(node: Any) -> bool:
    dtype = tf.as_dtype(node.attr["T"].type) if node.op in ("Add", "AddV2", "AddN") else tf.int32
    return dtype.is_floating or dtype.is_complex


def _data(node: Any) -> list[str]:
    return [name for name in node.input if name[0] != "^"]


def _producer(name: str) -> str:
    return name.partition(":")[0]

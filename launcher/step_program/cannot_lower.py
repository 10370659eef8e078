"""CannotLowerError: what a step holds that XLA cannot compile, in words and with the line of the user's code."""

import os
import re
from collections.abc import Collection

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.step import op_source
from launcher.step.statistics import captures

# Leans on TensorFlow: the lowering's errors name operations and nodes in these words. Noticed by
# tests/step_program/test_lowering.py. Then: take the new words; without them the message is TensorFlow's.
_UNSUPPORTED = re.compile(r"Detected unsupported operations .*?: (\w+) \(")
_NODE = re.compile(r"\{\{node (\S+?)\}\}")
_NOT_CONSTANT = re.compile(r"Input \d+ to node `\S+` with op (\w+) must be a compile-time constant")
# The frames are those of the user and of Launcher, the innermost last; TensorFlow takes its own out.
_FRAME = re.compile(r'^File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_NO_FILE = "dummy_file_name"
_ENDLESS_LOOP = "requires a fixed tensor list size"
# What a step holds beside variables and tensors, by the type of the operation that uses it.
_RESOURCES = {
    "Lookup": ("a lookup table", "look up in the data"),
    "Summary": ("tf.summary", "return the number as one of the metrics of loss()"),
    "Rng|Stateful(?!Partitioned)": (
        "a tf.random.Generator",
        "use a layer, or keras.random with a keras.random.SeedGenerator",
    ),
}
_OTHER_RESOURCE = (
    "a variable or another resource that is not the model's",
    "make it with add_weight() of a layer, so that it is part of checkpoints, too",
)
_CHECKS = {"Assert", "CheckNumerics", "CheckNumericsV2"}


class CannotLowerError(UsageError):
    """XLA cannot compile the step, for which `why` gives the reason.

    Attributes:
      operation: type of the TensorFlow operation that is to blame; None if it does not say.
      where: "file:line, in function" of the code that made it; None if it does not say.
    """

    def __init__(self, why: str, *, operation: str | None = None, where: str | None = None):
        super().__init__(f"the step cannot be compiled for an accelerator: {why}")
        self.operation = operation
        self.where = where


def check_resources(traced: tf.types.experimental.ConcreteFunction, held: Collection[int], model: keras.Model) -> None:
    """Refuses a step that uses what is neither a tensor nor a variable of the run's state.

    Args:
      held: ids of the handles of the run's variables.

    Raises:
      CannotLowerError: it does; names the layer of the model.
    """
    for outer, inner in captures(traced):
        if outer.dtype != tf.resource or id(outer) in held:
            continue
        lines = op_source.user_lines(traced.graph)
        users = [(node, types) for node, types in _nodes(traced.graph) if inner.op.name in node.input]
        node, types = next((user for user in users if user[0].name in lines), users[0])
        where = lines.get(node.name)
        found = (told for kind, told in _RESOURCES.items() if any(re.search(kind, one) for one in types))
        what, instead = next(found, _OTHER_RESOURCE)
        at = op_source.at(where, op_source.layer_of(node.name, model))
        raise CannotLowerError(f"it uses {what}{at}; {instead}", operation=node.op, where=where)


def of_unknown_shape(tensor: tf.Tensor, graph: tf.Graph, model: keras.Model) -> CannotLowerError:
    """The refusal of what a layer makes of text, or of other data that XLA does not take."""
    name = tensor.op.name
    where = op_source.user_lines(graph).get(name)
    at = op_source.at(where, op_source.layer_of(name, model))
    why = (
        f"what is made of the data{at} has sizes that are not known before: {tensor.shape}; have it pad, as "
        "TextVectorization does with output_sequence_length"
    )
    return CannotLowerError(why, where=where)


def checks_left_out(graph: tf.Graph) -> list[str]:
    """The notes on checks of the user's that XLA leaves out of a program, such as those of tf.debugging."""
    checks = [node.name for node, types in _nodes(graph) if types & _CHECKS]
    lines = op_source.user_lines(graph) if checks else {}
    where = sorted({lines[name] for name in checks if name in lines})
    return [f"the check at {line} is left out of the compiled step, as XLA has none" for line in where]


def _nodes(graph: tf.Graph) -> list[tuple[tf.compat.v1.NodeDef, set[str]]]:
    """The nodes of a graph, each with the types of the operations that it is or calls."""
    definition = graph.as_graph_def()
    library = {function.signature.name: function.node_def for function in definition.library.function}

    def types(node: tf.compat.v1.NodeDef) -> set[str]:
        called = [value.func.name for value in node.attr.values() if value.HasField("func")]
        return {node.op}.union(*(types(inner) for name in called for inner in library.get(name, ())))

    return [(node, types(node)) for node in definition.node]


def explain(error: Exception, graph: tf.Graph, model: keras.Model) -> CannotLowerError:
    """The message of a failed `experimental_get_compiler_ir` of TensorFlow 2.21, for the user; `graph` is the step."""
    said = str(error)
    frames = [found for found in _FRAME.findall(said) if found[0] != _NO_FILE]
    # Whole paths may be written without the slash in front.
    files = [path if os.path.exists(path) else f"/{path}" for path, *_ in frames]
    place = op_source.user_frame(files)
    where = None if place is None else f"{files[place]}:{frames[place][1]}, in {frames[place][2]}"
    nodes = _NODE.findall(said)
    if where is None and nodes:  # of a graph that was cut in two, whose operations have no lines
        where = op_source.user_lines(graph).get(nodes[0])
    layer = op_source.layer_of("/".join(nodes), model)  # calls around the node have names of their own
    at = op_source.at(where, layer)
    if found := _UNSUPPORTED.search(said):
        operation = found.group(1)
        # TensorFlow's own name for what is handed in from outside.
        lacks = "takes no strings" if operation == "_Arg" else f"has no operation {operation}"
        why = f"XLA {lacks}{at}; strings, printing and Python functions belong into the data, or out of the step"
        return CannotLowerError(why, operation=operation, where=where)
    if found := _NOT_CONSTANT.search(said):
        operation = found.group(1)
        of_keras = layer is not None and type(layer.layer).__module__.startswith("keras.")
        instead = "have the data do this layer's work" if of_keras else "give Python numbers instead"
        why = f"a shape or an axis given to {operation} is a tensor whose value XLA does not know{at}; {instead}"
        return CannotLowerError(why, operation=operation, where=where)
    if _ENDLESS_LOOP in said:
        where = _endless_loop(graph)
        why = (
            f"a loop with a gradient turns as often as a tensor says{op_source.at(where, layer)}, and XLA must know "
            "how often at most; loop over tf.range of a Python number, or give tf.while_loop its maximum_iterations"
        )
        return CannotLowerError(why, operation="While", where=where)
    first = said.strip().splitlines()[0] if said.strip() else type(error).__name__
    return CannotLowerError(f"{first}{at}", where=where)


def of_unknown_size(location: str, graph: tf.Graph, model: keras.Model) -> CannotLowerError:
    """The refusal of a tensor, made at a location of MLIR, that has as many rows as values say."""
    name = location.split('"')[1]
    where = op_source.line_of(op_source.user_lines(graph), name)
    at = op_source.at(where, op_source.layer_of(name, model))
    why = f"how many rows a tensor has depends on values{at}; keep all rows, and give those that do not count weight 0"
    why += ", or cut by tf.slice with numbers for its sizes"
    return CannotLowerError(why, where=where)


def _endless_loop(graph: tf.Graph) -> str | None:
    """The line of the first loop that keeps values for its gradient without knowing how many."""
    lines = op_source.user_lines(graph)
    for operation in graph.get_operations():
        if "While" in operation.type and operation.name in lines:
            kept = (one.op for one in operation.inputs if one.op.type == "EmptyTensorList")
            if any(tf.get_static_value(one.inputs[1]) == -1 for one in kept):
                return lines[operation.name]
    return None

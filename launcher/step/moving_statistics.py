"""What a forward pass assigns: a model's moving statistics and counts, told from its frozen weights by tracing one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.data.batch_spec import BatchSpec
from launcher.machine.no_autograph import call_converted
from launcher.tasks.base import Task
from launcher.tasks.keras_private import rnn_states

# What does not change a variable that it is given. Any other operation is taken to change it.
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})
_SAME = frozenset({"Identity", "IdentityN"})
_LOOPS = frozenset({"While", "StatelessWhile"})
# Operations that call functions, and at which of their inputs the functions' arguments begin.
_FIRST_ARGUMENT = {
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    **dict.fromkeys(_LOOPS, 0),
    **dict.fromkeys(("If", "StatelessIf", "Case", "StatelessCase"), 1),
}


def candidates(model: keras.Model) -> list[keras.Variable]:
    """What a forward pass of the model could move: numbers that are neither trained nor states of seed generators."""
    seeds = {id(variable) for variable in seed_states(model)}
    return [
        variable
        for variable in (*model.non_trainable_variables, *rnn_states(model))
        if id(variable) not in seeds and variable.dtype != "string"
    ]


def is_moving(variable: keras.Variable) -> bool:
    """Whether a variable that is assigned is averaged over replicas, as a moving statistic; else it is a count."""
    return bool(tf.dtypes.as_dtype(variable.dtype).is_floating)


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """States of the model's seed generators: in Keras 3 they are variables but not weights."""
    weights = {id(variable) for variable in model.weights}
    return [
        variable
        for variable in model.variables
        if id(variable) not in weights and variable.path.endswith("seed_generator_state")
    ]


def assigned(task: Task, model: keras.Model, spec: Callable[[], BatchSpec]) -> list[keras.Variable]:
    """Those of the `candidates` that the task's loss assigns in training: no frozen weights, nothing of frozen layers.

    The loss is traced once, as the default strategy's only replica and under no strategy's scope; nothing runs.

    Args:
      spec: called for the shapes and dtypes of a microbatch, if they are needed.

    Returns:
      In the model's order. All candidates when the loss cannot be traced here, because the data are not there or it
      fails: `Trainer.trace` then says why.
    """
    found = candidates(model)
    if not found:
        return []
    handles: list[list[tf.Tensor]] = []

    def forward(batch: Mapping[str, tf.Tensor]) -> None:
        for variable in found:  # of any copy, since strategies differ in which of them this trace assigns
            copies = getattr(variable.value, "values", ())
            handles.append([variable.value.handle, *(copy.handle for copy in copies)])
        call_converted(task.loss, model, dict(batch), True)

    try:
        traced = tf.function(forward, autograph=False).get_concrete_function(spec())
    except Exception:  # of the user's code; the step's own trace meets it again, where it is explained
        return found
    inner = {id(outer): name for outer, name in captures(traced)}
    # Leans on TensorFlow: a forward pass's graph shows which captured variables it assigns. Noticed by
    # tests/step/test_moving_statistics.py. Then: read the new form of functions and captures; until then every
    # untrained variable is averaged.
    graph = traced.graph.as_graph_def()
    names = [{inner[id(handle)] for handle in copies if id(handle) in inner} for copies in handles]
    if not any(names):  # no variable is recognised
        return found
    changed = _Functions(graph.library.function).changed_by(graph.node, inner.values())
    return [variable for variable, known in zip(found, names, strict=True) if known & changed]


def captures(traced: tf.types.experimental.ConcreteFunction) -> Iterator[tuple[tf.Tensor, str]]:
    """Each tensor from outside that a function uses, and the name of its placeholder inside."""
    outer = traced.captured_inputs
    inner = traced.inputs[len(traced.inputs) - len(outer) :]
    return ((one, other.op.name) for one, other in zip(outer, inner, strict=True))


class _Functions:
    """The functions of a graph's library, and which of their arguments they change."""

    def __init__(self, library: Iterable[Any]):
        self._definitions = {function.signature.name: function for function in library}
        self._changed: dict[str, list[bool]] = {}

    def changed_by(self, nodes: Sequence[Any], resources: Iterable[str]) -> set[str]:
        """Which resources, placeholders or arguments by name, the nodes change, themselves or in what they call."""
        by_name, known = {node.name: node for node in nodes}, set(resources)

        def origin(tensor: str) -> str | None:
            """The resource that a tensor is."""
            while True:
                name, *output = tensor.split(":")
                if name in known:
                    return name
                node = by_name.get(name)
                if node is None or node.op not in _SAME | _LOOPS:
                    return None
                tensor = node.input[int(output[-1]) if output else 0]

        return {
            resource
            for node in nodes
            if node.op not in _READS | _SAME
            for position, tensor in enumerate(node.input)
            if not tensor.startswith("^") and (resource := origin(tensor)) and self._changes(node, position)
        }

    def _changes(self, node: Any, position: int) -> bool:
        """Whether an operation changes the resource that is its input of this position."""
        if node.op not in _FIRST_ARGUMENT:
            return True
        called = [
            function.name
            for value in node.attr.values()
            for function in ([value.func] if value.HasField("func") else value.list.func)
        ]
        return any(self._arguments(name)[position - _FIRST_ARGUMENT[node.op]] for name in called)

    def _arguments(self, name: str) -> list[bool]:
        """Of each argument of a function, whether it is a resource that the function changes."""
        if name not in self._changed:
            definition = self._definitions[name]
            arguments = definition.signature.input_arg
            resources = [one.name for one in arguments if tf.dtypes.as_dtype(one.type) == tf.resource]
            changed = self.changed_by(definition.node_def, resources)
            self._changed[name] = [one.name in changed for one in arguments]
        return self._changed[name]

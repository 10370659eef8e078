"""A model's own inputs and outputs by name, whatever form it takes them in: what an export serves and predict feeds."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.data import batch_spec
from launcher.data.pipeline import Shard
from launcher.errors import UsageError, user_code
from launcher.run.plan import RunPlan

Tensors = dict[str, tf.Tensor]
_UNNAMED = re.compile(r"keras_tensor(_\d+)?$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interface:
    """Call of a model by the names of its inputs.

    Attributes:
      inputs: shape, whose first axis is the batch and is open, and dtype of each input.
      call: the model in inference: inputs by name to outputs by name, in replica context or out of it.
    """

    inputs: dict[str, tf.TensorSpec]
    call: Callable[[Mapping[str, tf.Tensor]], Tensors]


def of(model: keras.Model, plan: RunPlan) -> Interface:
    """The interface of a plan's model.

    Functional and Sequential models say what their inputs are. Any other model is asked by tracing the task's loss() on
    a batch of the task's data, and what it is called with there is its input. Where neither tells, that is a
    UsageError.
    """
    if getattr(model, "inputs", None):
        # A Sequential model has one input and no `input` of its own before it is called.
        structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        return _of_structure(model, structure, _names(structure, model))
    return _of_structure(model, *_seen_in_loss(model, plan))


def _names(structure: Any, model: keras.Model) -> dict[int, str]:
    """The name of each input by its identity: its key in a dict of inputs, else that of its `keras.Input`."""
    if isinstance(structure, Mapping) and not any(
        isinstance(each, Mapping | list | tuple) for each in structure.values()
    ):
        return {id(tensor): str(key) for key, tensor in structure.items()}
    # A tensor that was given no name has one that counts up within the process. Its layer has a better one, which a
    # Sequential model, of one input, does not show.
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.InputLayer)]
    of_layers = {id(layer.output): layer.name for layer in layers}
    return {
        id(tensor): of_layers.get(id(tensor), "inputs" if _UNNAMED.match(tensor.name) else tensor.name)
        for tensor in keras.tree.flatten(structure)
    }


def _of_structure(model: keras.Model, structure: Any, names: Mapping[int, str]) -> Interface:
    def call(given: Mapping[str, tf.Tensor]) -> Tensors:
        inputs = keras.tree.map_structure(lambda tensor: given[names[id(tensor)]], structure)
        return _named_outputs(model, model(inputs, training=False))

    specs = {
        names[id(tensor)]: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name=names[id(tensor)])
        for tensor in keras.tree.flatten(structure)
    }
    return Interface(inputs=specs, call=call)


def _named_outputs(model: keras.Model, outputs: Any) -> Tensors:
    if isinstance(outputs, Mapping) and all(tf.is_tensor(each) for each in outputs.values()):
        return dict(outputs)
    flat = keras.tree.flatten(outputs)
    names: Sequence[str] = getattr(model, "output_names", None) or ()
    if isinstance(model, keras.Sequential):
        names = [model.layers[-1].name]
    if len(names) != len(flat):
        names = ["output"] if len(flat) == 1 else [f"output_{index}" for index in range(len(flat))]
    return dict(zip(names, flat, strict=True))


class _Calls:
    """Stands in for a model and remembers what it is first called with."""

    def __init__(self, model: keras.Model):
        self._model = model
        self.inputs: Any = None
        self.outputs: Any = None

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = self._model(inputs, *args, **kwargs)
        if self.inputs is None:
            self.inputs, self.outputs = inputs, outputs
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _ancestors(tensors: Sequence[tf.Tensor]) -> set[int]:
    """Identities of all tensors of a graph that these depend on."""
    found: set[int] = set()
    waiting = list(tensors)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) not in found:
            found.add(id(tensor))
            waiting += tensor.op.inputs
    return found


def _seen_in_loss(model: keras.Model, plan: RunPlan) -> tuple[Any, dict[int, str]]:
    """Structure of tensors that the task's loss() calls the model with, and their names."""
    size = plan.per_replica_batch_size
    shard = Shard(global_batch_size=size, seed=plan.seed)
    calls = _Calls(model)
    seen: dict[int, str] = {}

    def forward(batch: Tensors) -> None:
        plan.recipe.task.loss(calls, dict(batch), False)
        seen.update({id(tensor): name for name, tensor in batch.items()})

    why = "its task's loss() does not call it"
    try:
        tf.function(forward).get_concrete_function(batch_spec.of_one_replica(plan.data, shard))
    except UsageError as error:
        why = str(error)
    except Exception as error:  # of the user's loss()
        why = user_code.summary(error)
    if calls.inputs is None:
        raise UsageError(
            f"the inputs of model {model.name!r} are not known: it is neither functional nor Sequential, and {why}. "
            "Build it with keras.Input, or have the data that it was trained on here"
        )
    inputs = calls.inputs
    if isinstance(inputs, Mapping):
        # A model that is given the whole batch is called without what only the loss is for.
        needed = _ancestors(keras.tree.flatten(calls.outputs))
        inputs = {key: tensor for key, tensor in inputs.items() if id(tensor) in needed}
        return inputs, _names(inputs, model)
    flat = keras.tree.flatten(inputs)
    unnamed = ["inputs"] if len(flat) == 1 else [f"inputs_{index}" for index in range(len(flat))]
    return inputs, {id(tensor): seen.get(id(tensor), name) for tensor, name in zip(flat, unnamed, strict=True)}


def shown(spec: tf.TensorSpec) -> str:
    """Dtype and shape of an input, as a message has them."""
    return f"{spec.dtype.name} {[None if size is None else int(size) for size in spec.shape]}".replace("None", "n", 1)


def listed(specs: Mapping[str, tf.TensorSpec]) -> str:
    """The inputs of a model, as a message has them."""
    return ", ".join(f"{name!r} ({shown(spec)})" for name, spec in specs.items())

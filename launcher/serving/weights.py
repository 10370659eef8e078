"""Which weights of a run are served: those of the best checkpoint or of the last, averaged or not."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.checkpoints import CheckpointStore
from launcher.machine.array_parts import Source
from launcher.step import layers
from launcher.step.state import AVERAGES, MODEL, average_of, weight_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a run, by their names in the checkpoint of a step; `averaged`: they are the moving averages.

    Each is read when it is due.
    """

    step: int
    averaged: bool
    arrays: Mapping[str, Source]


def step_of(store: CheckpointStore, which: str) -> int | None:
    """The step of the last whole checkpoint for "last", else of the best one if there is one; None without any."""
    return store.latest() if which == "last" else store.best() or store.latest()


def read(store: CheckpointStore, step: int, model: keras.Model, *, averaged: bool) -> Weights:
    """The weights for a model from the checkpoint of a step; if `averaged`, of each the average where it has one.

    Raises:
      UsageError: the checkpoint is of another model.
      CheckpointReadError: it cannot be read.
    """
    variables = weight_names(model)
    store.check_compatible(step, {name: (v.shape, v.dtype) for name, v in variables.items()}, prefix=MODEL)
    prefixes = (MODEL, AVERAGES) if averaged else (MODEL,)
    found = store.stored(step, lambda name: name.startswith(prefixes))
    arrays = {name: found.get(average_of(name), found[name]).astype(found[name].dtype) for name in variables}
    return Weights(step=step, averaged=any(name.startswith(AVERAGES) for name in found), arrays=arrays)


def has_averages(store: CheckpointStore, step: int) -> bool:
    """Whether a checkpoint holds moving averages of the weights."""
    return any(name.startswith(AVERAGES) for name in store.manifest(step)["tensors"])


def put(model: keras.Model, arrays: Mapping[str, Source]) -> None:
    """Gives a model weights by their names in a checkpoint, on every local replica; no collective."""
    for name, variable in weight_names(model).items():
        variable.assign(arrays[name](None))


@contextlib.contextmanager
def saved_in_place(model: keras.Model, arrays: Mapping[str, Source]) -> Iterator[None]:
    """Inside the block Keras saves the model with these weights: each layer has them while its own are saved.

    So no more than the weights of a layer are in memory besides the model's.
    """
    names = {id(variable): name for name, variable in weight_names(model).items()}
    saved: set[int] = set()
    with contextlib.ExitStack() as after:
        for placed in layers.walk(model):
            found: dict[str, Any] = {}
            placed.layer.save_own_variables(found)
            own = [one for one in found.values() if id(one) in names]
            if len(own) < len(found):  # it saves what it makes of them
                own = [one for one in placed.layer.weights if id(one) in names]
            saved |= {id(one) for one in own}
            vars(placed.layer)["save_own_variables"] = _saving(placed.layer, own, names, arrays)
            after.callback(vars(placed.layer).pop, "save_own_variables")
        after.enter_context(_lent([one for one in model.weights if id(one) not in saved], names, arrays))
        yield


def _saving(
    layer: keras.layers.Layer, own: Sequence[keras.Variable], names: Mapping[int, str], arrays: Mapping[str, Source]
) -> Callable[[Any], None]:
    save = layer.save_own_variables

    def save_own_variables(store: Any) -> None:
        with _lent(own, names, arrays):
            save(store)

    return save_own_variables


@contextlib.contextmanager
def _lent(
    variables: Sequence[keras.Variable], names: Mapping[int, str], arrays: Mapping[str, Source]
) -> Iterator[None]:
    """Inside the block variables have these values, afterwards their own again, which are not copied."""
    before = [(one, tf.convert_to_tensor(one.value)) for one in variables]
    for one in variables:
        one.assign(arrays[names[id(one)]](None))
    try:
        yield
    finally:
        for one, value in before:
            one.assign(value)

"""Which weights of a run are served: those of the best checkpoint or of the last, averaged or not."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import keras
import numpy as np

from launcher.checkpoints import CheckpointStore
from launcher.step.state import AVERAGES, MODEL, average_of, weight_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of a run, by their names in the checkpoint of a step; `averaged`: they are the moving averages."""

    step: int
    averaged: bool
    arrays: Mapping[str, np.ndarray]


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
    found = store.read(step, lambda name: name.startswith(prefixes))
    arrays = {name: found.get(average_of(name), found[name]).astype(found[name].dtype) for name in variables}
    return Weights(step=step, averaged=any(name.startswith(AVERAGES) for name in found), arrays=arrays)


def has_averages(store: CheckpointStore, step: int) -> bool:
    """Whether a checkpoint holds moving averages of the weights."""
    return any(name.startswith(AVERAGES) for name in store.manifest(step)["tensors"])


def put(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> None:
    """Gives a model weights by their names in a checkpoint, on every local replica; no collective."""
    for name, variable in weight_names(model).items():
        variable.assign(arrays[name])


@contextlib.contextmanager
def in_place(model: keras.Model, arrays: Mapping[str, np.ndarray]) -> Iterator[None]:
    """Inside the block the model has these weights, afterwards its own again."""
    own = {name: np.array(variable.value.numpy()) for name, variable in weight_names(model).items()}
    put(model, arrays)
    try:
        yield
    finally:
        put(model, own)

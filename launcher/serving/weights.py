"""Weights of a run that are served: those of the best checkpoint or of the last, averaged or not."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf

from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError
from launcher.machine.array_parts import Source, value_of
from launcher.run import session
from launcher.run.plan import RunPlan
from launcher.run.start import assets
from launcher.step.state import AVERAGES, MODEL, average_of, refresh, weight_names


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


def put(model: keras.Model, arrays: Mapping[str, Source]) -> None:
    """Gives a model weights by their names in a checkpoint, on every local replica; no collective."""
    variables = weight_names(model)
    for name, source in arrays.items():
        variables[name].assign(source(None))
    refresh(model)


@contextlib.contextmanager
def lent(model: keras.Model, arrays: Mapping[str, Source]) -> Iterator[None]:
    """Inside the block a model has weights by their names in a checkpoint, afterwards its own again.

    Those of its own that are others lie in the host's memory meanwhile: a device may have no room for both.
    """
    before = dict[str, Source]()
    for name, variable in weight_names(model).items():
        own, lending = np.asarray(tf.convert_to_tensor(variable.value)), arrays[name](None)
        if own.ravel().view(np.uint8).data != lending.ravel().view(np.uint8).data:
            before[name] = value_of(own)
            variable.assign(lending)
    try:
        refresh(model)
        yield
    finally:
        put(model, before)


def checkpoints_of(model_dir: str) -> CheckpointStore:
    """The checkpoints of a run, to be read."""
    return CheckpointStore(os.path.join(model_dir, "checkpoints"), is_chief=False)


def trained(plan: RunPlan, model_dir: str, mode: str) -> tuple[session.Session, Weights]:
    """Builds the session with the weights of the best checkpoint, else of the newest, and returns both.

    The average of the weights is taken where `train.evaluate_ema` says so. The task gets the assets kept beside the
    checkpoints, so that no data set is needed. UsageError where there is no checkpoint, or one of another recipe.
    """
    store = checkpoints_of(model_dir)
    step = step_of(store, "best")
    if step is None:
        raise UsageError(f"--mode={mode}: no checkpoint in {model_dir}; train first, or name another --model_dir")
    plan.recipe.task.use_assets(assets.read(model_dir))
    made = session.build(plan)
    found = read(store, step, made.model, averaged=plan.recipe.evaluate_ema)
    made.trainer.state.restore(found.arrays)
    return made, found

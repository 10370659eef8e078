"""The same model under float32, with the same weights: what its gradients are when nothing is lost."""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.run import session
from launcher.run.plan import RunPlan
from launcher.step import initial_values
from launcher.step.layers import walk


def build(strategy: tf.distribute.Strategy, plan: RunPlan) -> keras.Model:
    """Builds the task's model a second time, under float32 whatever its layers ask for; the policy stays as it was.

    Args:
      strategy: of the model it is to shadow.
      plan: of that model; as for any build, layers' names count from the beginning again.
    """
    policy = keras.config.dtype_policy()
    keras.utils.clear_session()
    try:
        with initial_values.scope(strategy):
            model = session.build_model(dataclasses.replace(plan, policy="float32"))
    finally:
        keras.config.set_dtype_policy(policy)
    for layer, *_ in walk(model):
        if layer.compute_dtype != "float32":
            layer.dtype_policy = "float32"
    return model


def copy_weights(source: keras.Model, target: keras.Model) -> None:
    """Gives `target` the values of `source`, variable by variable in their order.

    Raises:
      UsageError: they are not the same variables.
    """
    pairs = list(zip(source.weights, target.weights, strict=False))
    for one, other in pairs:
        if (one.path, tuple(one.shape)) != (other.path, tuple(other.shape)):
            raise UsageError(
                f"the task's model() built {other.path} {tuple(other.shape)} where it had built {one.path} "
                f"{tuple(one.shape)} before: to compare precisions, it must build the same model each time it is called"
            )
    if len(source.weights) != len(target.weights):
        raise UsageError(
            f"the task's model() built {len(target.weights)} variables where it had built {len(source.weights)} before:"
            " to compare precisions, it must build the same model each time it is called"
        )
    for one, other in pairs:
        other.assign(one.numpy())

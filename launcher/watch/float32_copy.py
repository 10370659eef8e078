"""A float32 copy of a model: what its gradients are when nothing is lost, for the precision report and the watch.

The model is built a second time. To give the layers of the one that is there another policy while it is traced is not
enough: a cast in a functional model and the constants of a Normalization layer keep the dtype that they were made in.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.runtime import Runtime
from launcher.step.layers import layers_of
from launcher.tasks.keras_private import forget_names


def build(source: keras.Model, runtime: Runtime, make: Callable[[], keras.Model]) -> keras.Model:
    """Builds a model again, its layers in float32 where they would be in 16 bits; the global policy stays as it was.

    Args:
      make: builds it once more under float32; as for any build, layers' names count from the beginning again.

    Returns:
      The copy. Its weights are its own until `copy_weights`.
    """
    policy = keras.config.dtype_policy()
    forget_names()
    try:
        with runtime.host.scope():
            copy = make()
    finally:
        keras.config.set_dtype_policy(policy)
    if copy is source:
        raise UsageError("a second model is needed, in float32: give launcher.fit a function that builds the model")
    for layer in layers_of(copy):
        if layer.compute_dtype in ("float16", "bfloat16"):  # whatever the policy, when its code says so
            layer.dtype_policy = "float32"
    _check_same(source, copy)
    return copy


def copy_weights(source: keras.Model, copy: keras.Model) -> None:
    """Gives `copy` the present weights of `source`; in a replica's function."""
    for one, other in zip(source.weights, copy.weights, strict=True):
        other.value.assign(tf.cast(one.value, other.dtype))


def _check_same(source: keras.Model, copy: keras.Model) -> None:
    before, now = ([f"{one.path} {tuple(one.shape)}" for one in model.weights] for model in (source, copy))
    differences = [pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]]
    if len(before) != len(now):
        differences.append((str(len(before)), f"{len(now)} variables"))
    if differences:
        was, built = differences[0]
        raise UsageError(f"the task's model() built {built} and before it {was}: it must build the same each time")

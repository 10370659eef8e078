"""Dtype policies of single layers, by pattern on their path, over the policy that the whole run has.

Every policy that a recipe may name keeps float32 weights, so a built model's layers can take another one: Keras reads
`layer.dtype_policy`, public and settable, at every call, for the cast of the inputs and of the weights. A global
`keras.dtype_policies.DTypePolicyMap` would not do: a layer has no path before it is built, so its first call goes by
the default policy, and a layer that was made with a dtype of its own does not ask the map.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

import keras
import tensorflow as tf

from launcher.config.bound_types import checked_patterns
from launcher.errors import UsageError, advice
from launcher.reporting.units import first
from launcher.step import layers
from launcher.step.layers import Placed, walk
from launcher.step.precision import POLICIES, of_keras
from launcher.tasks.keras_private import is_from_config

BINDING = "train.precision_overrides"
# Leans on TensorFlow: operations name a mismatch of dtypes in these words. Noticed by
# tests/step/test_layer_policies.py. Then: take the new words; without them the message is TensorFlow's.
_MISMATCH = re.compile(r"\b(b?float\d+|half)\b.*\b(does not match|was expected|but is a)\b|expected to be a \w+ tensor")


def check(overrides: Mapping[str, str]) -> None:
    """Raises UsageError for a pattern that is no regular expression, or a policy that is none."""
    checked_patterns(BINDING, overrides)
    for pattern, policy in overrides.items():
        if policy in ("float16", "bfloat16"):
            raise UsageError(f"{BINDING}[{pattern!r}] = {policy!r}: take 'mixed_{policy}', with float32 weights")
        if policy not in POLICIES:
            raise UsageError(f"{BINDING}[{pattern!r}] = {policy!r} is no policy{advice(policy, POLICIES)}")


def apply(model: keras.Model, overrides: Mapping[str, str]) -> None:
    """Gives the layers of a built model their policies by pattern, see `layers.named`; weights stay float32.

    Raises:
      UsageError: a pattern names no layer, two give one layer different policies, or the layer's weights have a dtype
        of their own.
    """
    for item, pattern in overridden(model, overrides):
        layer, policy = item.layer, overrides[pattern]
        if layer.variable_dtype != "float32":
            raise UsageError(
                f"{BINDING}[{pattern!r}] names {item.path}, whose weights the model made "
                f"{layer.variable_dtype}; make the layer with dtype={policy!r} instead"
            )
        # Leans on Keras: a built layer reads `dtype_policy` at every call. Noticed by
        # tests/step/test_layer_policies.py. Then: set it before `build`, or clone the layer.
        layer.dtype_policy = of_keras(policy)


def follow_run(model: keras.Model, policy: str) -> str | None:
    """Gives the run's policy to the layers that a saved model brought in the policy it was saved with.

    What the task's code gave a policy keeps it. A functional or sequential model, at any depth, counts as saved when
    its layers were made from a file or a config, and no layer with weights in it, but for those that make the outputs,
    has the run's policy. Of its layers, those in the policy that is most common there follow the run. Two kinds do not:
    layers with another policy than most, such as a softmax saved in float32 among layers in 16 bits, and layers in
    float32 that make the outputs of `model`, where a loss needs the digits.

    Args:
      model: as the task made it, before overrides.
      policy: of the run.

    Returns:
      What was done, for a person; None for nothing.
    """
    outputs = {id(layer) for layer in making_outputs(model)}
    changed: dict[str, list[Placed]] = {}
    for saved in walk(model):
        if not is_graph(saved.layer) or not is_from_config(saved.layer):
            continue
        inside = computing(saved.layer)
        policies = [f.layer.dtype_policy.name for f in inside if f.layer.weights and id(f.layer) not in outputs]
        if not policies or policy in policies:
            continue
        brought = max(set(policies), key=policies.count)
        for found in inside:
            layer = found.layer
            keeps = brought == "float32" and id(layer) in outputs
            if layer.dtype_policy.name == brought and layer.variable_dtype == "float32" and not keeps:
                layer.dtype_policy = policy
                changed.setdefault(brought, []).append(found)
    if not changed:
        return None
    parts = [f"{len(found)} layers that a saved model brought in {brought}" for brought, found in changed.items()]
    return f"{' and '.join(parts)} compute in {policy}; {BINDING} gives single layers another policy"


def is_graph(model: keras.layers.Layer) -> bool:
    """Whether it is a functional or sequential model."""
    return isinstance(model, keras.Sequential) or hasattr(model, "output_names")


def making_outputs(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers that make a model's outputs, those around the innermost included; of a subclassed one, the last."""
    last = model.layers[-1:]
    if not isinstance(model, keras.Sequential) and (names := getattr(model, "output_names", ())):
        last = [layer for layer in model.layers if layer.name in names]
    return [
        layer for outer in last for layer in (outer, *(making_outputs(outer) if isinstance(outer, keras.Model) else ()))
    ]


@contextlib.contextmanager
def explained(overrides: Mapping[str, str]) -> Iterator[None]:
    """Around the tracing of a step: turns TensorFlow's refusal to mix dtypes into what the overrides brought about.

    A layer's inputs are cast to what it computes in, but not the tensors that a layer's `call` puts together itself.
    """
    try:
        yield
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        found = _MISMATCH.search(str(error))
        if not overrides or not found:
            raise
        line = next(line for line in str(error).splitlines() if _MISMATCH.search(line)).strip()
        raise UsageError(
            f"{BINDING}: with {dict(overrides)}, the call() of some layer puts tensors of different dtypes together "
            f"({line}); name the layer around them as a whole, or cast in its call()"
        ) from error


def describe(model: keras.Model, overrides: Mapping[str, str]) -> str:
    """The policies in effect, as a person reads it: the outermost layers of each policy, "" for none; as `apply`."""
    by_policy: dict[str, list[str]] = {}
    for item, pattern in overridden(model, overrides):
        paths = by_policy.setdefault(overrides[pattern], [])
        if not any(item.path.startswith(f"{path}/") for path in paths):
            paths.append(item.path)
    return "; ".join(f"{policy} in {first(paths)}" for policy, paths in by_policy.items())


def overridden(model: keras.Model, overrides: Mapping[str, str]) -> Iterator[tuple[Placed, str]]:
    """The layers that patterns name, each with its pattern, see `layers.named`."""
    return layers.named(BINDING, overrides, _layers(model), what=f"layer of {model.name}", value="policies")


def computing(model: keras.layers.Layer) -> list[Placed]:
    """Layers that compute, without models, which have the run's policy whatever their file says."""
    return [found for found in _layers(model) if not isinstance(found.layer, keras.Model)]


def _layers(model: keras.layers.Layer) -> list[Placed]:
    """The layers that compute in floating point."""
    return [
        found
        for found in walk(model)
        if keras.backend.is_float_dtype(found.layer.compute_dtype)
        and not isinstance(found.layer, keras.layers.InputLayer)
    ]

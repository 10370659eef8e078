"""Penalties on weights by the type of their layer, counted once in the global mean on any topology.

Weight decay inside the optimizer (`momentum.weight_decay` and its like) is the usual choice; a penalty is for what
differs between layer types, and it is part of the reported training loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import gin
import keras
import tensorflow as tf

from launcher.errors import UsageError

# What a penalty is meant for: kernels and embeddings, not biases or the gains and offsets of normalisation.
_PENALISED = ("kernel", "embeddings")


@gin.configurable("penalty")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalty:
    """Sum over layers of l2[type] * sum(w ** 2) + l1[type] * sum(|w|), over kernels and embeddings.

    Attributes:
      l2: coefficient by the layer's class name, e.g. {'Conv2D': 1e-4, 'Dense': 1e-3}.
      l1: the same for absolute values.
    """

    l2: Mapping[str, float] = dataclasses.field(default_factory=dict)
    l1: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, rates in (("l2", self.l2), ("l1", self.l1)):
            for layer_type, rate in rates.items():
                if not rate >= 0:
                    raise UsageError(f"penalty.{kind}[{layer_type!r}] = {rate}: must be 0 or more")

    def check(self, model: keras.Model) -> None:
        """Refuses a layer type that the model does not have.

        Raises:
          UsageError: naming the types it has.
        """
        known = {type(layer).__name__ for layer in layers(model) if list(_penalised(layer))}
        for layer_type in (*self.l2, *self.l1):
            if layer_type not in known:
                raise UsageError(
                    f"penalty names layers of type {layer_type!r}, but {model.name} has kernels only in "
                    f"{', '.join(sorted(known))}"
                )

    def __call__(self, model: keras.Model) -> tf.Tensor:
        """The penalty as a float32 scalar."""
        total = tf.constant(0.0)
        for layer in layers(model):
            l2, l1 = (rates.get(type(layer).__name__, 0.0) for rates in (self.l2, self.l1))
            for variable in _penalised(layer):
                weight = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
                if l2:
                    total += l2 * tf.reduce_sum(tf.square(weight))
                if l1:
                    total += l1 * tf.reduce_sum(tf.abs(weight))
        return total


def layers(model: keras.Model) -> Iterator[keras.layers.Layer]:
    """All layers of a model, those of models inside it too."""
    for layer in getattr(model, "layers", []):
        yield layer
        yield from layers(layer)


def _penalised(layer: keras.layers.Layer) -> Iterator[keras.Variable]:
    if getattr(layer, "layers", None):
        return  # a model: its layers are asked one by one
    for variable in layer.trainable_variables:
        if variable.path.rsplit("/", 1)[-1] in _PENALISED:
            yield variable

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

from launcher.config.bound_types import check_value
from launcher.errors import UsageError
from launcher.step.layers import owners

# What a penalty is meant for: kernels and embeddings, not biases or the gains and offsets of normalisation.
_PENALISED = ("kernel", "embeddings")


@gin.configurable("penalty")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Penalty:
    """Sum over layers of l2[type] * sum(w ** 2) + l1[type] * sum(|w|), over kernels and embeddings.

    A kernel counts once, by the innermost layer around it whose type is named: {'Dense': 1e-4} means every Dense
    layer, also those inside a block of one's own, {'Block': 1e-4} every kernel inside a Block, and both together mean
    the Dense layers by the one and what else a Block holds by the other.

    Attributes:
      l2: coefficient by the layer's class name, e.g. {'Conv2D': 1e-4, 'Dense': 1e-3}.
      l1: the same for absolute values.
    """

    l2: Mapping[str, float] = dataclasses.field(default_factory=dict)
    l1: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, rates in (("l2", self.l2), ("l1", self.l1)):
            for layer_type, rate in rates.items():
                check_value(f"penalty.{kind}[{layer_type!r}]", rate, rate >= 0, "0 or more")

    def check(self, model: keras.Model) -> None:
        """Raises UsageError for a layer type that the model does not have, naming those it has."""
        known = {layer_type for _, types in _penalised(model) for layer_type in types}
        for layer_type in (*self.l2, *self.l1):
            if layer_type not in known:
                raise UsageError(f"penalty: no {layer_type!r} in {model.name}, but {', '.join(sorted(known))}")

    def __call__(self, model: keras.Model) -> tf.Tensor:
        """The penalty as a float32 scalar."""
        total = tf.constant(0.0)
        for variable, types in _penalised(model):
            l2, l1 = (next((rates[one] for one in types if one in rates), 0.0) for rates in (self.l2, self.l1))
            weight = tf.cast(tf.convert_to_tensor(variable.value), tf.float32)
            if l2:
                total += l2 * tf.reduce_sum(tf.square(weight))
            if l1:
                total += l1 * tf.reduce_sum(tf.abs(weight))
        return total


def _penalised(model: keras.Model) -> Iterator[tuple[keras.Variable, list[str]]]:
    """Each weight that a penalty is meant for, and the types of the layers around it, the innermost first."""
    holders = owners(model)
    for variable in model.trainable_variables:
        if variable.path.rsplit("/", 1)[-1] in _PENALISED:
            layer, _, around = holders[id(variable)]
            yield variable, [type(one).__name__ for one in (layer, *reversed(around[1:]))]  # not by the model itself

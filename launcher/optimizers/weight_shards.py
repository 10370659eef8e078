"""Weights in shards, one for each replica, so that a replica keeps the optimizer's state of its own shard alone.

The optimizer's state is shared out over the replicas of data parallelism (Xu et al. 2020, arXiv 2004.13336; ZeRO stage
1, Rajbhandari et al. 2020, arXiv 1910.02054): each replica updates its shard of a weight, and these are all-gathered.
Shards lie along a dimension of the weight, not in a flat vector: of that, XLA for TPUs would reduce and move the whole.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.machine.replicas import sum_over_replicas

# Elements below which a weight stays whole: a collective would cost more than its state. Vectors do, too: of their sum
# XLA for TPUs would move the whole.
SMALLEST = 1024


Variables = Sequence[keras.Variable]


class StandIn:
    """What a Keras optimizer takes for a variable while one step is traced: a part of it, which has the value given.

    It takes what the optimizer assigns, and changes nothing.
    """

    trainable = True

    def __init__(self, whole: keras.Variable, shape: Sequence[Any], value: tf.Tensor | None = None):
        self.whole, self.shape = whole, tuple(shape)
        self.dtype, self.path, self.name = whole.dtype, whole.path, whole.name
        # Leans on Keras: TensorFlow's optimizers know a variable again by `_unique_id`. Noticed by
        # tests/step/test_shard_optimizer.py. Then: see what `Optimizer._get_variable_index` reads.
        self._unique_id: Any = None if value is None else whole.value._unique_id
        self._value = value

    @property
    def value(self) -> tf.Tensor:
        """The value; zeros where there is none, as when an optimizer is built, which is not on any one replica."""
        return tf.zeros(self.shape, self.dtype) if self._value is None else self._value

    def assign(self, value: tf.Tensor) -> None:
        self._value = tf.cast(value, self.dtype)

    def assign_add(self, delta: tf.Tensor) -> None:
        self.assign(self.value + tf.cast(delta, self.dtype))

    def assign_sub(self, delta: tf.Tensor) -> None:
        self.assign(self.value - tf.cast(delta, self.dtype))


class WeightShard(StandIn):
    """A replica's shard of a weight along one dimension, which a Keras optimizer takes for a variable.

    There are as many as replicas; its shape is that of a shard. Only what `taken` returns has a value.
    """

    def __init__(self, whole: keras.Variable, axis: int, count: int):
        super().__init__(whole, [size // count if place == axis else size for place, size in enumerate(whole.shape)])
        self.axis = axis
        self.count = count
        self._unique_id = f"shard of {id(whole)}"

    def of(self, tensor: tf.Tensor) -> tf.Tensor:
        """This replica's shard of a tensor of the whole's shape; in replica context."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        begin = [replica * size if place == self.axis else 0 for place, size in enumerate(self.shape)]
        return tf.slice(tensor, begin, self.shape)

    def of_replica(self, array: np.ndarray, replica: int) -> np.ndarray:
        """One replica's shard of an array of the whole's shape."""
        return np.split(array, self.count, axis=self.axis)[replica]

    def taken(self) -> WeightShard:
        """The shard with its value on this replica; in replica context."""
        taken = copy.copy(self)
        taken._value = self.of(tf.convert_to_tensor(self.whole))
        return taken


def _converted(
    part: StandIn, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
) -> tf.Tensor:
    return tf.convert_to_tensor(part.value, dtype=dtype, name=name)


tf.register_tensor_conversion_function(StandIn, _converted)


def shard_of(variable: keras.Variable, count: int) -> WeightShard | None:
    """A variable's division among so many replicas: along its first dimension that they divide.

    None where it stays whole: it is small or a vector, no dimension can be divided, or a constraint is on the whole of
    it.
    """
    small = len(variable.shape) < 2 or math.prod(variable.shape) < SMALLEST
    if count == 1 or small or variable.constraint is not None:
        return None
    axes = [axis for axis, size in enumerate(variable.shape) if size % count == 0]
    return WeightShard(variable, axes[0], count) if axes else None


def of_model(model: keras.Model, count: int, assigned: Iterable[keras.Variable] = ()) -> list[WeightShard]:
    """The divisions of a model's weights, also of frozen ones; not of what its forward pass assigns, whole, itself."""
    left = set(map(id, assigned))
    shards = [shard_of(weight, count) for weight in model.weights if id(weight) not in left]
    return [shard for shard in shards if shard is not None]


def norms(variable: keras.Variable | WeightShard, *tensors: tf.Tensor) -> list[tf.Tensor]:
    """The norms of tensors of a variable's shape; of a shard those of the whole, by one small reduction."""
    if not isinstance(variable, WeightShard):
        return [tf.norm(tensor) for tensor in tensors]
    squares = tf.stack([tf.reduce_sum(tf.square(tensor)) for tensor in tensors])
    return tf.unstack(tf.sqrt(sum_over_replicas(squares)))


def whole_of(variable: keras.Variable | WeightShard, tensor: tf.Tensor) -> tf.Tensor:
    """The tensor; of a shard of a variable's, the whole, by one reduction of its size."""
    if not isinstance(variable, WeightShard):
        return tensor
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    parts = [tf.where(tf.equal(replica, place), tensor, tf.zeros_like(tensor)) for place in range(variable.count)]
    return sum_over_replicas(tf.concat(parts, variable.axis))


def means(variable: keras.Variable | WeightShard, *tensors: tf.Tensor, axis: int | None = None) -> list[tf.Tensor]:
    """The means over one axis, or all, of tensors of a variable's shape; of a shard those of the whole.

    They are reduced where the shards lie along that axis; along another one, each replica has its part of them.
    """
    own = [tf.reduce_mean(tensor, axis) for tensor in tensors]
    if not isinstance(variable, WeightShard) or axis not in (None, variable.axis, variable.axis - len(variable.shape)):
        return own
    # Shards are equal in size, so that the mean of their means is the whole's.
    return tf.unstack(sum_over_replicas(tf.stack(own)) / variable.count)


def without_axis(variable: keras.Variable | WeightShard, axis: int) -> SimpleNamespace | WeightShard:
    """The variable, but for an axis over which `means` were taken; whole if its shards lie along it."""
    whole = variable.whole if isinstance(variable, WeightShard) else variable
    axis %= len(whole.shape)
    shape = (*whole.shape[:axis], *whole.shape[axis + 1 :])
    like = SimpleNamespace(shape=shape, dtype=whole.dtype, path=whole.path, name=whole.name)
    if not isinstance(variable, WeightShard) or variable.axis == axis:
        return like
    return WeightShard(like, variable.axis - (axis < variable.axis), variable.count)


def bytes_of(variables: Sequence[Any]) -> int:
    """Bytes of variables, of shards of them, or of whatever has a shape and a dtype, together."""
    return sum(math.prod(variable.shape) * tf.dtypes.as_dtype(variable.dtype).size for variable in variables)

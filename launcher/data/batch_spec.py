"""Specifications of training batches, for programs that are built where the data may not be."""

from typing import Protocol, runtime_checkable

import tensorflow as tf

from launcher.data.pipeline import Data, Shard

BatchSpec = dict[str, tf.TensorSpec]


@runtime_checkable
class SpecifiesBatches(Protocol):
    """`Data` that knows its batches before it is opened."""

    def batch_spec(self, size: int) -> BatchSpec:
        """Shape and dtype of each tensor of a training batch of `size` examples. Reads and checks nothing."""


def of_one_replica(data: Data, shard: Shard) -> BatchSpec:
    """Shapes and dtypes of what `data.train_batches(shard)` gives each replica; data that cannot tell is opened."""
    if isinstance(data, SpecifiesBatches):
        spec = data.batch_spec(shard.per_replica_batch_size)
        return spec | {"image": tf.TensorSpec(spec["image"].shape, tf.uint8)} if shard.as_stored else spec
    data.check()
    return data.train_batches(shard).element_spec

"""Exponential moving average of a model's weights: in float32, moved only by steps that were applied."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from launcher.machine.no_autograph import no_autograph
from launcher.optimizers.weight_shards import WeightShard, shard_of
from launcher.step import gradients


class MovingAverage:
    """Averages of trained weights and moving statistics, float32; nothing at all when there is no decay.

    The decay of update t is min(decay, (1 + t) / (10 + t)), as in TensorFlow's ExponentialMovingAverage, so that the
    first averages are not those of the initial weights. They are shared out among `shards` replicas, as the optimizer's
    state is.
    """

    def __init__(self, variables: Sequence[keras.Variable], decay: float | None, shards: int = 1):
        self._decay = decay
        self._sources = list(variables) if decay is not None else []
        self._shards = [shard_of(source, shards) for source in self._sources]
        self._averages: list[tf.Variable] = []

    def build(self) -> None:
        """Makes the averages, equal to the weights, those of `shards` zero; under the strategy's scope."""
        for source, shard in zip(self._sources, self._shards, strict=True):
            self._averages.append(
                # Assigned by every replica to its own copy, as the weights are.
                tf.Variable(
                    tf.cast(source.value, tf.float32) if shard is None else tf.zeros(shard.shape),
                    trainable=False,
                    name="ema",
                    aggregation=tf.VariableAggregation.NONE,
                )
            )

    @property
    def variables(self) -> list[tuple[keras.Variable, tf.Variable]]:
        """Each variable that is averaged, with its average."""
        return list(zip(self._sources, self._averages, strict=True))

    @property
    def shards(self) -> list[tuple[tf.Variable, WeightShard]]:
        """The averages of which a replica holds a shard, each with the shard of the weight."""
        return [(mine, shard) for mine, shard in zip(self._averages, self._shards, strict=True) if shard is not None]

    @no_autograph
    def update(self, updates: tf.Tensor) -> None:
        """Moves the averages towards the weights, after so many `updates`; replica context, legal in a conditional."""
        if self._decay is None:
            return
        count = tf.cast(updates, tf.float32)
        decay = tf.minimum(tf.constant(self._decay, tf.float32), (1.0 + count) / (10.0 + count))
        for source, shard, average in zip(self._sources, self._shards, self._averages, strict=True):
            weight = source if shard is None else shard.taken()
            average.assign_add((tf.cast(weight.value, tf.float32) - average) * (1.0 - decay))

    @no_autograph
    def swap(self) -> tf.Tensor:
        """Exchanges weights and averages on this replica; in replica context."""
        for source, shard, average in zip(self._sources, self._shards, self._averages, strict=True):
            # A weight of fewer bits comes back as it was; one of more bits, as float32 holds it.
            # Both are read before either is written: tf.cast to a variable's own dtype would give the variable itself.
            weight, averaged = tf.cast(tf.identity(source.value), tf.float32), tf.identity(average)
            if shard is not None:
                weight, (averaged,) = shard.of(weight), gradients.gather([averaged], [shard.axis])
            source.value.assign(tf.cast(averaged, source.value.dtype))
            average.assign(weight)
        return tf.constant(True)

"""How long a worker spends on its own part of a step, without the waiting for others in the reduction."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.step.local_pass import LocalPass, LocalSums


class OwnTime:
    """Seconds so far, in a variable of each worker outside checkpoints.

    The clock is the host's. It is read once the batch is there, and again when the loss and the gradient that is ready
    last have come back from the device.
    """

    def __init__(self) -> None:
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, aggregation=tf.VariableAggregation.NONE)

    def of(self, local_pass: LocalPass, batch: Batch, scale: tf.Tensor, step: tf.Tensor) -> LocalSums:
        """Runs the pass and counts the time until this worker's gradients are there."""
        begun = _clock_after(tf.nest.flatten(batch))
        local = local_pass(batch, scale, step)
        # The first weights' gradient is the last one that a backward pass makes.
        self.seconds.assign_add(_clock_after([local.loss, tf.reshape(local.gradients[0], [-1])[:1]]) - begun)
        return local


def _clock_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.device("CPU:0"), tf.control_dependencies([tf.identity(tensor) for tensor in tensors]):
        return tf.timestamp()

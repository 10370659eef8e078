"""One data set for all replicas of a strategy: each host makes the batches of its own."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import Shard


def distribute_batches(
    strategy: tf.distribute.Strategy,
    make: Callable[[Shard], tf.data.Dataset],
    *,
    global_batch_size: int,
    seed: int = 0,
    start_step: int = 0,
    left_out: LeftOut = ALL_IN,
) -> tf.distribute.DistributedDataset | tf.data.Dataset:
    """An endless distributed data set; a plain one for a single replica on this machine's CPU.

    Args:
      strategy: the strategy whose replicas are fed.
      make: `Shard -> tf.data.Dataset` of one replica's batches.
      global_batch_size: examples of a step over all replicas.
      seed: the run's; evaluation draws nothing.
      start_step: the first step to make training batches for, counted from 0.
      left_out: training batches that no step is trained on.

    Raises:
      UsageError: the batch cannot be divided among the replicas, or is made by Python that runs in this process alone.
    """
    in_this_process = not _drives_other_hosts(strategy)
    first = left_out.batch_of(start_step + 1)

    def host_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        local = context.num_replicas_in_sync // context.num_input_pipelines
        shard = Shard(
            global_batch_size=global_batch_size,
            num_replicas=context.num_replicas_in_sync,
            first_replica=context.input_pipeline_id * local,
            local_replicas=local,
            seed=seed,
            start_step=first - 1,
            in_this_process=in_this_process,
        )
        # Known to be endless, TensorFlow asks no worker whether it has another batch: that would be a
        # collective in every step.
        return left_out.drop_from(make(shard), first=first, parts=local).repeat()

    if _is_this_cpu(strategy):
        # What a strategy iterates over calls functions on other devices for each batch, which costs more processor time
        # than a small model's step, and there is no other device.
        return host_dataset(tf.distribute.InputContext())
    return strategy.distribute_datasets_from_function(host_dataset)


def _is_this_cpu(strategy: tf.distribute.Strategy) -> bool:
    if not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return False
    device = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0])
    return device.job in (None, "localhost") and device.device_type == "CPU"


def _drives_other_hosts(strategy: tf.distribute.Strategy) -> bool:
    """Whether this program feeds a TPU pod, whose hosts run TensorFlow's operations for it and no Python."""
    if not isinstance(strategy, tf.distribute.TPUStrategy):
        return False
    return tf.DeviceSpec.from_string(strategy.extended.worker_devices[0]).job not in (None, "localhost")

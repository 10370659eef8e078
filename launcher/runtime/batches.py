"""One data set for all replicas of a strategy: each host makes the batches of its own."""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import WEIGHT, Batch, Shard
from launcher.machine.no_autograph import no_autograph
from launcher.runtime.traits import Traits

MakeBatches = Callable[[Shard], tf.data.Dataset]  # of one replica, for a part of every global batch


def distribute(
    strategy: tf.distribute.Strategy,
    traits: Traits,
    make: MakeBatches,
    *,
    global_batch_size: int,
    seed: int = 0,
    start_step: int = 0,
    left_out: LeftOut = ALL_IN,
    rows: int = 0,
) -> Iterable:
    """An endless distributed data set; what a `tf.function` may iterate over, too.

    Args:
      make: gives one replica's batches.
      start_step: the first step to make training batches for, counted from 0.
      left_out: training batches that no step is trained on.
      rows: of each replica's batch, as in `Shard`.

    Raises:
      UsageError: the batch cannot be divided among the replicas, or is made by Python that runs in this process alone.
    """

    def host_dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        local = context.num_replicas_in_sync // context.num_input_pipelines
        shard = Shard(
            global_batch_size=global_batch_size,
            num_replicas=context.num_replicas_in_sync,
            first_replica=context.input_pipeline_id * local,
            local_replicas=local,
            seed=seed,
            start_step=start_step,
            in_this_process=not traits.drives_hosts,
            rows=rows,
        )
        return batches_of_host(make, shard, left_out)

    if traits.one_memory:
        # What a strategy iterates over calls functions on other devices for each batch, which costs more processor time
        # than a small model's step (and 0.05 s a replica to begin with), and there is no other memory to copy to.
        count = strategy.num_replicas_in_sync
        dataset = host_dataset(tf.distribute.InputContext(num_replicas_in_sync=count))
        return dataset if count == 1 else _OnThisCpu(strategy, dataset)
    return strategy.distribute_datasets_from_function(host_dataset)


def batches_of_host(make: MakeBatches, shard: Shard, left_out: LeftOut = ALL_IN) -> tf.data.Dataset:
    """An endless data set of the batches of a host's replicas in turn; `start_step` counts batches left out as none."""
    first = left_out.batch_of(shard.start_step + 1)
    batches = make(dataclasses.replace(shard, start_step=first - 1))
    # Known to be endless, TensorFlow asks no worker whether it has another batch: that would be a collective in every
    # step.
    return left_out.drop_from(batches, first=first, parts=shard.local_replicas).repeat()


def share_of_host(make: MakeBatches, hosts: int, shard: Shard) -> tf.data.Dataset:
    """A host's batches where fewer than `hosts` share the global batch of so many, whose data is read as they read it.

    Rows that are no host's stand at the end, copies of others with weight 0.
    """
    share, rows = shard.global_batch_size // hosts, shard.per_replica_batch_size
    begin, end = shard.first_replica * rows, (shard.first_replica + shard.local_replicas) * rows
    first, last = min(begin // share, hosts - 1), min(-(-end // share), hosts)
    parts = [
        make(dataclasses.replace(shard, num_replicas=hosts, first_replica=host, local_replicas=1, rows=0))
        for host in range(first, max(last, first + 1))
    ]
    places = tf.range(begin, end)
    taken = tf.minimum(places, shard.global_batch_size - 1) - first * share

    @no_autograph
    def of_replicas(*batches: Batch) -> Batch:
        whole = {key: tf.gather(tf.concat([one[key] for one in batches], 0), taken) for key in batches[0]}
        whole[WEIGHT] *= tf.cast(places < shard.global_batch_size, tf.float32)
        return {key: tf.reshape(value, [-1, rows, *value.shape[1:]]) for key, value in whole.items()}

    return tf.data.Dataset.zip(tuple(parts)).map(of_replicas, num_parallel_calls=1).prefetch(1).unbatch()


# By `id`, which is what a type that a `tf.function` takes can hold.
_strategies: weakref.WeakValueDictionary[int, tf.distribute.Strategy] = weakref.WeakValueDictionary()


class _Batches(tf.experimental.ExtensionType):
    """An iterator over the batches of all replicas, of which each takes the next in turn."""

    iterator: tf.data.Iterator
    strategy: int

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        return _strategies[self.strategy].experimental_distribute_values_from_function(lambda _: next(self.iterator))


def tf_iterator(batches: Any) -> tf.data.Iterator | None:
    """What is under an iterator of `distribute` and has a state to save; None where devices have some of it."""
    found = batches.iterator if isinstance(batches, _Batches) else batches
    return found if isinstance(found, tf.data.Iterator) else None


@dataclasses.dataclass(frozen=True)
class _OnThisCpu:
    """A data set of the batches of several replicas, one after the other's."""

    strategy: tf.distribute.Strategy
    dataset: tf.data.Dataset

    def __iter__(self) -> Iterator:
        _strategies[id(self.strategy)] = self.strategy
        return _Batches(iter(self.dataset), id(self.strategy))

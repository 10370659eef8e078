"""Traits of a runtime, by which the rest of the house goes, and what a runtime knows of the state that it holds."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.optimizers.weight_shards import WeightShard

_KNOWN = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
    tf.distribute.experimental.CentralStorageStrategy,
)
Variable: TypeAlias = tf.Variable | keras.Variable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traits:
    """How a runtime differs from one device of this process, as far as anybody goes by it.

    Attributes:
      selects: both branches of a conditional are computed, so that a step selects what it keeps.
      compiles: the compiler gets all that runs on a replica as one program; where nothing of it runs, neither are its
        variables, for what is computed eagerly.
      several_processes: its replicas are those of several processes, each of which calls the same in the same order.
      drives_hosts: this process feeds other hosts, which run no Python.
      one_memory: all replicas are on this process's CPU, so that a batch is where it is made.
      on_cpu: its kernels are TensorFlow's for CPUs, which add 16-bit floats up in 16 bits.
      one_copy: all replicas have one copy of each variable, which the first of them changes for all.
      divides_rows: it can leave out what fills up a batch, and divide the real rows.
      own_parts: what is divided among the replicas, a process writes and gets in its own parts.
    """

    selects: bool = False
    compiles: bool = False
    several_processes: bool = False
    drives_hosts: bool = False
    one_memory: bool = False
    on_cpu: bool = False
    one_copy: bool = False
    divides_rows: bool = False
    own_parts: bool = False


def traits_of(strategy: tf.distribute.Strategy) -> Traits:
    """Those of TensorFlow's own strategies, and of what is derived from them; UsageError for others with replicas."""
    if strategy.num_replicas_in_sync > 1 and not isinstance(strategy, _KNOWN):
        raise UsageError(
            f"{type(strategy).__name__} is none of TensorFlow's strategies that train here, nor derived from one: say "
            "how it differs, by TfRuntime(strategy, traits=Traits(...)); see docs/choose_a_strategy.md"
        )
    devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
    is_here = all(device.job in (None, "localhost") for device in devices)
    on_cpu = all(device.device_type == "CPU" for device in devices)
    on_tpu = isinstance(strategy, tf.distribute.TPUStrategy)
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return Traits(
        selects=on_tpu,
        compiles=on_tpu,
        several_processes=several,
        drives_hosts=on_tpu and not is_here,
        one_memory=is_here and on_cpu and not on_tpu,
        on_cpu=on_cpu,
        one_copy=isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What a loop of training steps goes by.

    Attributes:
      microbatches: that a step adds up in a loop.
      seed: of what draws numbers without saying by which.
      clock: tells seconds inside a graph.
    """

    microbatches: int
    seed: int
    clock: Callable[[], tf.Tensor]


class Held(Protocol):
    """The variables of a run, as its runtime knows them."""

    model: keras.Model

    def variables(self) -> dict[str, Variable]:
        """What a checkpoint holds, by its names there."""

    def all_variables(self) -> dict[str, tf.Variable]:
        """What a step may change: also what no checkpoint holds."""

    def shard_of(self, variable: Variable) -> WeightShard | None:
        """Of which shard of a weight a replica's copy of a variable is the state; None where all copies are equal."""

    def weight_shards(self) -> Mapping[int, WeightShard]:
        """By the id of a weight, how it can be divided among the replicas."""

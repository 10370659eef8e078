"""A TPU that nobody has: a true TPUStrategy over devices that exist by name alone.

TensorFlow traces for it the graphs that a real TPU would be given.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import tensorflow as tf

from launcher.config import gin_bindings
from launcher.data.pipeline import Shard
from launcher.machine import strategy as strategy_lib
from launcher.machine.devices import Devices
from launcher.run import loading, plan, session
from launcher.run.recipe import Recipe
from launcher.runtime.tensorflow import TfRuntime

CORES_PER_HOST = 4


@dataclasses.dataclass(frozen=True)
class _Device:
    name: str
    device_type: str = "TPU"


class MadeUpTpu(tf.distribute.cluster_resolver.ClusterResolver):
    """Finds as many cores as it is told to, `CORES_PER_HOST` on each host."""

    def __init__(self, num_cores: int):
        self._num_cores = num_cores

    def cluster_spec(self) -> tf.train.ClusterSpec:
        return tf.train.ClusterSpec({})

    def master(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def num_accelerators(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        return {"TPU": min(self._num_cores, CORES_PER_HOST)}

    def get_tpu_system_metadata(self) -> tf.tpu.experimental.TPUSystemMetadata:
        hosts = -(-self._num_cores // CORES_PER_HOST)
        return tf.tpu.experimental.TPUSystemMetadata(
            num_cores=self._num_cores,
            num_hosts=hosts,
            num_of_cores_per_host=self._num_cores // hosts,
            topology=None,
            devices=tuple(map(_Device, device_names(self._num_cores))),
        )


def device_names(num_cores: int) -> list[str]:
    """The cores in the order of the replicas."""
    places = (divmod(core, CORES_PER_HOST) for core in range(num_cores))
    return [f"/job:worker/replica:0/task:{host}/device:TPU:{index}" for host, index in places]


def with_copies(num_replicas: int) -> tf.distribute.TPUStrategy:
    """A TPUStrategy whose variables have a copy on each of this process's logical CPUs, so that all can be read."""
    made = tf.distribute.TPUStrategy(MadeUpTpu(num_replicas))
    made.extended._tpu_devices[:, 0] = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in range(num_replicas)]
    return made


@contextlib.contextmanager
def strategy(num_replicas: int) -> Iterator[tf.distribute.TPUStrategy]:
    """A TPUStrategy; functions can be traced inside the block, and none of those that it replicates can be run.

    Variables are true distributed variables, but stand on this machine's CPU, and the copies of each one are one and
    the same: to make each of hundreds of variables 32 times takes longer than all the rest, and is TensorFlow's work.
    """
    made = tf.distribute.TPUStrategy(MadeUpTpu(num_replicas))
    made.extended._tpu_devices[:] = "/job:localhost/replica:0/task:0/device:CPU:0"
    with tf.variable_creator_scope(_OneCopy()):
        yield made


class _OneCopy:
    """Gives for the copies of a variable, which TPUStrategy makes right after it and names after it, the same again."""

    def __init__(self) -> None:
        self._last: tf.Variable | None = None

    def __call__(self, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        if "/replica_" not in str(kwargs.get("name")):
            self._last = next_creator(**kwargs)
        return self._last


def resolve(recipe: str, params: Sequence[str], num_replicas: int) -> plan.RunPlan:
    """The recipe's plan for the TPU of a machine that has one of so many cores."""
    loading.import_builtins()
    gin_bindings.load([recipe], params)
    tpu = Devices(tpus=tuple(f"/physical_device:TPU:{index}" for index in range(num_replicas)))
    with mock.patch.object(strategy_lib, "discover", return_value=tpu):
        return loading.Machine(environ={}, strategy="tpu").plan_of(Recipe())


def build(on: tf.distribute.TPUStrategy, resolved: plan.RunPlan) -> session.Session:
    # Keras clears the default graph to count names anew, and with it whoever waits there for variables to be made.
    with mock.patch.object(tf.compat.v1, "reset_default_graph"):
        return session.build_on(TfRuntime(on), resolved)


@dataclasses.dataclass(frozen=True)
class StandIn:
    """Batches of the right shapes in place of data that would have to be prepared first.

    Attributes:
      shapes: of a batch's tensors without their first axis, and their dtypes.
      asked: the shards it has been asked for.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], tf.DType]]
    asked: list[Shard] = dataclasses.field(default_factory=list)

    def batches(self, shard: Shard) -> tf.data.Dataset:
        self.asked.append(shard)
        size = shard.per_replica_batch_size
        batch = {key: tf.zeros([size, *shape], dtype) for key, (shape, dtype) in self.shapes.items()}
        return tf.data.Dataset.from_tensors(batch)


def training_shapes(resolved: plan.RunPlan) -> StandIn:
    """What a training batch of the recipe's data looks like."""
    spec = resolved.data.batch_spec(1)
    return StandIn({key: (tuple(one.shape[1:]), one.dtype) for key, one in spec.items()})


def training(made: session.Session, batches: StandIn) -> tf.types.experimental.ConcreteFunction:
    """The graph of `Trainer.train`, with that of its input around it."""
    size = made.plan.recipe.global_batch_size

    def train() -> Any:
        distributed = made.runtime.batches(batches.batches, global_batch_size=size)
        return made.trainer._loop.run(iter(distributed), tf.constant(3))

    return tf.function(train, autograph=False).get_concrete_function()

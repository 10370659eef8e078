"""TensorFlow's runtime: a `tf.distribute` strategy, Launcher's or one that a user has made."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.machine.array_parts import Source
from launcher.machine.replicas import sum_over_replicas
from launcher.runtime import batches, initial_values
from launcher.runtime.summation import InOrder
from launcher.runtime.traits import Held, Training, Traits, Variable, traits_of
from launcher.runtime.workers import Workers


class TfRuntime:
    """A `Runtime` on the replicas of a strategy, whose state is in TensorFlow's variables.

    Args:
      traits: of a strategy that is none of TensorFlow's own, nor derived from one.
    """

    def __init__(self, strategy: tf.distribute.Strategy, traits: Traits | None = None):
        self.strategy, self.traits = strategy, traits or traits_of(strategy)
        self.num_replicas = strategy.num_replicas_in_sync
        self.workers = Workers(
            lambda value: self.call(sum_over_replicas, tf.constant(value)),
            self.num_replicas,
            are_several=self.traits.several_processes,
        )
        self.state = TfState(self)
        self._functions: dict[Any, Any] = {}

    @property
    def host(self) -> TfRuntime:
        return self

    def scope(self) -> contextlib.AbstractContextManager[None]:
        # The strategy's own variables of one copy would be assigned by all replicas together, which no conditional may.
        strategy = None if self.traits.one_copy else self.strategy
        return initial_values.scope(strategy, from_host=self.traits.compiles)

    def batches(self, make: batches.MakeBatches, **about: Any) -> Iterable:
        return batches.distribute(self.strategy, self.traits, make, **about)

    def on_replicas(self, function: Callable[..., Any], *, in_order: bool = False) -> Any:
        """A `tf.function` that runs a function on every replica, `in_order` as `summation` has it."""

        # Not a lambda: TPUStrategy makes a name of the function's, which its own checks refuse for "<lambda>".
        def run(*args: Any) -> Any:
            return self.strategy.run(function, args=args)

        return self.in_order(run) if in_order else tf.function(run, autograph=False)

    def in_order(self, function: Callable[..., Any]) -> Any:
        """A `tf.function` with one order of sums."""
        if self.traits.compiles:  # sums have one anyway
            return tf.function(function, autograph=False)
        return InOrder(function, self.traits.on_cpu)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function on every replica; returns what all have alike, in NumPy arrays. It is traced once."""
        if function not in self._functions:
            self._functions[function] = self.on_replicas(function)
        return tf.nest.map_structure(np.asarray, self.alike(self._functions[function](*args)))

    def alike(self, values: Any) -> Any:
        """The first replica's part of what `strategy.run` gives."""
        return tf.nest.map_structure(lambda value: self.strategy.experimental_local_results(value)[0], values)

    def loop(self, function: Callable[[Batch], tf.Tensor], training: Training | None = None) -> TfLoop:
        return TfLoop(self, function, training)

    def rows(self, function: Callable[[Batch], Any]) -> TfRows:
        return TfRows(self, function)

    def batch_of(self, inputs: Mapping[str, np.ndarray]) -> Any:
        def part(context: tf.distribute.experimental.ValueContext) -> dict[str, tf.Tensor]:
            each, number = context.num_replicas_in_sync, context.replica_id_in_sync_group
            return {name: tf.constant(np.split(array, each)[number]) for name, array in inputs.items()}

        return self.strategy.experimental_distribute_values_from_function(part)


class TfState:
    """The `RunState` of a strategy's variables."""

    first_values: initial_values.FirstValues | None = None
    averages: Mapping[int, Variable] = {}
    is_away = False

    def __init__(self, runtime: TfRuntime):
        self._runtime, self._strategy = runtime, runtime.strategy
        self._held: Held | None = None

    def hold(self, held: Held) -> None:
        self._held = held

    def read(self, variable: Variable) -> np.ndarray:
        shard = None if self._held is None else self._held.shard_of(variable)
        if shard is None:
            return self._whole(variable)
        copies, first = self.copies(variable), self._replicas[0]
        if not self._runtime.traits.several_processes:
            return np.concatenate([copy.numpy() for copy in copies], shard.axis)
        mine = self._strategy.experimental_distribute_values_from_function(
            lambda context: copies[context.replica_id_in_sync_group - first].read_value()
        )
        return np.concatenate(list(self._runtime.call(_stack_of_replicas, mine)), shard.axis)

    read_part = read

    def _whole(self, variable: Variable) -> np.ndarray:
        """In the variable's own memory where that is the host's: what changes the variable later makes a copy first."""
        own = plain(variable)
        read = getattr(self.copies(variable)[0], "read_value_no_copy", None) if self._runtime.traits.on_cpu else None
        if read is None or own.synchronization == tf.VariableSynchronization.ON_READ:
            return np.asarray(tf.convert_to_tensor(own))
        return np.asarray(read())

    def write(self, variable: Variable, value: np.ndarray | Source) -> None:
        if callable(value):
            value = value(None)
        shard = None if self._held is None else self._held.shard_of(variable)
        if shard is None:
            variable.assign(value)
            return
        for replica, copy in zip(self._replicas, self.copies(variable), strict=True):
            copy.assign(shard.of_replica(value, replica))

    def take(self) -> None:
        return

    def bring_home(self, but: Iterable[Variable] = ()) -> None:
        return

    def copies(self, variable: Variable) -> Sequence[tf.Variable]:
        """Those of this process's replicas."""
        return self._strategy.experimental_local_results(plain(variable))

    @functools.cached_property
    def _replicas(self) -> list[int]:
        """The numbers of this process's replicas, in the order of its copies of a variable."""
        numbers: list[int] = []

        def note(context: Any) -> int:
            numbers.append(context.replica_id_in_sync_group)
            return context.replica_id_in_sync_group

        self._strategy.experimental_distribute_values_from_function(note)
        return numbers


class TfLoop:
    """A `Loop` that is one `tf.function`; see `Runtime.loop`."""

    def __init__(self, runtime: TfRuntime, function: Callable[[Batch], tf.Tensor], training: Training | None):
        self._runtime, self._function, self._training = runtime, function, training
        self.run = runtime.in_order(self._run_batches_in_graph)

    def trace(self, batches: Any) -> tf.Graph:
        return self.run.get_concrete_function(batches, tf.constant(1, tf.int32)).graph

    def begin(self) -> Callable[[Iterator, int], np.ndarray]:
        return lambda batches, count: self.run(batches, tf.constant(count, tf.int32)).numpy()

    def _run_batches_in_graph(self, batches: Iterator, count: tf.Tensor) -> tf.Tensor:
        if self._training is not None:
            tf.random.set_seed(self._training.seed)  # of this graph alone

        def one_batch(
            index: tf.Tensor, rows: tf.TensorArray, previous: tf.Tensor
        ) -> tuple[tf.Tensor, tf.TensorArray, tf.Tensor]:
            batch, *waited = self._next(batches, previous)
            row = self._runtime.alike(self._runtime.strategy.run(self._on_replica, args=(batch,)))
            row = tf.concat([row, waited], axis=0) if waited else row
            return index + 1, rows.write(index, row), row[0]

        rows = tf.TensorArray(tf.float32, size=count, element_shape=None)
        start = (tf.constant(0), rows, tf.constant(0.0))
        _, rows, _ = tf.while_loop(lambda index, *_: index < count, one_batch, start, maximum_iterations=count)
        return rows.stack()

    def _on_replica(self, batch: Batch) -> tf.Tensor:
        # Of a `tf.function`, MirroredStrategy would compile all replicas together.
        return self._function(batch)

    def _next(self, batches: Iterator, previous: tf.Tensor) -> tuple[Any, ...]:
        """The next batch, and in training for how many seconds it was waited for."""
        if self._training is None:
            return (next(batches),)
        clock = self._training.clock
        # The clock starts when the previous step has ended, so that only real waiting is counted.
        with tf.control_dependencies([previous]):
            started = clock()
        with tf.control_dependencies([started]):
            batch = next(batches)
        with tf.control_dependencies(tf.nest.flatten(self._runtime.strategy.experimental_local_results(batch))):
            return batch, tf.cast(clock() - started, tf.float32)


class TfRows:
    """`Rows` that a `tf.function` gives; every new shape is traced anew, as a TPU compiles what has one."""

    def __init__(self, runtime: TfRuntime, function: Callable[[Batch], Any]):
        self._runtime, self._function = runtime, function
        self.run = tf.function(self._in_graph, autograph=False)

    def trace(self, batches: Any) -> tf.Graph:
        return self.run.get_concrete_function(batches.element_spec).graph

    def begin(self) -> Callable[[Any], Any]:
        return lambda batch: tf.nest.map_structure(self._joined, self.run(batch))

    def _in_graph(self, batch: Any) -> Any:
        found, runtime = self._runtime.strategy.run(self._on_replica, args=(batch,)), self._runtime
        if not runtime.traits.several_processes:
            return found
        return tf.nest.map_structure(lambda part: runtime.strategy.gather(part, axis=0), found)

    def _on_replica(self, batch: Batch) -> Any:
        return self._function(batch)

    def _joined(self, value: Any) -> np.ndarray:
        if self._runtime.traits.several_processes:
            return value.numpy()
        return np.concatenate([part.numpy() for part in self._runtime.strategy.experimental_local_results(value)])


def plain(variable: Variable) -> Any:
    """TensorFlow's own variable of one of Keras's; another as it is."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _stack_of_replicas(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_gather(value[None], axis=0)

"""A third runtime: one device, whose steps are not traced but done, one operation after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data.order import ALL_IN
from launcher.data.pipeline import Shard
from launcher.runtime.batches import batches_of_host
from launcher.runtime.tensorflow import TfRuntime
from launcher.runtime.traits import Traits
from launcher.runtime.workers import Workers


class EagerRuntime:
    traits, num_replicas = Traits(one_memory=True, on_cpu=True), 1

    def __init__(self) -> None:
        self.host = TfRuntime(tf.distribute.OneDeviceStrategy("CPU:0"))
        self.workers, self.scope, self.state = (
            Workers(np.asarray, 1, are_several=False),
            self.host.scope,
            self.host.state,
        )

    def batches(self, make: Callable[[Shard], tf.data.Dataset], *, left_out: Any = ALL_IN, **about: Any) -> Iterable:
        return batches_of_host(make, Shard(**{"seed": 0, **about}), left_out)

    def loop(self, function: Callable[[Any], tf.Tensor], training: Any = None) -> EagerLoop:
        return EagerLoop(function, training is not None)

    def rows(self, function: Callable[[Any], Any]) -> EagerLoop:
        return EagerLoop(function, of_rows=True)

    def batch_of(self, inputs: Mapping[str, np.ndarray]) -> Any:
        return {name: tf.constant(rows) for name, rows in inputs.items()}


class EagerLoop:
    def __init__(self, function: Callable[[Any], Any], trains: bool = False, of_rows: bool = False):
        self._function, self._waits, self._of_rows = function, [0.0] * trains, of_rows

    def trace(self, batches: Any) -> tf.Graph:
        return tf.function(self._function, autograph=False).get_concrete_function(batches.element_spec).graph

    def begin(self) -> Callable[..., Any]:
        return self._rows if self._of_rows else self._run

    def _rows(self, batch: Any) -> Any:
        return tf.nest.map_structure(np.asarray, self._function(batch))

    def _run(self, batches: Iterator, count: int) -> np.ndarray:
        return np.stack([[*self._function(next(batches)).numpy(), *self._waits] for _ in range(count)])

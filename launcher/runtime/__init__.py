"""Runtime: replicas that run one function together, and hold a run's state; TensorFlow's strategies are the usual one.

What is above holds a `Runtime` and asks it for its `Traits`; which one it is matters to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from launcher.data.pipeline import Batch
from launcher.machine.array_parts import Part, Source
from launcher.runtime.batches import MakeBatches
from launcher.runtime.initial_values import FirstValues
from launcher.runtime.traits import Held, Training, Traits, Variable
from launcher.runtime.workers import Workers


class Loop(Protocol):
    """A function that the replicas run on one batch after another."""

    def trace(self, batches: Any) -> tf.Graph:
        """Makes the program for these batches and runs nothing; returns the graph of what a process's replicas do.

        Raises:
          UsageError: the function is wrong, or the devices cannot run it.
        """

    def begin(self) -> Callable[[Iterator, int], np.ndarray]:
        """What runs the next so many batches, with the state as it is now: float32 [batches, numbers of a row]."""


class Rows(Protocol):
    """A function whose results have a row for each of a batch."""

    def trace(self, batches: Any) -> tf.Graph:
        """As of a `Loop`."""

    def begin(self) -> Callable[[Any], Any]:
        """What gives a batch's results, in NumPy arrays, the rows of all replicas in their order."""


class RunState(Protocol):
    """Values of a run's variables, and where they lie: in TensorFlow's variables, or on devices of the runtime's own.

    They are in one place at a time. On devices they go with the next steps; they come home when somebody is to see or
    to change the variables by themselves. `read` answers wherever they are.

    Attributes:
      first_values: of the weights of which each device has a part; None where each has all.
      averages: by the id of a weight for which an evaluation on its devices takes the average, that.
      is_away: whether the values are on devices of its own.
    """

    first_values: FirstValues | None
    averages: Mapping[int, Variable]
    is_away: bool

    def hold(self, held: Held) -> None:
        """Takes the variables of a run, once they are made."""

    def read(self, variable: Variable) -> np.ndarray:
        """A copy of a variable's value; of one in shards, put together by all processes."""

    def read_part(self, variable: Variable) -> np.ndarray | Part:
        """A copy of what this process's devices hold of it, where the runtime has `own_parts`; else the same."""

    def write(self, variable: Variable, value: np.ndarray | Source) -> None:
        """Sets a variable on all replicas; what is divided may be made when it is due."""

    def take(self) -> None:
        """Has devices of its own hold the values, if it has any; the variables are not looked at from then."""

    def bring_home(self, but: Iterable[Variable] = ()) -> None:
        """Has TensorFlow's variables the values that the last step gave them, but for some that are about to be set."""


class Runtime(Protocol):
    """Replicas of one function.

    Attributes:
      traits: how it differs from one device.
      num_replicas: of all processes.
      workers: the processes, to be asked between two loops.
      state: of a run on it.
      host: the `TfRuntime` of what runs beside the steps; itself, if it is that.
    """

    traits: Traits
    num_replicas: int
    workers: Workers

    @property
    def state(self) -> RunState: ...

    @property
    def host(self) -> Any: ...

    def scope(self) -> AbstractContextManager[None]:
        """In which a run's variables are made."""

    def batches(self, make: MakeBatches, **about: Any) -> Iterable:
        """The batches of this process's replicas, without end; for arguments and errors, see `batches.distribute`."""

    def loop(self, function: Callable[[Batch], tf.Tensor], training: Training | None = None) -> Loop:
        """A loop over a function of one replica's batch: float32 [n], what all replicas have alike.

        Args:
          training: given where it changes the state; of each row, one number more is the seconds for which its batch
            was waited for.
        """

    def rows(self, function: Callable[[Batch], Any]) -> Rows:
        """The same for a function that gives tensors, in any structure, with a row for each of its batch."""

    def batch_of(self, inputs: Mapping[str, np.ndarray]) -> Any:
        """A batch for `rows`, of rows divisible by the replicas; of one process."""

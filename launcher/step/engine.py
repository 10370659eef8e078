"""What runs a trainer's steps in the place of TensorFlow's runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import Batch, Shard
from launcher.machine.array_parts import Part
from launcher.step.initial_values import FirstValues
from launcher.step.workers import Workers


class Engine(Protocol):
    """Runs the step of a session on devices of its own, one a replica.

    A run's state is in one place at a time: in TensorFlow's variables, or on the engine's devices. It goes there with
    the next steps, and comes home when somebody is to see or to change the variables.

    Attributes:
      num_replicas: of all processes.
      workers: the processes, to be asked between two loops.
      holds: whether the state is on the engine's devices.
      first_values: of the weights of which each device has a part; None where each has all.
      averages: by the name of a weight that an evaluation is to take the average of, the average's name.
    """

    num_replicas: int
    workers: Workers
    holds: bool
    first_values: FirstValues | None
    averages: Mapping[str, str]

    def distribute(
        self, make: Callable[[Shard], tf.data.Dataset], *, left_out: LeftOut = ALL_IN, **batches: Any
    ) -> Iterable:
        """The batches of this process's replicas, by the arguments of `distribute_batches`."""

    def prepare(self) -> tf.Graph:
        """Makes the program; returns the graph of one replica's step, and runs nothing."""

    def run(self, batches: Iterator, num_steps: int) -> np.ndarray:
        """float32 [steps, numbers of a report + 1]: the report of each step, and how long it waited for its batch."""

    def forward(
        self, function: Callable[[Batch], tf.Tensor], batches: Iterable, *, of_rows: bool
    ) -> Callable[[], Callable[[Iterator, int], Any]]:
        """Makes the program of an evaluation, and runs nothing.

        Args:
          function: of one replica's batch, in replica context: float32 [n], sums over all replicas; or of its rows.
          batches: of `distribute`.

        Returns:
          What takes the weights that the state has now, wherever it is, and returns what gives the sums of so many
          batches, float32 [batches, n]; of rows, of one batch its "example", its "weight" and the result, of all
          replicas.

        Raises:
          UsageError: the devices cannot run it.
        """

    def answer(self, function: Callable[[dict[str, tf.Tensor]], Any], inputs: Mapping[str, np.ndarray]) -> Any:
        """What a function makes of all rows of some inputs, with the weights that the state had at the first call.

        Args:
          function: of one replica's rows, in replica context; returns tensors in any structure, with a row for each.
          inputs: rows divisible by the replicas. Each new shape is compiled anew.

        Raises:
          UsageError: the devices cannot run it.
        """

    def take_state(self) -> None:
        """Puts the state on the devices, array by array, unless it is there."""

    def value(self, name: str) -> np.ndarray:
        """The whole value that the devices hold of a variable, by its name in a checkpoint; a copy."""

    def own(self, name: str) -> np.ndarray | Part:
        """What this process's devices hold of it; a copy."""

    def put(self, name: str, value: np.ndarray) -> None:
        """Sets what the devices hold of a variable."""

    def bring_home(self, but: Collection[str] = ()) -> None:
        """Puts all values that the devices hold into TensorFlow's variables, but for those, and forgets them."""

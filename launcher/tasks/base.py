"""What a task is: the seam between the launcher and the thing that is learned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import Data, Shard
from launcher.errors import UsageError


class Task(Protocol):
    """A model, its data and its loss. Any object with these three methods is a task; nothing is inherited.

    A task may also have any of these:

    - `nominal_weight_per_example`, a number (default 1.0): about how much weight one example carries, e.g. the tokens
      of a sentence. It only keeps scaled gradients near the middle of their range; the true weight is what the mean is
      taken over.
    - `check()`: raises UsageError when something it needs is missing; called before anything is written.
    - `notes(model, accelerator) -> list[str]`: what a person should know, printed with the plan. The accelerator is
      "cpu", "gpu" or "tpu".
    - `finish_metrics(means) -> metrics`: the evaluation's metrics from their means over all examples, for those that
      are no means themselves, such as a perplexity.
    - `evaluation_metrics`, names: those that every evaluation has beyond the names that training has.
    - `assets() -> {file name: content}`: what belongs to the weights, such as a vocabulary; kept in MODEL_DIR/assets.
    - `use_assets(assets)`: takes them from there instead of making them.
    - the methods of `Decodes`, to be evaluated by what the model writes.
    - the methods of `ReadsLines`, for `--mode=predict`, and of `Serves`, for `--mode=export`.
    """

    def data(self) -> Data:
        """Where batches come from; see `launcher.data.pipeline`."""

    def model(self) -> keras.Model:
        """Builds the Keras model. Called once, under the strategy's scope and the dtype policy of the run."""

    def loss(
        self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool
    ) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
        """Sums over one replica's batch, never means: the launcher divides by the weight of the global batch.

        Args:
          model: what `model()` returned.
          batch: tensors of this replica; `batch["weight"]` (float32 [batch]) is 0 for padding.
          training: whether this is a training step.

        Returns:
          (sum of the weighted losses, sum of the weights, sums of the weighted metrics by name), all float32 scalars.
        """


class Score(NamedTuple):
    """What decoded outputs are worth.

    Attributes:
      metrics: by name.
      notes: lines for a person, such as how a metric is defined and samples.
    """

    metrics: dict[str, float]
    notes: list[str]


@runtime_checkable
class Decodes(Protocol):
    """A task that is evaluated by what its model writes, too."""

    def num_decode_examples(self, last: bool) -> int:
        """How many examples an evaluation decodes; `last`: the one at the end, or the only one. 0 for none."""

    def decode_batches(self, shard: Shard) -> tf.data.Dataset:
        """As `Data.eval_batches`, of the examples to decode; "example", int64 [b], tells them apart."""

    def generate(self, model: keras.Model, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        """What the model writes, int32 [b, length] of static length, in replica context and without collectives."""

    def score(self, examples: np.ndarray, outputs: np.ndarray) -> Score:
        """Judges all outputs [n, length] of the examples, int64 [n] in ascending order; the same on every worker."""


@runtime_checkable
class ReadsLines(Protocol):
    """A task whose model answers a line of text with a line of text."""

    def encode_lines(self, lines: Sequence[str]) -> dict[str, np.ndarray]:
        """A batch for `generate`, one row a line."""

    def generate(self, model: keras.Model, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        """See `Decodes`."""

    def decode_lines(self, outputs: np.ndarray) -> list[str]:
        """The text of each output."""


class Served(NamedTuple):
    """What a SavedModel answers.

    Attributes:
      input_name: of the one input, string [n].
      function: string [n] to a dict of tensors whose first axis is n.
      resources: objects that hold the tables and variables, beyond the model's, that the function reads.
    """

    input_name: str
    function: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    resources: list[Any]


@runtime_checkable
class Serves(Protocol):
    """A task that can be exported."""

    def served(self, model: keras.Model) -> Served:
        """Everything from the bytes of a request to the answer, as TensorFlow operations."""


Assets = Mapping[str, bytes]


def check_builder(binding: str, model: Callable[..., Any], example: str) -> None:
    """Raises UsageError unless a bound model is a builder, which is called later, under the strategy's scope."""
    if isinstance(model, keras.Model) or not callable(model):  # a built model can be called, too
        raise UsageError(
            f"{binding} must be a reference without parentheses, such as {example}, got {type(model).__name__}"
        )

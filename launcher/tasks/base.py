"""What a task is: the seam between the launcher and the thing that is learned."""

from __future__ import annotations

from typing import Protocol

import keras
import tensorflow as tf

from launcher.data.pipeline import Data


class Task(Protocol):
    """A model, its data and its loss. Any object with these three methods is a task; nothing is inherited.

    A task may also have the attribute `nominal_weight_per_example` (default 1.0): about how much weight one
    example carries, e.g. the tokens of a sentence. It only keeps scaled gradients near the middle of their
    range; the true weight is what the mean is taken over.
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

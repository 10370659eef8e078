"""Evaluation by what the model writes: under the strategy, every example once on any topology."""

from __future__ import annotations

import math

import keras
import numpy as np
import tensorflow as tf

from launcher.data.distributed import distribute_batches
from launcher.step.train_step import Batch
from launcher.tasks.base import Decodes, Score


class DecodingEvaluator:
    """Decodes the task's examples, each replica its own, and scores all outputs on every worker.

    Args:
      strategy: where replicas live.
      task: what is decoded and how it is judged.
      model: the model being trained.
      global_batch_size: examples of one batch over all replicas.
      jit_compile: compile what each replica does with XLA.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        task: Decodes,
        model: keras.Model,
        global_batch_size: int,
        jit_compile: bool = False,
    ):
        self._strategy = strategy
        self._task = task
        self._model = model
        self._global_batch_size = global_batch_size
        self._generate = tf.function(self._outputs, jit_compile=True) if jit_compile else self._outputs
        self._run_batch = tf.function(self._run_batch_in_graph)
        self._batches: tf.distribute.DistributedDataset | None = None

    def evaluate(self, last: bool) -> Score | None:
        """Decodes and scores with the current weights; None if the task has nothing to decode now."""
        count = self._task.num_decode_examples(last)
        if not count:
            return None
        if self._batches is None:
            self._batches = distribute_batches(
                self._strategy, self._task.decode_batches, global_batch_size=self._global_batch_size
            )
        batches = iter(self._batches)
        parts = [self._run_batch(next(batches)) for _ in range(math.ceil(count / self._global_batch_size))]
        examples, weight, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
        real = np.flatnonzero(weight > 0)
        order = real[np.argsort(examples[real])]
        return self._task.score(examples[order], outputs[order])

    def _run_batch_in_graph(self, batch: Batch) -> tuple[tf.Tensor, ...]:
        outputs = self._strategy.run(self._on_replica, args=(batch,))
        return tuple(self._strategy.gather(part, axis=0) for part in (batch["example"], batch["weight"], outputs))

    def _on_replica(self, batch: Batch) -> tf.Tensor:
        # Of a `tf.function`, MirroredStrategy would compile all replicas together.
        return self._generate(batch)

    def _outputs(self, batch: Batch) -> tf.Tensor:
        return self._task.generate(self._model, batch)

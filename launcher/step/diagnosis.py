"""Diagnosis of steps already taken: whose gradients and which example were not finite, and weights that are means."""

from typing import Any

import numpy as np
import tensorflow as tf

from launcher.data.kinds import DataOfNumbers, reads_once
from launcher.data.pipeline import WEIGHT, Batch, Data
from launcher.errors.user_code import defined_at
from launcher.reporting.units import first
from launcher.step import gradients
from launcher.step.trainer import Trainer
from launcher.tasks.base import loss_sums, mean_weight


class Diagnosis:
    """Looks once more at batches that a trainer has seen, and changes nothing. All workers call its methods together.

    The trainer's weights, loss scale and step are used as they are.
    """

    def __init__(self, trainer: Trainer, data: Data):
        self._trainer = trainer
        self._data = data
        self._float_keys: tuple[str, ...] = ()
        self._host = trainer.runtime.host

    def non_finite_gradients(self, step: int | None = None, scale: float | None = None) -> str:
        """Says which layers' gradients are not finite on the batch of a skipped step, and on which replica.

        By default of the last step, since which the weights have not changed, with the present loss scale.
        """
        if reads_once(self._data):
            return "unknown layers: the generator has no batch twice"
        counters, last, present = self._trainer.counters, self._trainer.step, self._trainer.loss_scale
        step = last if step is None else step
        batch = self._batch_of(step)
        counters.step.assign(step - 1)  # at home since there is a batch
        counters.scale.scale.assign(present if scale is None else scale)
        rows = self._host.call(self._trainer.replica_step.non_finite, batch)
        counters.step.assign(last)
        counters.scale.scale.assign(present)
        names = [variable.path for variable in self._trainer.model.trainable_variables]
        for replica, row in enumerate(rows):
            found = [name for name, bad in zip(names, row, strict=True) if bad]
            if found:
                where = f"on replica {replica}" if replica + 1 < len(rows) else "only in their sum over the replicas"
                return f"{first(found)}, {where}"
        return "no layer when computed again"

    def check_weight(self, weight: float) -> None:
        """Refuses, by UsageError, a task whose loss() returns a mean for the weight, which does not grow with the
        batch.

        A weight, of the step taken last, near the number of examples or above it, such as one of tokens, is a sum.
        Below it, loss() is asked again for each half of the batch: sums of weights add up to that of the batch, means
        to twice as much.
        """
        examples = self._trainer.config.global_batch_size
        is_own_step = self._trainer.task.step_assigns is not None  # which is weighed by its examples
        if is_own_step or not 0 < weight < 0.75 * examples or reads_once(self._data):
            return
        sums = self._host.call(self._weight_of_whole_and_halves, self._batch_of(self._trainer.step))
        if sums[1] > 1.5 * sums[0]:
            raise mean_weight(defined_at(self._trainer.task.loss), weight, examples)

    def non_finite_in_batch(self, step: int) -> str | None:
        """Says where the batch of a step holds numbers that are not finite; None if it holds none."""
        if reads_once(self._data):
            return None
        # Of key and row of the global batch.
        found = np.argwhere(self._host.call(self._flag_rows, self._batch_of(step)))
        if not len(found):
            return None
        key, row = self._float_keys[found[0][0]], int(found[0][1])
        position = (self._trainer.left_out.batch_of(step) - 1) * self._trainer.config.global_batch_size + row
        if not isinstance(self._data, DataOfNumbers):
            return f"{key!r} in row {row} of its batch is not finite"
        example = self._data.example_at(position, self._trainer.config.seed)
        return f"{key!r} of training example {example} is not finite (row {row} of its batch; both count from 0)"

    def _batch_of(self, step: int) -> Any:
        """The global batch of a step, counted from 1, made once more."""
        self._trainer.runtime.state.bring_home()
        return next(self._trainer.batches(self._data, step - 1, runtime=self._host))

    def _flag_rows(self, batch: Batch) -> tf.Tensor:
        """float32 [keys with floating-point values, rows of the global batch]: 1 where a value is not finite."""
        self._float_keys = tuple(sorted(key for key, value in batch.items() if value.dtype.is_floating))
        flat = [tf.reshape(batch[key], [batch[key].shape[0], -1]) for key in self._float_keys]
        flags = tf.stack([tf.reduce_any(~tf.math.is_finite(value), axis=1) for value in flat])
        rows = gradients.of_each_replica(tf.cast(flags, tf.float32))
        return tf.reshape(tf.transpose(rows, [1, 0, 2]), [len(self._float_keys), -1])

    def _weight_of_whole_and_halves(self, batch: Batch) -> tf.Tensor:
        middle = batch[WEIGHT].shape[0] // 2
        halves = ({key: value[part] for key, value in batch.items()} for part in (slice(middle), slice(middle, None)))
        # A batch of one row has no halves.
        parts = [batch, *halves] if middle else [batch, batch]
        whole, *rest = [loss_sums(self._trainer.task, self._trainer.model, part, False)[1] for part in parts]
        (sums,) = gradients.reduce_sum([tf.stack([whole, tf.add_n(rest)])])
        return sums

"""Exact evaluation: every example counts once, whatever the topology and the batch size."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.data.kinds import DataOfSteps
from launcher.data.pipeline import Batch, Shard, held, rows_of_replica
from launcher.errors import UsageError
from launcher.machine.no_autograph import call_converted
from launcher.reporting.sinks import Samples
from launcher.run.actions.base import Action, Event, tell
from launcher.run.loop import Loop
from launcher.run.plan import RunPlan
from launcher.runtime import Loop as DeviceLoop
from launcher.runtime import Rows, Runtime
from launcher.runtime.batches import MakeBatches
from launcher.step import gradients
from launcher.step.layers import activity_penalties
from launcher.step.local_pass import num_replicas
from launcher.tasks.base import Decodes, Score, ShowsSamples, Task, folded, loss_sums, metric_results, real_rows
from launcher.tasks.cross_entropy import using


class Evaluator:
    """Runs the task's loss over the evaluation examples, padded to whole batches with weight 0."""

    def __init__(self, runtime: Runtime, model: keras.Model, plan: RunPlan):
        self._runtime, self._model = runtime, model
        self._task: Task = plan.recipe.task
        self._data = plan.data
        self._global_batch_size = size = plan.eval_batch_size
        make, rows = self._data.eval_batches, partial(rows_of_replica, self._data, size)
        self._batches = _Batches(runtime, "evaluation", make, size, rows, lambda on: on.loop(self._replica_sums))
        self._loss_chunks = plan.loss_chunks
        self._metric_names: tuple[str, ...] = ()
        self._metric_sizes: list[int] = []
        self._forward = _compiled(self._sums, plan, runtime)
        self._loop = Loop()
        self.notes: list[str] = []
        self._samples: Samples = ()
        self._sample_batch: Batch | None = None
        self._decoding = DecodingEvaluator(runtime, model, plan) if isinstance(self._task, Decodes) else None

    def needs_variables(self, last: bool) -> bool:
        """Whether an evaluation looks at TensorFlow's variables, and not only at what a runtime's devices hold.

        With parts of weights on the devices there are no samples, as nobody would put the whole together for them.
        """
        self.notes = []
        runs = [self._batches]
        if self._decoding is not None and self._decoding.is_due(last):
            runs.append(self._decoding.batches)
        for one in runs:
            one.settle(self.notes)
        shows = isinstance(self._task, ShowsSamples) and self._runtime.state.first_values is None
        return shows or any(one.runtime is self._runtime.host for one in runs)

    def evaluate(
        self, last: bool = True, agree: Callable[[float], float] = lambda seconds: 0.0, told: Sequence[Action] = ()
    ) -> dict[str, float]:
        """Evaluates the current weights, after `needs_variables`.

        Args:
          last: whether this is the evaluation after the last step; tasks may do more then.
          agree: called by all workers between two loops on the device, with the seconds of the last one; returns their
            mean. What it raises ends the evaluation.
          told: who is told of each batch; there is one in each loop then.

        Returns:
          `loss` and the task's metrics, means over all evaluation examples or made from these, metrics of what the
          model wrote if the task decodes, and `examples`, the total weight. `notes` are what a person should know of
          this evaluation then.
        """
        num_examples = self._data.num_eval_examples
        if not num_examples:
            raise UsageError(f"this data set has no evaluation examples (num_eval_examples = {num_examples})")
        batches, run = self._batches.begin(self.notes)
        tables: list[np.ndarray] = []
        data, size = self._data, self._global_batch_size
        left = data.eval_steps(size) if isinstance(data, DataOfSteps) else math.ceil(num_examples / size)
        while left:
            self._loop.choose(agree(self._loop.seconds))
            count = 1 if told else min(left, self._loop.steps)
            tell(told, Event.BEFORE_EVALUATION_BATCH, len(tables))
            with self._loop.timed(count):
                tables.append(run(batches, count))
            left -= count
            tell(told, Event.AFTER_EVALUATION_BATCH, len(tables) - 1, lambda: self._result(tables)[0])
        result, weight = self._result(tables)
        if self._decoding is not None and (score := self._decoding.evaluate(last, agree)):
            result.update(score.metrics)
            self.notes += score.notes if last else ()
            self._samples = score.samples
        result["examples"] = weight
        return result

    def _result(self, tables: Sequence[np.ndarray]) -> tuple[dict[str, float], float]:
        """Loss and metrics over the batches of some loops, and their weight."""
        # float64 on the host: counts stay exact past 2**24 examples.
        table = np.concatenate(tables).astype(np.float64)
        loss, weight = table[:, :2].sum(axis=0).tolist()
        ends = np.cumsum(self._metric_sizes)[:-1]
        parts = np.split(table[:, 2:], ends, axis=1) if self._metric_names else []
        totals = {name: folded(name, part) for name, part in zip(self._metric_names, parts, strict=True)}
        sums = {name: part if len(part) > 1 else part[0] for name, part in totals.items()}
        means = {"loss": loss / weight, **metric_results(self._task, sums, weight)}
        return dict(self._task.finish_metrics(means)), weight

    def samples(self) -> Samples:
        """Samples of the model's answers, as `Score.samples`, for one worker to ask; () where there are none."""
        # The model's weights are on devices, and what is computed eagerly is not.
        away = self._runtime.host.traits.compiles or self._runtime.state.is_away
        if not isinstance(self._task, ShowsSamples) or away:
            return self._samples
        if self._sample_batch is None:
            count = min(self._task.num_samples, self._data.num_eval_examples or 0)
            self._sample_batch = next(held(self._data.eval_batches(Shard(global_batch_size=count, seed=0))))
        return self._task.samples(self._model, self._sample_batch)

    def _replica_sums(self, batch: Batch) -> tf.Tensor:
        (sums,) = gradients.reduce_sum([self._forward(real_rows(self._task, batch))])
        if not self._task.shows_rows:
            return sums
        return tf.concat([tf.stack(gradients.by_rows(sums[0], sums[1], batch)), sums[2:]], axis=0)

    def _sums(self, batch: Batch) -> tf.Tensor:
        parts = activity_penalties(self._model, num_replicas())
        with using(self._loss_chunks), parts:
            loss, weight, metrics = loss_sums(self._task, self._model, batch, False)
        self._metric_names = tuple(sorted(metrics))
        flat = [tf.reshape(metrics[name], [-1]) for name in self._metric_names]
        self._metric_sizes = [part.shape.num_elements() for part in flat]
        return tf.concat([[loss], [weight], *flat], axis=0)


@dataclasses.dataclass
class _Batches:
    """Batches, and what a runtime does with each; TensorFlow's runtime beside it where its devices cannot.

    Args:
      what: of an evaluation, for people.
      rows: of each of so many replicas' batches, see `Shard`.
      program: what to do, on a runtime.
    """

    runtime: Runtime
    what: str
    make: MakeBatches
    size: int
    rows: Callable[[int], int]
    program: Callable[[Runtime], DeviceLoop | Rows]
    _made: tuple[Iterable, DeviceLoop | Rows] | None = None

    def settle(self, notes: list[str]) -> tuple[Iterable, DeviceLoop | Rows]:
        """Finds out who does it; the first time that the devices cannot, `notes` get why."""
        if self._made is None and self.runtime is not self.runtime.host:
            batches, program = self._made = self._on(self.runtime)
            try:
                program.trace(iter(batches))
            except UsageError as error:  # of a mistake of the task's, TensorFlow says it once more
                self.runtime, self._made = self.runtime.host, None
                notes.append(f"{self.what} runs in TensorFlow on the host's CPU, as JAX cannot run it: {error}")
        self._made = self._made or self._on(self.runtime)
        return self._made

    def _on(self, runtime: Runtime) -> tuple[Iterable, DeviceLoop | Rows]:
        rows = self.rows(runtime.num_replicas)
        return runtime.batches(self.make, global_batch_size=self.size, rows=rows), self.program(runtime)

    def begin(self, notes: list[str]) -> tuple[Iterator, Callable[..., Any]]:
        """The batches from the first one, and what runs the next ones with the weights as they are now."""
        batches, program = self.settle(notes)
        return held(batches), program.begin()


class DecodingEvaluator:
    """Evaluates what the model writes: each replica decodes its own examples, every worker scores all outputs."""

    def __init__(self, runtime: Runtime, model: keras.Model, plan: RunPlan):
        self._task: Decodes = plan.recipe.task
        self._global_batch_size = size = plan.eval_batch_size
        self._generate = _compiled(partial(call_converted, self._task.generate, model), plan, runtime)
        self.batches = _Batches(
            runtime, "decoding", self._task.decode_batches, size, lambda replicas: 0, lambda on: on.rows(self._answers)
        )

    def is_due(self, last: bool) -> bool:
        """Whether there is something to decode."""
        return bool(self._task.num_decode_examples(last))

    def evaluate(self, last: bool, agree: Callable[[float], float]) -> Score | None:
        """Decodes and scores with the current weights, as `Evaluator.evaluate`; None if there is nothing to decode."""
        if not self.is_due(last):
            return None
        count = self._task.num_decode_examples(last)
        batches, run = self.batches.begin([])
        parts = []
        for _ in range(math.ceil(count / self._global_batch_size)):
            agree(0.0)
            parts.append(run(next(batches)))
        examples, weight, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
        real = np.flatnonzero(weight > 0)
        order = real[np.argsort(examples[real])]
        return self._task.score(examples[order], outputs[order])

    def _answers(self, batch: Batch) -> tuple[tf.Tensor, ...]:
        return batch["example"], batch["weight"], self._generate(batch)


def _compiled(
    on_replica: Callable[[Batch], tf.Tensor], plan: RunPlan, runtime: Runtime
) -> Callable[[Batch], tf.Tensor]:
    """The function of one replica, compiled with XLA where the plan says so and nothing else does."""
    compiles = plan.jit_compile and not runtime.traits.compiles
    return tf.function(on_replica, jit_compile=True, autograph=False) if compiles else on_replica

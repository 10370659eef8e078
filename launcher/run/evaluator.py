"""Exact evaluation: every example counts once, whatever the topology and the batch size."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.data.distributed import distribute_batches
from launcher.data.kinds import DataOfSteps
from launcher.data.pipeline import Batch, Shard, held, rows_of_replica
from launcher.errors import UsageError
from launcher.machine.no_autograph import call_converted
from launcher.run.actions.base import Action, Event, tell
from launcher.run.loop import Loop
from launcher.run.plan import RunPlan
from launcher.step import gradients, summation
from launcher.step.engine import Engine
from launcher.step.layers import activity_penalties
from launcher.step.local_pass import num_replicas
from launcher.tasks.base import Decodes, Score, ShowsSamples, Task, folded, loss_sums, metric_results, real_rows
from launcher.tasks.cross_entropy import using


class Evaluator:
    """Runs the task's loss over the evaluation examples, padded to whole batches with weight 0.

    An engine runs it in the place of TensorFlow, where it can.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, model: keras.Model, plan: RunPlan, engine: Engine | None = None
    ):
        self._strategy, self._model = strategy, model
        self._task: Task = plan.recipe.task
        self._data = plan.data
        self._global_batch_size = size = plan.eval_batch_size
        make, rows = self._data.eval_batches, partial(rows_of_replica, self._data, size)
        self._on_devices = _OnDevices(engine, "evaluation", make, self._sums_of_engine, size=size, rows=rows)
        self._loss_chunks = plan.loss_chunks
        self._metric_names: tuple[str, ...] = ()
        self._metric_sizes: list[int] = []
        self._forward = _compiled(self._sums, plan)
        self._run_batches = summation.in_order(self._run_batches_in_graph, strategy)
        self._batches: Iterable | None = None
        self._loop = Loop()
        self.notes: list[str] = []
        self._samples: Sequence[tuple[str, str, str]] = ()
        self._sample_batch: Batch | None = None
        self._decoding = DecodingEvaluator(strategy, model, plan, engine) if isinstance(self._task, Decodes) else None

    def needs_variables(self, last: bool) -> bool:
        """Whether an evaluation looks at TensorFlow's variables, and not only at what an engine's devices hold.

        With parts of weights on the devices there are no samples, as nobody would put the whole together for them.
        """
        self.notes = []
        on_devices = self._on_devices.is_possible(self.notes)
        if self._decoding is not None and self._decoding.is_due(last):
            on_devices = on_devices and self._decoding.on_devices.is_possible(self.notes)
        return not on_devices or (isinstance(self._task, ShowsSamples) and not self._on_devices.has_parts)

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
        batches, run = self._begin()
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

    def _begin(self) -> tuple[Iterator, Callable[[Iterator, int], np.ndarray]]:
        """The batches of an evaluation, and what gives the sums of the next ones with the current weights."""
        if self._on_devices.is_possible(self.notes):
            return self._on_devices.begin()
        make, size = self._data.eval_batches, self._global_batch_size
        if self._batches is None:
            rows = rows_of_replica(self._data, size, self._strategy.num_replicas_in_sync)
            self._batches = distribute_batches(self._strategy, make, global_batch_size=size, rows=rows)
        return held(self._batches), lambda batches, count: self._run_batches(batches, tf.constant(count)).numpy()

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

    def samples(self) -> Sequence[tuple[str, str, str]]:
        """Samples of the model's answers, as `Score.samples`, for one worker to ask; () where there are none."""
        # The model's weights are on a TPU's cores, and what is computed eagerly is not.
        away = isinstance(self._strategy, tf.distribute.TPUStrategy) or self._on_devices.hold_state
        if not isinstance(self._task, ShowsSamples) or away:
            return self._samples
        if self._sample_batch is None:
            count = min(self._task.num_samples, self._data.num_eval_examples or 0)
            self._sample_batch = next(held(self._data.eval_batches(Shard(global_batch_size=count, seed=0))))
        return self._task.samples(self._model, self._sample_batch)

    def _run_batches_in_graph(self, batches: Iterator, num_batches: tf.Tensor) -> tf.Tensor:
        def one_batch(index: tf.Tensor, rows: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            sums = self._strategy.run(self._replica_sums, args=(next(batches),))
            return index + 1, rows.write(index, self._strategy.experimental_local_results(sums)[0])

        start = (tf.constant(0), tf.TensorArray(tf.float32, size=num_batches, element_shape=None))
        _, rows = tf.while_loop(lambda index, *_: index < num_batches, one_batch, start, maximum_iterations=num_batches)
        return rows.stack()

    def _replica_sums(self, batch: Batch) -> tf.Tensor:
        (sums,) = gradients.reduce_sum([self._forward(real_rows(self._task, batch))])
        if not self._task.shows_rows:
            return sums
        return tf.concat([tf.stack(gradients.by_rows(sums[0], sums[1], batch)), sums[2:]], axis=0)

    def _sums_of_engine(self, batch: Batch) -> tf.Tensor:
        return gradients.reduce_sum([self._sums(batch)])[0]

    def _sums(self, batch: Batch) -> tf.Tensor:
        parts = activity_penalties(self._model, num_replicas())
        with using(self._loss_chunks), parts:
            loss, weight, metrics = loss_sums(self._task, self._model, batch, False)
        self._metric_names = tuple(sorted(metrics))
        flat = [tf.reshape(metrics[name], [-1]) for name in self._metric_names]
        self._metric_sizes = [part.shape.num_elements() for part in flat]
        return tf.concat([[loss], [weight], *flat], axis=0)


class _OnDevices:
    """What an engine's devices do with batches and the weights, where there is an engine and they can.

    Args:
      what: of an evaluation, for people.
      rows: of each of so many replicas' batches, see `Shard`.
      function, of_rows: see `Engine.forward`.
    """

    def __init__(
        self,
        engine: Engine | None,
        what: str,
        make: Callable[[Shard], tf.data.Dataset],
        function: Callable[[Batch], tf.Tensor],
        *,
        size: int,
        rows: Callable[[int], int] = lambda num_replicas: 0,
        of_rows: bool = False,
    ):
        self._engine, self._what, self._make, self._function = engine, what, make, function
        self._size, self._rows, self._of_rows = size, rows, of_rows
        self._made: tuple[Iterable, Callable[[], Callable[[Iterator, int], Any]]] | None = None

    @property
    def has_parts(self) -> bool:
        """Whether each device has parts of the weights."""
        return self._engine is not None and self._engine.first_values is not None

    @property
    def hold_state(self) -> bool:
        return self._engine is not None and self._engine.holds

    def is_possible(self, notes: list[str]) -> bool:
        """Whether they do it; the first time that they cannot, `notes` get why."""
        if self._engine is not None and self._made is None:
            engine, size = self._engine, self._size
            batches = engine.distribute(self._make, global_batch_size=size, rows=self._rows(engine.num_replicas))
            try:
                self._made = batches, engine.forward(self._function, batches, of_rows=self._of_rows)
            except UsageError as error:  # of a mistake of the task's, TensorFlow says it once more
                self._engine = None
                notes.append(f"{self._what} runs in TensorFlow on the host's CPU, as JAX cannot run it: {error}")
        return self._engine is not None

    def begin(self) -> tuple[Iterator, Callable[[Iterator, int], Any]]:
        """The batches from the first one, and what runs the next ones with the weights as they are now."""
        assert self._made is not None
        batches, take_weights = self._made
        return held(batches), take_weights()


class DecodingEvaluator:
    """Evaluates what the model writes: each replica decodes its own examples, every worker scores all outputs."""

    def __init__(
        self, strategy: tf.distribute.Strategy, model: keras.Model, plan: RunPlan, engine: Engine | None = None
    ):
        self._strategy, self._model = strategy, model
        self._task: Decodes = plan.recipe.task
        self._global_batch_size = size = plan.eval_batch_size
        make = self._task.decode_batches
        self.on_devices = _OnDevices(engine, "decoding", make, self._outputs, size=size, of_rows=True)
        self._generate = _compiled(self._outputs, plan)
        self._run_batch = tf.function(self._run_batch_in_graph, autograph=False)
        self._batches: tf.distribute.DistributedDataset | None = None

    def is_due(self, last: bool) -> bool:
        """Whether there is something to decode."""
        return bool(self._task.num_decode_examples(last))

    def evaluate(self, last: bool, agree: Callable[[float], float]) -> Score | None:
        """Decodes and scores with the current weights, as `Evaluator.evaluate`; None if there is nothing to decode."""
        if not self.is_due(last):
            return None
        count = self._task.num_decode_examples(last)
        batches, run = self._begin()
        parts = []
        for _ in range(math.ceil(count / self._global_batch_size)):
            agree(0.0)
            parts.append(run(batches))
        examples, weight, outputs = (np.concatenate(column) for column in zip(*parts, strict=True))
        real = np.flatnonzero(weight > 0)
        order = real[np.argsort(examples[real])]
        return self._task.score(examples[order], outputs[order])

    def _begin(self) -> tuple[Iterator, Callable[[Iterator], tuple[Any, ...]]]:
        if self.on_devices.is_possible([]):
            batches, run = self.on_devices.begin()
            return batches, lambda batches: run(batches, 1)
        if self._batches is None:
            self._batches = distribute_batches(
                self._strategy, self._task.decode_batches, global_batch_size=self._global_batch_size
            )
        return held(self._batches), lambda batches: self._run_batch(next(batches))

    def _run_batch_in_graph(self, batch: Batch) -> tuple[tf.Tensor, ...]:
        outputs = self._strategy.run(self._on_replica, args=(batch,))
        return tuple(self._strategy.gather(part, axis=0) for part in (batch["example"], batch["weight"], outputs))

    def _on_replica(self, batch: Batch) -> tf.Tensor:
        # Of a `tf.function`, MirroredStrategy would compile all replicas together.
        return self._generate(batch)

    def _outputs(self, batch: Batch) -> tf.Tensor:
        return call_converted(self._task.generate, self._model, batch)


def _compiled(on_replica: Callable[[Batch], tf.Tensor], plan: RunPlan) -> Callable[[Batch], tf.Tensor]:
    """The function of one replica, compiled with XLA where the plan says so."""
    return tf.function(on_replica, jit_compile=True, autograph=False) if plan.jit_compile else on_replica

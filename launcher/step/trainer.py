"""N training steps on the device."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import keras
import numpy as np
import tensorflow as tf

from launcher.data.distributed import distribute_batches, share_of_host
from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import Data, rows_of_replica
from launcher.errors import UsageError
from launcher.machine import exit_barrier
from launcher.optimizers import Optimizer, Optimizers
from launcher.reporting.units import first
from launcher.step import flops, initial_values, overflow, summation
from launcher.step.engine import Engine
from launcher.step.local_pass import OwnTime, Watch
from launcher.step.moving_average import MovingAverage
from launcher.step.moving_statistics import candidates, is_moving
from launcher.step.own_step import OwnStep
from launcher.step.precision import LossScale
from launcher.step.state import LIMITS, SCALE, Counters, State
from launcher.step.statistics import Statistic, is_overwritten, usual
from launcher.step.step_config import StepConfig
from launcher.step.train_step import ReplicaStep
from launcher.step.workers import Workers
from launcher.tasks.base import Task
from launcher.tasks.keras_model import KerasTask


class StepRecords(NamedTuple):
    """What happened in some consecutive steps; float64 arrays of shape [steps].

    Attributes:
      first_step: number of the first of them, counted from 1.
      loss: sum of weighted losses of each step's global batch.
      weight: sum of weights.
      metrics: sums of the task's metrics by name; [steps, n] of one that is a vector.
      gradient_norm, finite, loss_scale, learning_rate: as in `train_step.StepReport`.
      non_finite: bool [steps, trained variables], whose gradients were not finite in steps that were skipped for it.
      input_wait_seconds: time each step waited for its batch.
    """

    first_step: int
    loss: np.ndarray
    weight: np.ndarray
    metrics: dict[str, np.ndarray]
    gradient_norm: np.ndarray
    finite: np.ndarray
    loss_scale: np.ndarray
    learning_rate: np.ndarray
    non_finite: np.ndarray
    input_wait_seconds: np.ndarray


class Trainer:
    """Owns the model, the optimizer and the counters of a run, and trains them a number of steps at a time.

    Args:
      strategy: where replicas live. The caller has set the global dtype policy.
      task: model, data and loss.
      model, optimizer: built under `strategy.scope()`.
      loss_scale: see `launcher.step.precision`.
      config: what one step does.
      total_steps: length of the run, for the schedules.
      forward_assigns: what the model's forward pass assigns, see `statistics`; None for all that it could.
      rate_multipliers: see `Optimizer.build`.
      measure_input_wait: time how long each step waits for its batch; else it is reported as 0.
      left_out: batches that no step is trained on. Kept as an attribute, which takes effect with the next `batches`.
      engine: what runs the steps in the place of TensorFlow, if anything does.

    Attributes:
      num_replicas: of all workers.
      state: what a checkpoint holds of it.
      workers: the other workers of the run, to be asked between two loops.
      loop_steps: steps of the last call of `train`, also of one that failed.
      last_seen: step and loss scale after the last call of `train`, for when the devices are gone.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        task: Task,
        model: keras.Model,
        optimizer: Optimizer | Optimizers,
        loss_scale: LossScale,
        config: StepConfig,
        total_steps: int,
        forward_assigns: Sequence[Statistic] | None = None,
        rate_multipliers: Sequence[float] | None = None,
        measure_input_wait: bool = True,
        left_out: LeftOut = ALL_IN,
        engine: Engine | None = None,
    ):
        self.strategy = strategy
        self.num_replicas = strategy.num_replicas_in_sync if engine is None else engine.num_replicas
        self._engine = engine
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.left_out = left_out
        self.loop_steps = 0
        self.last_seen: tuple[int, float] | None = None
        self._assigned = list(map(usual, candidates(model)) if forward_assigns is None else forward_assigns)
        self.statistics = [one.variable for one in self._assigned]
        self._clock = tf.timestamp if measure_input_wait else lambda: tf.constant(0.0, tf.float64)
        if engine is not None and engine.first_values is not None:
            initial_values.settle(engine.first_values, model, config.shards)
        with initial_values.scope(strategy):
            optimizer.build(model.trainable_variables, total_steps, rate_multipliers, config.shards)
            self.counters = Counters.make(loss_scale.initial(), has_limits=config.has_limits)
            averaged = [one for one in model.trainable_variables if not is_overwritten(one)]
            averaged += filter(is_moving, self.statistics)
            self.ema = MovingAverage(averaged, config.ema_decay, config.shards)
            self.ema.build()
            self.workers = Workers.of(strategy) if engine is None else engine.workers
            timed = measure_input_wait and self.workers.are_several and engine is None
            self._own_time = OwnTime() if timed else None
        self.state = State(
            strategy=strategy,
            workers=self.workers,
            model=model,
            optimizer=optimizer,
            ema=self.ema,
            counters=self.counters,
            loss_scale=loss_scale,
            engine=engine,
        )
        self.task, self._loss_scale = task, loss_scale
        self.replica_step = self._step()
        self._graph: tf.Graph | None = None
        self._spec: Any = None  # of the batches of one replica
        self._run_steps = summation.in_order(self._run_steps_in_graph, strategy)

    def _step(self) -> ReplicaStep | OwnStep:
        if not isinstance(self.optimizer, Optimizers):
            return self.step_of(self.model)
        return OwnStep(
            task=cast(KerasTask, self.task),
            model=self.model,
            optimizer=self.optimizer,
            loss_scale=self._loss_scale,
            counters=self.counters,
            ema=self.ema,
            config=self.config,
            statistics=self._assigned,
        )

    def step_of(self, model: keras.Model, watch: Watch | None = None) -> ReplicaStep:
        """This run's step on a model of the same task; see `ReplicaStep`. Only the run's own model can be trained.

        UsageError where the step is the model's own.
        """
        if isinstance(self.optimizer, Optimizers):
            raise UsageError("a model's own train_step cannot be looked into: write a task, see docs/own_task.md")
        others = dict(zip(map(id, self.model.weights), model.weights, strict=True))
        return ReplicaStep(
            task=self.task,
            model=model,
            optimizer=self.optimizer,
            loss_scale=self._loss_scale,
            counters=self.counters,
            ema=self.ema,
            config=self.config,
            statistics=[one._replace(variable=others.get(id(one.variable), one.variable)) for one in self._assigned],
            watch=watch,
            own_time=self._own_time if watch is None else None,
        )

    @property
    def step(self) -> int:
        """Steps done, skipped ones included."""
        return int(self.state.value("counters/step", self.counters.step))

    @property
    def skipped_steps(self) -> int:
        return int(self.state.value("counters/skipped", self.counters.skipped))

    @property
    def loss_scale(self) -> float:
        """The scale the next step will use."""
        return float(self.state.value(f"{SCALE}scale", self.counters.scale.scale))

    @property
    def skips_at_floor(self) -> int:
        """Consecutive skipped steps at a scale that cannot fall further."""
        return int(self.state.value(f"{SCALE}skips_at_floor", self.counters.scale.skips_at_floor))

    def limit(self, loss: float, gradient_norm: float) -> None:
        """Sets the mean loss and the gradient norm above which steps are skipped, on every replica."""
        if self.counters.limits is not None and self._engine is not None and self._engine.holds:
            self._engine.put(LIMITS, np.array([loss, gradient_norm], np.float32))
        elif self.counters.limits is not None:
            self.counters.limits.assign([loss, gradient_norm])

    def take_state(self) -> None:
        """Has an engine's devices hold the state, if there is an engine; the variables are not looked at from then."""
        if self._engine is not None:
            self._engine.take_state()

    def bring_home(self) -> None:
        """Has the model, the optimizer and the counters the values that the last step gave them, before they are used
        or changed by anything but `train` and `state`.
        """
        if self._engine is not None:
            self._engine.bring_home()

    def batches(self, data: Data, start_step: int | None = None) -> Iterator:
        """Batches for `train`, starting at the data position of the current step or of another one."""
        start = self.step if start_step is None else start_step
        if self._engine is None:
            return self.batches_at_home(data, start)
        return self._batches(self._engine.distribute, self.num_replicas, data, start)

    def batches_at_home(self, data: Data, start_step: int) -> Iterator:
        """The same batches for what runs in TensorFlow on the strategy's replicas, whatever runs the steps."""
        distribute = functools.partial(distribute_batches, self.strategy)
        return self._batches(distribute, self.strategy.num_replicas_in_sync, data, start_step)

    def _batches(self, distribute: Callable[..., Iterable], replicas: int, data: Data, start_step: int) -> Iterator:
        config, make = self.config, data.train_batches
        rows = rows_of_replica(data, config.global_batch_size, replicas, config.microbatches)
        if config.shared_by:
            each = config.rows * config.microbatches
            rows = -(-config.global_batch_size // (replicas * each)) * each
            make = functools.partial(share_of_host, make, config.shared_by)
        batches = distribute(
            make,
            global_batch_size=config.global_batch_size,
            rows=rows,
            seed=self.config.seed,
            start_step=start_step,
            left_out=self.left_out,
        )
        return exit_barrier.keep(iter(batches))

    @property
    def notes(self) -> list[str]:
        """What a person should know of the step, once it is traced."""
        unused = [self.model.trainable_variables[index] for index in sorted(self.replica_step.unused)]
        paths = [one.path for one in unused if not is_overwritten(one)]
        if not paths:
            return []
        return [
            f"the loss does not depend on {first(paths)}: neither updated nor decayed; if that is "
            "meant, set trainable = False on such layers, which saves the memory of the optimizer's slots"
        ]

    def trace(self, batches: Iterator) -> tuple[str, ...]:
        """Builds the graph of `train` and runs nothing, so that a task's mistakes show before anything is written.

        Returns:
          The names of the task's metrics.
        """
        if self._engine is None:
            self._graph = self._run_steps.get_concrete_function(batches, tf.constant(1, tf.int32)).graph
            self._spec = getattr(batches, "element_spec", None) if self.num_replicas == 1 else None
        else:
            self._graph = self._engine.prepare()
        return self.replica_step.metric_names

    def matrix_flops(self) -> flops.Flops | None:
        """FLOPs of one step on one replica, once it is traced; None where its graph does not tell. Takes some 0.1 s."""
        if self._graph is None:
            return None
        microbatches = [self.config.microbatches] if self.config.microbatches > 1 else []
        found, times = flops.count(self._graph, [1, *microbatches]), 1 / len(self.strategy.extended.worker_devices)
        if found is None and self._spec is not None and isinstance(self.replica_step, ReplicaStep):
            # The first microbatch's graph, once more, with all rows: what cuts off padding hides how many there are.
            self.task.keeps_padding, first = True, functools.partial(self.replica_step.first_microbatch, scale=1.0)
            again = tf.function(lambda batch: self.strategy.run(first, [batch]))
            found, times = flops.count(again.get_concrete_function(self._spec).graph, []), self.config.microbatches
            self.task.keeps_padding = False
        return flops.Flops(*(times * one for one in found)) if found and found.hardware else None

    def train(self, batches: Iterator, num_steps: int) -> StepRecords:
        """Takes `num_steps` steps on the device; fetching their records waits for the steps to end."""
        first_step, self.loop_steps = self.step + 1, num_steps
        if self._engine is None:
            table = self._run_steps(batches, tf.constant(num_steps, tf.int32)).numpy()
        else:
            table = self._engine.run(batches, num_steps)
        table = table.astype(np.float64)
        columns = _columns((*self.replica_step.report_names, "waited"), table)

        def within(field: str) -> dict[str, np.ndarray]:
            return {name.partition("/")[2]: part for name, part in columns.items() if name.startswith(f"{field}/")}

        self.last_seen = (first_step + num_steps - 1, float(columns["loss_scale"][-1])) if num_steps else self.last_seen
        packed = np.stack([*within("non_finite").values()], axis=1)
        return StepRecords(
            first_step=first_step,
            **{field: columns[field] for field in StepRecords._fields if field in columns},
            metrics=within("metrics"),
            non_finite=overflow.unpack(packed, len(self.model.trainable_variables)),
            input_wait_seconds=columns["waited"],
        )

    def _run_steps_in_graph(self, batches: Iterator, num_steps: tf.Tensor) -> tf.Tensor:
        """float32 [steps, report names + 1]: the report of each step, and how long it waited for its batch."""
        tf.random.set_seed(self.config.seed)  # of this graph alone

        def one_step(
            index: tf.Tensor, rows: tf.TensorArray, previous: tf.Tensor
        ) -> tuple[tf.Tensor, tf.TensorArray, tf.Tensor]:
            # The clock starts when the previous step has ended, so that only real waiting is counted.
            with tf.control_dependencies([previous]):
                started = self._clock()
            with tf.control_dependencies([started]):
                batch = next(batches)
            with tf.control_dependencies(tf.nest.flatten(self.strategy.experimental_local_results(batch))):
                waited = tf.cast(self._clock() - started, tf.float32)
            report = self.strategy.run(self.replica_step, args=(batch,))
            row = tf.nest.map_structure(self._of_first_replica, report).flat(waited)
            return index + 1, rows.write(index, row), row[0]

        rows = tf.TensorArray(tf.float32, size=num_steps, element_shape=None)
        start = (tf.constant(0), rows, tf.constant(0.0))
        _, rows, _ = tf.while_loop(lambda index, *_: index < num_steps, one_step, start, maximum_iterations=num_steps)
        return rows.stack()

    def _of_first_replica(self, value: Any) -> tf.Tensor:
        return self.strategy.experimental_local_results(value)[0]

    @property
    def own_seconds(self) -> float | None:
        """Seconds that this worker has spent on its own part of all steps so far; None where that is not measured."""
        return None if self._own_time is None else float(self._own_time.seconds.numpy())


def _columns(names: Sequence[str], table: np.ndarray) -> dict[str, np.ndarray]:
    """A table's columns by name: [rows], or [rows, n] of a name that stands n times in a row."""
    places, table = dict[str, list[int]](), table.reshape(-1, len(names))  # of no rows, it has no columns either
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return {name: table[:, found if len(found) > 1 else found[0]] for name, found in places.items()}

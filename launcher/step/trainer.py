"""N training steps on the device."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import Data, rows_of_replica
from launcher.errors import UsageError
from launcher.machine import exit_barrier
from launcher.optimizers import Optimizer, Optimizers
from launcher.optimizers.weight_shards import of_model
from launcher.reporting.units import first
from launcher.runtime import Runtime, initial_values
from launcher.runtime.batches import share_of_host
from launcher.runtime.traits import Training
from launcher.step import flops, overflow
from launcher.step.local_pass import OwnTime, Watch
from launcher.step.moving_average import MovingAverage
from launcher.step.own_step import OwnStep
from launcher.step.precision import Counters, LossScale
from launcher.step.state import State
from launcher.step.statistics import Statistic, candidates, is_moving, is_overwritten, usual
from launcher.step.step_config import StepConfig, StepParts
from launcher.step.train_step import ReplicaStep, report_names
from launcher.tasks.base import Task


class StepRecords(NamedTuple):
    """Records of some consecutive steps; float64 arrays of shape [steps].

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
      runtime: the replicas. The caller has set the global dtype policy.
      task: model, data and loss.
      model, optimizer: built under `runtime.scope()`.
      loss_scale: see `launcher.step.precision`.
      config: what one step does.
      total_steps: length of the run, for the schedules.
      forward_assigns: what the model's forward pass assigns, see `statistics`; None for all that it could.
      rate_multipliers: see `Optimizer.build`.
      measure_input_wait: time how long each step waits for its batch; else it is reported as 0.
      left_out: batches that no step is trained on. Kept as an attribute, which takes effect with the next `batches`.

    Attributes:
      num_replicas: of all workers.
      state: what a checkpoint holds of it.
      loop_steps: steps of the last call of `train`, also of one that failed.
      last_seen: step and loss scale after the last call of `train`, for when the devices are gone.
    """

    def __init__(
        self,
        *,
        runtime: Runtime,
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
    ):
        self.runtime = runtime
        self.num_replicas, self.workers = runtime.num_replicas, runtime.workers
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.left_out = left_out
        self.loop_steps = 0
        self.last_seen: tuple[int, float] | None = None
        assigned = list(map(usual, candidates(model)) if forward_assigns is None else forward_assigns)
        self.statistics = [one.variable for one in assigned]
        if runtime.state.first_values is not None:
            divided = of_model(model, config.shards, self.statistics)
            initial_values.settle(runtime.state.first_values, model, divided)
        with runtime.host.scope():
            optimizer.build(model.trainable_variables, total_steps, rate_multipliers, config.shards)
            self.counters = Counters.make(loss_scale.initial(), has_limits=config.has_limits)
            averaged = [one for one in model.trainable_variables if not is_overwritten(one)]
            averaged += filter(is_moving, self.statistics)
            self.ema = MovingAverage(averaged, config.ema_decay, config.shards)
            self.ema.build()
            timed = measure_input_wait and self.workers.are_several and runtime.host is runtime
            self._own_time = OwnTime() if timed else None
        self._parts = StepParts(
            task=task,
            model=model,
            optimizer=optimizer,
            loss_scale=loss_scale,
            counters=self.counters,
            ema=self.ema,
            config=config,
            statistics=assigned,
        )
        self.state = State(runtime, self._parts)
        self.task = task
        self.replica_step: ReplicaStep | OwnStep
        self.replica_step = OwnStep(self._parts) if isinstance(optimizer, Optimizers) else self.step_of(model)
        self._graph: tf.Graph | None = None
        self._spec: Any = None  # of the batches of one replica
        self._loop = runtime.loop(
            lambda batch: self.replica_step(batch).flat(),
            Training(
                microbatches=config.microbatches,
                seed=config.seed,
                clock=tf.timestamp if measure_input_wait else lambda: tf.constant(0.0, tf.float64),
            ),
        )

    def step_of(self, model: keras.Model, watch: Watch | None = None) -> ReplicaStep:
        """This run's step on a model of the same task; see `ReplicaStep`. Only the run's own model can be trained.

        UsageError where the step is the model's own.
        """
        if isinstance(self.optimizer, Optimizers):
            raise UsageError("a model's own train_step cannot be looked into: write a task, see docs/own_task.md")
        others = dict(zip(map(id, self.model.weights), model.weights, strict=True))
        statistics = [
            one._replace(variable=others.get(id(one.variable), one.variable)) for one in self._parts.statistics
        ]
        parts = dataclasses.replace(self._parts, model=model, statistics=statistics)
        return ReplicaStep(parts, watch=watch, own_time=self._own_time if watch is None else None)

    @property
    def step(self) -> int:
        """Steps done, skipped ones included."""
        return int(self.runtime.state.read(self.counters.step))

    @property
    def skipped_steps(self) -> int:
        return int(self.runtime.state.read(self.counters.skipped))

    @property
    def loss_scale(self) -> float:
        """The scale the next step will use."""
        return float(self.runtime.state.read(self.counters.scale.scale))

    @property
    def skips_at_floor(self) -> int:
        """Consecutive skipped steps at a scale that cannot fall further."""
        return int(self.runtime.state.read(self.counters.scale.skips_at_floor))

    def limit(self, loss: float, gradient_norm: float) -> None:
        """Sets the mean loss and the gradient norm above which steps are skipped, on every replica."""
        if self.counters.limits is not None:
            self.runtime.state.write(self.counters.limits, np.array([loss, gradient_norm], np.float32))

    def batches(self, data: Data, start_step: int | None = None, *, runtime: Runtime | None = None) -> Iterator:
        """Batches for `train`, starting at the data position of the current step or of another one.

        Args:
          runtime: another one that is to run something on them; None for the trainer's.
        """
        config, make, runtime = self.config, data.train_batches, runtime or self.runtime
        rows = rows_of_replica(data, config.global_batch_size, runtime.num_replicas, config.microbatches)
        if config.shared_by:
            each = config.rows * config.microbatches
            rows = -(-config.global_batch_size // (runtime.num_replicas * each)) * each
            make = functools.partial(share_of_host, make, config.shared_by)
        batches = runtime.batches(
            make,
            global_batch_size=config.global_batch_size,
            rows=rows,
            seed=config.seed,
            start_step=self.step if start_step is None else start_step,
            left_out=self.left_out,
        )
        return exit_barrier.keep(iter(batches))

    @property
    def report_names(self) -> tuple[str, ...]:
        """Names of the numbers that a step gives, once it is traced; see `train_step.StepReport`."""
        return report_names(self.replica_step.traced, len(self.model.trainable_variables))

    @property
    def notes(self) -> list[str]:
        """Notes for a person on the step, once it is traced."""
        unused = [self.model.trainable_variables[index] for index in sorted(self.replica_step.traced.unused)]
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
        self._graph = self._loop.trace(batches)
        self._spec = getattr(batches, "element_spec", None) if self.num_replicas == 1 else None
        return tuple(self.replica_step.traced.metrics)

    def matrix_flops(self) -> flops.Flops | None:
        """FLOPs of one step on one replica, once it is traced; None where its graph does not tell."""
        if self._graph is None:
            return None
        strategy = self.runtime.host.strategy
        found, times = flops.count(self._graph, loops=1), 1 / len(strategy.extended.worker_devices)
        if found is None and self._spec is not None and isinstance(self.replica_step, ReplicaStep):
            # The first microbatch's graph, once more, with all rows: what cuts off padding hides how many there are.
            self.task.keeps_padding, first = True, functools.partial(self.replica_step.first_microbatch, scale=1.0)
            again = tf.function(lambda batch: strategy.run(first, [batch]), autograph=False)
            found, times = flops.count(again.get_concrete_function(self._spec).graph), self.config.microbatches
            self.task.keeps_padding = False
        return flops.Flops(*(times * one for one in found)) if found and found.hardware else None

    def train(self, batches: Iterator, num_steps: int) -> StepRecords:
        """Takes `num_steps` steps on the device; fetching their records waits for the steps to end."""
        first_step, self.loop_steps = self.step + 1, num_steps
        table = self._loop.begin()(batches, num_steps).astype(np.float64)
        names, places = (*self.report_names, "waited"), dict[str, list[int]]()
        for place, name in enumerate(names):
            places.setdefault(name, []).append(place)
        table = table.reshape(-1, len(names))  # of no rows, it has no columns either
        # A name that stands several times is that of a vector.
        columns = {name: table[:, found if len(found) > 1 else found[0]] for name, found in places.items()}

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

    @property
    def own_seconds(self) -> float | None:
        """Seconds that this worker has spent on its own part of all steps so far; None where that is not measured."""
        return None if self._own_time is None else float(self._own_time.seconds.numpy())

"""N training steps on the device, and the state that a checkpoint holds."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.data.distributed import distribute_batches
from launcher.data.order import ALL_IN, LeftOut
from launcher.data.pipeline import Data
from launcher.errors import PeerError
from launcher.machine import farewell
from launcher.optimizers import Optimizer
from launcher.optimizers.parts import Part
from launcher.step import flops, initial_values, moving_statistics, overflow, precision, summation
from launcher.step.counters import Counters
from launcher.step.local_pass import Watch
from launcher.step.moving_average import MovingAverage
from launcher.step.own_time import OwnTime
from launcher.step.precision import LossScale, ScaleState
from launcher.step.step_config import StepConfig
from launcher.step.train_step import ReplicaStep
from launcher.tasks.base import Task

# Prefixes of names in a checkpoint.
MODEL, AVERAGES, _SCALE = "model/", "ema/", "loss_scale/"
_SHOWN = 3


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
      forward_assigns: what the model's forward pass assigns, see `moving_statistics`; None for all that it could.
      rate_multipliers: see `Optimizer.build`.
      measure_input_wait: time how long each step waits for its batch; else it is reported as 0.
      left_out: batches that no step is trained on. Kept as an attribute, which takes effect with the next `batches`.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        task: Task,
        model: keras.Model,
        optimizer: Optimizer,
        loss_scale: LossScale,
        config: StepConfig,
        total_steps: int,
        forward_assigns: Sequence[keras.Variable] | None = None,
        rate_multipliers: Sequence[float] | None = None,
        measure_input_wait: bool = True,
        left_out: LeftOut = ALL_IN,
    ):
        self.strategy = strategy
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.left_out = left_out
        # Steps of the last call of `train`, also of one that failed.
        self.loop_steps = 0
        # Step and loss scale after the last call of `train`, for when the devices are gone.
        self.last_seen: tuple[int, float] | None = None
        self.statistics = moving_statistics.candidates(model) if forward_assigns is None else list(forward_assigns)
        # What a checkpoint says of the loss scale's state, which is another one's where any of this differs.
        self.scaling = precision.recorded(keras.config.dtype_policy().name, loss_scale)
        self._clock = tf.timestamp if measure_input_wait else lambda: tf.constant(0.0, tf.float64)
        with initial_values.scope(strategy):
            optimizer.build(model.trainable_variables, total_steps, rate_multipliers, config.shards)
            self.counters = Counters.make(loss_scale.initial(), has_limits=config.has_limits)
            moving = filter(moving_statistics.is_moving, self.statistics)
            self.ema = MovingAverage([*model.trainable_variables, *moving], config.ema_decay, config.shards)
            self.ema.build()
            self._is_multi_worker = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
            self._own_time = OwnTime() if measure_input_wait and self._is_multi_worker else None
        self._parts = {id(held): part for held, part in [*optimizer.slot_parts, *self.ema.parts]}
        self._replicas = _local_replicas(strategy) if self._parts else []
        for slot, weight in optimizer.copies():
            if self.part_of(slot) is not None:  # which Keras could not copy
                self._put(slot, weight.numpy())
        for average, part in self.ema.parts:
            self._put(average, part.whole.numpy().astype(np.float32))
        self.task, self._loss_scale = task, loss_scale
        self.replica_step = self.step_of(model)
        self._traced: tf.types.experimental.ConcreteFunction | None = None
        self._run_steps = summation.in_order(self._run_steps_in_graph, strategy)
        # Not lambdas: TPUStrategy makes a name of the function's, which its own checks refuse for "<lambda>".
        self._sum = tf.function(self._sum_in_graph, autograph=False)
        self._gather = tf.function(self._gather_in_graph, autograph=False)

    def step_of(self, model: keras.Model, watch: Watch | None = None) -> ReplicaStep:
        """This run's step on a model of the same task; see `ReplicaStep`. Only the run's own model can be trained."""
        assigned = {id(variable) for variable in self.statistics}
        pairs = zip(self.model.weights, model.weights, strict=True)
        return ReplicaStep(
            task=self.task,
            model=model,
            optimizer=self.optimizer,
            loss_scale=self._loss_scale,
            counters=self.counters,
            ema=self.ema,
            config=self.config,
            statistics=[other for mine, other in pairs if id(mine) in assigned],
            watch=watch,
            own_time=self._own_time if watch is None else None,
        )

    @property
    def step(self) -> int:
        """Steps done, skipped ones included."""
        return int(self.counters.step.numpy())

    @property
    def skipped_steps(self) -> int:
        return int(self.counters.skipped.numpy())

    @property
    def loss_scale(self) -> float:
        """The scale the next step will use."""
        return float(self.counters.scale.scale.numpy())

    @property
    def skips_at_floor(self) -> int:
        """Consecutive skipped steps at a scale that cannot fall further."""
        return int(self.counters.scale.skips_at_floor.numpy())

    def limit(self, loss: float, gradient_norm: float) -> None:
        """Sets the mean loss and the gradient norm above which steps are skipped, on every replica."""
        if self.counters.limits is not None:
            self.counters.limits.assign([loss, gradient_norm])

    def batches(self, data: Data, start_step: int | None = None) -> Iterator:
        """Batches for `train`, starting at the data position of the current step or of another one."""
        batches = distribute_batches(
            self.strategy,
            data.train_batches,
            global_batch_size=self.config.global_batch_size,
            seed=self.config.seed,
            start_step=self.step if start_step is None else start_step,
            left_out=self.left_out,
        )
        return farewell.keep(iter(batches))

    @property
    def notes(self) -> list[str]:
        """What a person should know of the step, once it is traced."""
        paths = [self.model.trainable_variables[index].path for index in sorted(self.replica_step.unused)]
        if not paths:
            return []
        more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
        return [
            f"the loss does not depend on {', '.join(paths[:_SHOWN])}{more}: neither updated nor decayed; if that is "
            "meant, set trainable = False on such layers, which saves the memory of the optimizer's slots"
        ]

    def trace(self, batches: Iterator) -> tuple[str, ...]:
        """Builds the graph of `train` and runs nothing, so that a task's mistakes show before anything is written.

        Returns:
          The names of the task's metrics.

        Raises:
          UsageError: the task's loss() does not return what it should.
        """
        self._traced = self._run_steps.get_concrete_function(batches, tf.constant(1, tf.int32))
        return self.replica_step.metric_names

    def matrix_flops(self) -> flops.Flops | None:
        """FLOPs of one step on one replica, once it is traced; None where its graph does not tell. Takes some 0.1 s."""
        if self._traced is None:
            return None
        microbatches = [self.config.microbatches] if self.config.microbatches > 1 else []
        found = flops.count(self._traced.graph, [1, *microbatches])
        local_replicas = len(self.strategy.extended.worker_devices)
        return flops.Flops(*(one / local_replicas for one in found)) if found and found.hardware else None

    def train(self, batches: Iterator, num_steps: int) -> StepRecords:
        """Takes `num_steps` steps, looping on the device.

        Args:
          batches: what `batches()` returned; advanced by `num_steps`.
          num_steps: how many.

        Returns:
          Every step's record; fetching it waits for the steps to end.
        """
        first_step, self.loop_steps = self.step + 1, num_steps
        table = self._run_steps(batches, tf.constant(num_steps, tf.int32)).numpy().astype(np.float64)
        columns = _columns((*self.replica_step.report_names, "waited"), table)

        def within(field: str) -> dict[str, np.ndarray]:
            return {name.partition("/")[2]: part for name, part in columns.items() if name.startswith(f"{field}/")}

        self.last_seen = (first_step + num_steps - 1, float(columns["loss_scale"][-1])) if num_steps else self.last_seen
        packed = np.stack([*within("non_finite").values()], axis=1)
        return StepRecords(
            first_step=first_step,
            loss=columns["loss"],
            weight=columns["weight"],
            metrics=within("metrics"),
            gradient_norm=columns["gradient_norm"],
            finite=columns["finite"],
            loss_scale=columns["loss_scale"],
            learning_rate=columns["learning_rate"],
            non_finite=overflow.unpack(packed, len(self.model.trainable_variables)),
            input_wait_seconds=columns["waited"],
        )

    def _sum_in_graph(self, value: tf.Tensor) -> Any:
        return self.strategy.run(_sum_over_replicas, args=(value,))

    def _gather_in_graph(self, value: Any) -> Any:
        return self.strategy.run(_stack_of_replicas, args=(value,))

    def _run_steps_in_graph(self, batches: Iterator, num_steps: tf.Tensor) -> tf.Tensor:
        """float32 [steps, report names + 1]: the report of each step, and how long it waited for its batch."""

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

    def variables(self) -> dict[str, tf.Variable | keras.Variable]:
        """Everything a resumed run needs, by the name it has in a checkpoint."""
        named: dict[str, tf.Variable | keras.Variable] = {
            "counters/step": self.counters.step,
            "counters/skipped": self.counters.skipped,
        }
        for field, variable in zip(ScaleState._fields, self.counters.scale, strict=True):
            named[f"{_SCALE}{field}"] = variable
        named |= weight_names(self.model)
        for variable in self.optimizer.variables:
            named[unique_name(f"optimizer/{variable.path}", named)] = variable
        names = {id(variable): name for name, variable in named.items()}
        for source, average in self.ema.variables:
            named[average_of(names[id(source)])] = average
        return named

    def stand_ins(self) -> dict[str, str]:
        """What another run may have averaged although this one does not, or the other way round, as each run averages
        what its own forward pass moves: names of the averages of untrained weights, and the weights that stand in.
        """
        trained = {id(variable) for variable in self.model.trainable_variables}
        return {
            average_of(name): name
            for name, variable in self.variables().items()
            if name.startswith(MODEL) and id(variable) not in trained
        }

    def initial_loss_scale(self) -> dict[str, np.ndarray]:
        """The part of a snapshot that is the state of the loss scale, as a run starts with it."""
        state = self._loss_scale.initial()
        return {f"{_SCALE}{name}": np.array(value) for name, value in zip(state._fields, state, strict=True)}

    def could_have_scaled(self, state: Mapping[str, np.ndarray]) -> bool:
        """Whether this run's loss scale could have left a snapshot; for checkpoints that do not say which one did."""
        fields = {name: state[f"{_SCALE}{name}"].item() for name in ScaleState._fields}
        return precision.could_have_left(self._loss_scale, ScaleState(**fields), int(state["counters/skipped"]))

    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array of a snapshot, by name."""
        found = {}
        for name, variable in self.variables().items():
            part = self.part_of(variable)
            shape = variable.shape if part is None else part.whole.shape
            found[name] = tuple(shape), tf.dtypes.as_dtype(variable.dtype).name
        return found

    def part_of(self, variable: tf.Variable | keras.Variable) -> Part | None:
        """Of which part of a weight a replica's copy of the variable is the state; None where all copies are equal."""
        return self._parts.get(id(variable))

    @property
    def snapshots_together(self) -> bool:
        """Whether all workers have to call `snapshot` together, because each holds a part of the state."""
        return bool(self._parts) and self._is_multi_worker

    def snapshot(self) -> dict[str, np.ndarray]:
        """The state as host arrays, copied: training may go on while they are written.

        What is shared out is put together, so that the state is the same on any number of replicas.
        """
        return {name: self._whole(variable) for name, variable in self.variables().items()}

    def _whole(self, variable: tf.Variable | keras.Variable) -> np.ndarray:
        part = self.part_of(variable)
        if part is None:
            value = variable.value if isinstance(variable, keras.Variable) else variable
            # The tensor shares the variable's memory, of which `numpy` makes the one copy.
            return np.asarray(tf.convert_to_tensor(value).numpy())
        copies = self._copies(variable)
        if not self._is_multi_worker:
            return np.concatenate([one.numpy() for one in copies], part.axis)
        first = self._replicas[0]
        mine = self.strategy.experimental_distribute_values_from_function(
            lambda context: copies[context.replica_id_in_sync_group - first].read_value()
        )
        stacked = self.strategy.experimental_local_results(self._gather(mine))[0].numpy()
        return np.concatenate(list(stacked), part.axis)

    def _put(self, variable: tf.Variable | keras.Variable, value: np.ndarray) -> None:
        part = self.part_of(variable)
        if part is None:
            variable.assign(value)
            return
        for replica, one in zip(self._replicas, self._copies(variable), strict=True):
            one.assign(part.of_replica(value, replica))

    def _copies(self, variable: tf.Variable | keras.Variable) -> Sequence[tf.Variable]:
        """The copies of this worker's replicas."""
        value = variable.value if isinstance(variable, keras.Variable) else variable
        return self.strategy.experimental_local_results(value)

    def started(self, weights: Mapping[int, np.ndarray], slots: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What of a snapshot is another one where a run starts with other weights than the initial ones.

        Changes nothing, and takes no other worker: the rest is as each of them has built it.

        Args:
          weights: value by the id of a variable of the model; the others are as they are.
          slots: values of the optimizer's variables, by their names in a checkpoint.
        """
        names = {id(variable): name for name, variable in self.variables().items()}
        state = {names[key]: value for key, value in weights.items()}
        for source, average in self.ema.variables:
            if id(source) in weights:
                state[names[id(average)]] = weights[id(source)].astype(np.float32)
        for slot, source in self.optimizer.copies():
            if id(source) in weights:
                state[names[id(slot)]] = weights[id(source)]
        return state | dict(slots)

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Puts a snapshot, or a part of one, into every replica's variables.

        Names and shapes have been checked by the caller.
        """
        variables = self.variables()
        for name, value in state.items():
            self._put(variables[name], value)

    def check_agreement(self) -> None:
        """Checks that all workers are at the same step and leave out the same, after each restored what it saw on disk.

        Raises:
          PeerError: they are not, as when a shared disk shows its files late.
        """
        mine = self.step + ((zlib.crc32(repr(self.left_out.ranges).encode()) & 0xFFFFF) << 30)
        if self._sum_over_replicas(mine) != mine * self.strategy.num_replicas_in_sync:
            raise PeerError(
                f"this worker restored step {self.step}, another worker a different one, or with other batches left "
                "out; is --model_dir one directory that all workers share? Run the same command again"
            )

    def any_worker(self, flag: bool) -> bool:
        """Whether any worker says so: all call this after the same step and all get the same answer."""
        return bool(self.mean_over_workers([flag])[0])

    def mean_over_workers(self, values: npt.ArrayLike) -> np.ndarray:
        """The mean of what the workers say: all call this after the same step and all get the same answer."""
        mine = np.asarray(values, np.float64)
        if not self._is_multi_worker:
            return mine
        summed = self._sum(tf.constant(mine))
        return self.strategy.experimental_local_results(summed)[0].numpy() / self.strategy.num_replicas_in_sync

    @property
    def own_seconds(self) -> float | None:
        """Seconds that this worker has spent on its own part of all steps so far; None where that is not measured."""
        return None if self._own_time is None else float(self._own_time.seconds.numpy())

    def gather(self, values: Sequence[float], *, worker: int, num_workers: int) -> np.ndarray:
        """The values of all workers, [workers, n]: all call this after the same step."""
        mine = np.zeros([num_workers, len(values)])
        mine[worker] = values
        return self.mean_over_workers(mine) * num_workers

    def _sum_over_replicas(self, value: int) -> int:
        """Sums what each replica's worker says; a collective only where there are several workers."""
        if not self._is_multi_worker:
            return value * self.strategy.num_replicas_in_sync
        summed = self._sum(tf.constant(value, tf.int64))
        return int(self.strategy.experimental_local_results(summed)[0].numpy())


def _sum_over_replicas(value: tf.Tensor) -> tf.Tensor:
    # Without the copy, a value that was not made inside the replica cannot be reduced.
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))


def _stack_of_replicas(value: tf.Tensor) -> tf.Tensor:
    return tf.distribute.get_replica_context().all_gather(value[None], axis=0)


def _local_replicas(strategy: tf.distribute.Strategy) -> list[int]:
    """The numbers of this worker's replicas, in the order of its copies of a variable."""
    numbers: list[int] = []

    def note(context: Any) -> int:
        numbers.append(context.replica_id_in_sync_group)
        return context.replica_id_in_sync_group

    strategy.experimental_distribute_values_from_function(note)
    return numbers


def _columns(names: Sequence[str], table: np.ndarray) -> dict[str, np.ndarray]:
    """A table's columns by name: [rows], or [rows, n] of a name that stands n times in a row."""
    places, table = dict[str, list[int]](), table.reshape(-1, len(names))  # of no rows, it has no columns either
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return {name: table[:, found if len(found) > 1 else found[0]] for name, found in places.items()}


def weight_names(model: keras.Model) -> dict[str, keras.Variable]:
    """A model's weights by the names that they have in a checkpoint, in its order."""
    named: dict[str, keras.Variable] = {}
    for variable in model.weights:
        named[unique_name(f"{MODEL}{variable.path}", named)] = variable
    return named


def average_of(name: str) -> str:
    """The name of a weight's average in a checkpoint."""
    return f"{AVERAGES}{name.removeprefix(MODEL)}"


def unique_name(name: str, taken: Mapping[str, object]) -> str:
    """`name`, or `name#2`, … when layers of a subclassed model share a path; stable for a fixed build order."""
    if name not in taken:
        return name
    count = 2
    while f"{name}#{count}" in taken:
        count += 1
    return f"{name}#{count}"

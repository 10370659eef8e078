"""The state of a run: its counters, the names that variables have in a checkpoint, and how they are read and set."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.machine.array_parts import Part, Source, value_of, whole_of
from launcher.machine.no_autograph import call_converted
from launcher.optimizers import Optimizer, Optimizers
from launcher.optimizers.weight_shards import WeightShard
from launcher.step import initial_values, precision
from launcher.step.engine import Engine
from launcher.step.gradients import Checked
from launcher.step.moving_average import MovingAverage
from launcher.step.precision import LossScale, ScaleState
from launcher.step.workers import Workers, on_replicas
from launcher.tasks.keras_private import as_if_first, rnn_states

# Prefixes of names in a checkpoint.
MODEL, AVERAGES, SCALE = "model/", "ema/", "loss_scale/"
LIMITS = "counters/limits"  # of `Counters.limits`, which a checkpoint does not have


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """The variables that steer a run; one copy a replica and always equal (aggregation NONE: assigns are local).

    Attributes:
      step: int64, steps done, skipped ones included; the data position follows from it.
      skipped: int64, steps skipped so far.
      limits: float32 [2], the mean loss and the gradient norm above which a step is skipped; None for no such rule.
    """

    step: tf.Variable
    skipped: tf.Variable
    scale: ScaleState
    limits: tf.Variable | None = None

    @classmethod
    def make(cls, scale: ScaleState, *, has_limits: bool) -> Counters:
        """Those of a run that begins with a state of the loss scale; under the strategy's scope."""

        def variable(value: tf.Tensor, name: str) -> tf.Variable:
            return tf.Variable(value, trainable=False, name=name, aggregation=tf.VariableAggregation.NONE)

        return cls(
            step=variable(tf.constant(0, tf.int64), "step"),
            skipped=variable(tf.constant(0, tf.int64), "skipped"),
            scale=ScaleState(*(variable(value, name) for name, value in zip(ScaleState._fields, scale, strict=True))),
            limits=variable(tf.fill([2], math.inf), "limits") if has_limits else None,
        )

    def advance(self, loss_scale: LossScale, judged: Checked, scale: tf.Tensor) -> None:
        """Counts a step and moves the loss scale, whose value in this step was `scale`; in replica context."""
        before = ScaleState(scale, *(tf.convert_to_tensor(variable) for variable in self.scale[1:]))
        after = call_converted(loss_scale.update, before, judged.finite)
        for variable, old, new in zip(self.scale, before, after, strict=True):
            if new is not old:  # what is fixed costs nothing
                # An empty global batch leaves the loss scale unchanged.
                variable.assign(tf.where(judged.empty, old, new))
        self.step.assign_add(1)
        self.skipped.assign_add(tf.where(judged.applied, tf.constant(0, tf.int64), tf.constant(1, tf.int64)))


class State:
    """All that a resumed run needs of a trainer; the copies in shards of weights get their first values here.

    With an engine, values of what its devices have in parts are made beside the variables, each when it is due.

    Attributes:
      scaling: what a checkpoint says of the loss scale, whose state is another one's where any of this differs.
    """

    def __init__(
        self,
        *,
        strategy: tf.distribute.Strategy,
        workers: Workers,
        model: keras.Model,
        optimizer: Optimizer | Optimizers,
        ema: MovingAverage,
        counters: Counters,
        loss_scale: LossScale,
        engine: Engine | None = None,
    ):
        self._engine = engine
        self._sources: dict[int, Source] = {}
        self._strategy, self._workers, self._loss_scale = strategy, workers, loss_scale
        self._model, self._optimizer, self._ema, self._counters = model, optimizer, ema, counters
        self.scaling = precision.recorded(keras.config.dtype_policy().name, loss_scale)
        self._shards = {id(held): shard for held, shard in [*optimizer.slot_shards, *ema.shards]}
        self._replicas = _local_replicas(strategy) if self._shards else []
        self._gather = on_replicas(strategy, _stack_of_replicas)
        self._later = {} if engine is None else dict(engine.first_values or {})
        self._sources |= {key: whole_of(one.make) for key, one in self._later.items()}
        copies = [(slot, weight) for slot, weight in optimizer.copies() if self.shard_of(slot) is not None]
        copies += [] if initial_values.are_left_out() else [(average, shard.whole) for average, shard in ema.shards]
        for copy, weight in copies:  # which Keras could not copy
            self._put(copy, _cast(self._source(weight), tf.dtypes.as_dtype(copy.dtype).as_numpy_dtype))

    def variables(self) -> dict[str, tf.Variable | keras.Variable]:
        """Everything a resumed run needs, by the name it has in a checkpoint."""
        named: dict[str, tf.Variable | keras.Variable] = {
            "counters/step": self._counters.step,
            "counters/skipped": self._counters.skipped,
        }
        for field, variable in zip(ScaleState._fields, self._counters.scale, strict=True):
            named[f"{SCALE}{field}"] = variable
        named |= weight_names(self._model)
        for variable in self._optimizer.variables:
            named[unique_name(as_if_first(f"optimizer/{variable.path}", self._model), named)] = variable
        names = {id(variable): name for name, variable in named.items()}
        for source, average in self._ema.variables:
            named[average_of(names[id(source)])] = average
        return named

    def stand_ins(self) -> dict[str, str]:
        """What another run may have averaged although this one does not, or the other way round, as each run averages
        what its own forward pass moves: names of the averages of untrained weights, and the weights that stand in.
        """
        trained = {id(variable) for variable in self._model.trainable_variables}
        return {
            average_of(name): name
            for name, variable in self.variables().items()
            if name.startswith(MODEL) and id(variable) not in trained
        }

    def initial_loss_scale(self) -> dict[str, np.ndarray]:
        """The shard of a snapshot that is the state of the loss scale, as a run starts with it."""
        state = self._loss_scale.initial()
        return {f"{SCALE}{name}": np.array(value) for name, value in zip(state._fields, state, strict=True)}

    def could_have_scaled(self, state: Mapping[str, np.ndarray]) -> bool:
        """Whether this run's loss scale could have left a snapshot; for checkpoints that do not say which one did."""
        fields = {name: state[f"{SCALE}{name}"].item() for name in ScaleState._fields}
        return precision.could_have_left(self._loss_scale, ScaleState(**fields), int(state["counters/skipped"]))

    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array of a snapshot, by name."""
        found = {}
        for name, variable in self.variables().items():
            shard = self.shard_of(variable)
            shape = variable.shape if shard is None else shard.whole.shape
            found[name] = tuple(shape), tf.dtypes.as_dtype(variable.dtype).name
        return found

    def shard_of(self, variable: tf.Variable | keras.Variable) -> WeightShard | None:
        """Of which shard of a weight a replica's copy of the variable is the state; None where all copies are equal."""
        return self._shards.get(id(variable))

    def names_of_parts(self) -> set[str]:
        """Of what an engine's devices have in parts, whose values are to be sources."""
        if self._engine is None:
            return set()
        weights = [] if self._engine.first_values is None else self._optimizer.shards
        parts = self._shards.keys() | {id(shard.whole) for shard in weights if shard is not None}
        return {name for name, one in self.variables().items() if id(one) in parts}

    @property
    def snapshots_together(self) -> bool:
        """Whether all workers have to call `snapshot` together, because each holds a shard of the state."""
        return bool(self._shards) and self._workers.are_several

    @property
    def is_written_together(self) -> bool:
        """Whether each process writes its own parts of a checkpoint."""
        return self._engine is not None and self.snapshots_together

    def to_write(self) -> dict[str, np.ndarray | Part]:
        """What this process writes of a checkpoint: all of a snapshot, or its own parts."""
        if self._engine is None or not self.is_written_together:
            return dict(self.snapshot())
        self._engine.take_state()
        return {name: self._engine.own(name) for name in self.variables()}

    def snapshot(self) -> dict[str, np.ndarray]:
        """The state as host arrays, copied: training may go on while they are written.

        What is shared out is put together, so that the state is the same on any number of replicas.
        """
        if self._engine is not None and self._engine.holds:
            return {name: self._engine.value(name) for name in self.variables()}
        return {name: self._whole(variable) for name, variable in self.variables().items()}

    def sources(self) -> dict[str, Source]:
        """What makes the values, by their names; each is made, or copied, when it is asked for."""
        return {name: self._source(variable) for name, variable in self.variables().items()}

    def let_go(self) -> None:
        """Forgets the values, as an engine's devices hold them."""
        self._sources.clear()
        for variable in self._model.trainable_variables:
            if id(variable.value) in self._later:
                self._later[id(variable.value)].forget(variable.value)

    def value(self, name: str, variable: tf.Variable) -> np.ndarray:
        """What a variable that is no shard has after the last step; `name` is the one it has in a checkpoint."""
        return self._engine.value(name) if self._engine is not None and self._engine.holds else variable.numpy()

    def _whole(self, variable: tf.Variable | keras.Variable) -> np.ndarray:
        shard = self.shard_of(variable)
        if shard is None:
            # The tensor shares the variable's memory, of which `numpy` makes the one copy.
            return np.asarray(tf.convert_to_tensor(plain(variable)).numpy())
        if self._engine is not None:
            return self._source(variable)(None)
        copies = self._copies(variable)
        if not self._workers.are_several:
            return np.concatenate([one.numpy() for one in copies], shard.axis)
        first = self._replicas[0]
        mine = self._strategy.experimental_distribute_values_from_function(
            lambda context: copies[context.replica_id_in_sync_group - first].read_value()
        )
        stacked = self._strategy.experimental_local_results(self._gather(mine))[0].numpy()
        return np.concatenate(list(stacked), shard.axis)

    def _source(self, variable: tf.Variable | keras.Variable) -> Source:
        """What makes a variable's value, on whatever it is beside the variable."""
        if (found := self._sources.get(id(plain(variable)))) is not None:
            return found
        if self._engine is not None and (shard := self.shard_of(variable)) is not None:
            one = self._copies(variable)[0]
            return whole_of(lambda: np.concatenate([one.numpy()] * shard.count, shard.axis))  # as optimizers begin with
        return whole_of(lambda: self._whole(variable))

    def _put(self, variable: tf.Variable | keras.Variable, value: np.ndarray | Source) -> None:
        shard, key = self.shard_of(variable), id(plain(variable))
        if self._engine is None and callable(value):
            value = value(None)
        if callable(value) or (shard is not None and self._engine is not None):
            self._sources[key] = value if callable(value) else value_of(value)
            return
        if shard is None:
            self._sources.pop(key, None)
            variable.assign(value)
            return
        for replica, one in zip(self._replicas, self._copies(variable), strict=True):
            one.assign(shard.of_replica(value, replica))

    def _copies(self, variable: tf.Variable | keras.Variable) -> Sequence[tf.Variable]:
        """The copies of this worker's replicas."""
        return self._strategy.experimental_local_results(plain(variable))

    def started(self, weights: Mapping[int, np.ndarray], slots: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What of a snapshot is another one where a run starts with other weights than the initial ones.

        Changes nothing, and takes no other worker: the rest is as each of them has built it. The weights are by the id
        of a variable of the model, the optimizer's slots by their names in a checkpoint.
        """
        names = {id(variable): name for name, variable in self.variables().items()}
        state = {names[key]: value for key, value in weights.items()}
        for source, average in self._ema.variables:
            if id(source) in weights:
                state[names[id(average)]] = weights[id(source)].astype(np.float32)
        for slot, source in self._optimizer.copies():
            if id(source) in weights:
                state[names[id(slot)]] = weights[id(source)]
        return state | dict(slots)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights, as `MovingAverage.in_place_of_weights` has it."""
        if self._engine is not None and self._engine.holds:
            names = {id(variable): name for name, variable in self.variables().items()}
            self._engine.averages = {names[id(source)]: names[id(one)] for source, one in self._ema.variables}
            try:
                yield
            finally:
                self._engine.averages = {}
            return
        if self._engine is None or not self._ema.shards:
            with self._ema.in_place_of_weights(self._strategy):
                yield
            return
        weights = [(source, source.numpy()) for source, _ in self._ema.variables]
        for source, average in self._ema.variables:
            source.assign(self._whole(average))
        try:
            yield
        finally:
            for source, value in weights:
                source.assign(value)

    def restore(self, state: Mapping[str, np.ndarray | Source]) -> None:
        """Puts a snapshot, or a shard of one, whose names and shapes fit, into every replica's variables.

        An engine's devices get what is a source when they take the state.
        """
        if self._engine is not None:
            self._engine.bring_home(but=state.keys())
        self.put_all(state.items())

    def put_all(self, values: Iterable[tuple[str, np.ndarray | Source]]) -> None:
        """The same of one array after the other, by their names, for an engine that brings the state home."""
        variables = self.variables()
        for name, value in values:
            self._put(variables[name], value)


def plain(variable: tf.Variable | keras.Variable) -> Any:
    """TensorFlow's own variable of one of Keras's; another as it is."""
    return variable if isinstance(variable, tf.Variable) else variable.value


def _cast(source: Source, dtype: Any) -> Source:
    return lambda where: source(where).astype(dtype)


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


def weight_names(model: keras.Model) -> dict[str, keras.Variable]:
    """A model's weights, and states of recurrent layers, by the names that they have in a checkpoint, in its order."""
    named: dict[str, keras.Variable] = {}
    for variable in (*model.weights, *rnn_states(model)):
        named[unique_name(as_if_first(f"{MODEL}{variable.path}", model), named)] = variable
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

"""State of a run: the names that variables have in a checkpoint, and how they are read and set."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.machine.array_parts import Part, Source, whole_of
from launcher.optimizers.weight_shards import WeightShard, of_model
from launcher.runtime import Runtime, Variable, initial_values
from launcher.runtime.tensorflow import plain
from launcher.step import precision
from launcher.step.layers import layers_of
from launcher.step.step_config import StepParts
from launcher.tasks.keras_private import as_if_first, rnn_states

# Prefixes of names in a checkpoint.
MODEL, AVERAGES, SCALE = "model/", "ema/", "loss_scale/"
LIMITS = "counters/limits"  # of `Counters.limits`, which a checkpoint does not have


class State:
    """All that a resumed run needs of a trainer; the copies in shards of weights get their first values here.

    Attributes:
      scaling: what a checkpoint says of the loss scale, whose state is another one's where any of this differs.
    """

    def __init__(self, runtime: Runtime, parts: StepParts):
        self._runtime, self._loss_scale, self.model = runtime, parts.loss_scale, parts.model
        self._optimizer, self._ema, self._counters = parts.optimizer, parts.ema, parts.counters
        task, states = parts.task, parts.model.metrics_variables
        self._assigned = task.step_assigns or [one for one in states if id(one) in task.in_layers]
        self.scaling = precision.recorded(keras.config.dtype_policy().name, parts.loss_scale)
        self._divided = of_model(parts.model, parts.config.shards, [one.variable for one in parts.statistics])
        self._shards = {id(held): shard for held, shard in [*self._optimizer.slot_shards, *self._ema.shards]}
        runtime.state.hold(self)
        copies = [(slot, weight) for slot, weight in self._optimizer.copies() if self.shard_of(slot) is not None]
        copies += (
            [] if initial_values.are_left_out() else [(average, shard.whole) for average, shard in self._ema.shards]
        )
        for copy, weight in copies:  # which Keras could not copy
            runtime.state.write(copy, self._cast(weight, tf.dtypes.as_dtype(copy.dtype).as_numpy_dtype))

    def _cast(self, weight: Variable, dtype: Any) -> Source:
        return whole_of(lambda: self._runtime.state.read(weight).astype(dtype))

    def variables(self) -> dict[str, Variable]:
        """Everything a resumed run needs, by the name it has in a checkpoint."""
        named: dict[str, Variable] = {
            "counters/step": self._counters.step,
            "counters/skipped": self._counters.skipped,
        }
        for field, variable in zip(precision.ScaleState._fields, self._counters.scale, strict=True):
            named[f"{SCALE}{field}"] = variable
        named |= weight_names(self.model)
        for variable in self._optimizer.variables:
            named[unique_name(as_if_first(f"optimizer/{variable.path}", self.model), named)] = variable
        names = {id(variable): name for name, variable in named.items()}
        for source, average in self._ema.variables:
            named[average_of(names[id(source)])] = average
        return named

    def all_variables(self) -> dict[str, tf.Variable]:
        """All that a step can change: also the limits of spikes, and states of seed generators."""
        named = self.variables()
        if self._counters.limits is not None:
            named[LIMITS] = self._counters.limits
        return _with_unsaved((*self.model.variables, *self._assigned), named)

    def stand_ins(self) -> dict[str, str]:
        """Averages that another run may have although this one has not, or the other way round, as each run averages
        what its own forward pass moves: names of the averages of untrained weights, and the weights that stand in.
        """
        trained = {id(variable) for variable in self.model.trainable_variables}
        return {
            average_of(name): name
            for name, variable in self.variables().items()
            if name.startswith(MODEL) and id(variable) not in trained
        }

    def initial_loss_scale(self) -> dict[str, np.ndarray]:
        """The shard of a snapshot that is the state of the loss scale, as a run starts with it."""
        state = self._loss_scale.initial()
        return {f"{SCALE}{name}": np.array(value) for name, value in zip(state._fields, state, strict=True)}

    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every array of a snapshot, by name."""
        found = {}
        for name, variable in self.variables().items():
            shard = self.shard_of(variable)
            shape = variable.shape if shard is None else shard.whole.shape
            found[name] = tuple(shape), tf.dtypes.as_dtype(variable.dtype).name
        return found

    def shard_of(self, variable: Variable) -> WeightShard | None:
        """The shard of a weight whose state a replica's copy of the variable is; None where all copies are equal."""
        return self._shards.get(id(variable))

    def weight_shards(self) -> dict[int, WeightShard]:
        """By the id of a weight, how it can be divided among the replicas, as the optimizer's state of it is."""
        return {id(shard.whole): shard for shard in self._divided}

    def names_of_parts(self) -> set[str]:
        """Names of what a runtime's devices have in parts, whose values are to be sources."""
        if not self._runtime.traits.own_parts:
            return set()
        parts = set(self._shards)
        if self._runtime.state.first_values is not None:
            parts |= self.weight_shards().keys()
        return {name for name, one in self.variables().items() if id(one) in parts}

    @property
    def snapshots_together(self) -> bool:
        """Whether all workers have to call `snapshot` together, because each holds a shard of the state."""
        return bool(self._shards) and self._runtime.workers.are_several

    @property
    def is_written_together(self) -> bool:
        """Whether each process writes its own parts of a checkpoint."""
        return self._runtime.traits.own_parts and self.snapshots_together

    def to_write(self) -> dict[str, np.ndarray | Part]:
        """The part of a checkpoint that this process writes: all of a snapshot, or its own parts."""
        state = self._runtime.state
        read = state.read_part if self.is_written_together else state.read
        return {name: read(variable) for name, variable in self.variables().items()}

    def snapshot(self) -> dict[str, np.ndarray]:
        """The state as host arrays that keep their values: training may go on while they are written.

        What is shared out is put together, so that the state is the same on any number of replicas.
        """
        return {name: self._runtime.state.read(variable) for name, variable in self.variables().items()}

    def started(self, weights: Mapping[int, np.ndarray], slots: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The part of a snapshot that is another one where a run starts with other weights than the initial ones.

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
        """Inside the block the model has the averaged weights; afterwards its own again, bit for bit.

        After an error of TensorFlow's runtime it keeps the averaged ones.
        """
        runtime, state, averages = self._runtime, self._runtime.state, self._ema.variables
        if state.is_away:
            state.averages = {id(plain(source)): average for source, average in averages}
            try:
                yield
            finally:
                state.averages = {}
            return
        # On the devices where each has what it evaluates by; else by the host, which a pod's devices are far from.
        here = runtime.traits.one_copy or (runtime.traits.own_parts and self._ema.shards)
        weights = [state.read(source) for source, _ in averages] if here else []

        def exchange(values: Iterable[np.ndarray]) -> None:
            for (source, _), value in zip(averages, values, strict=True) if here else ():
                source.assign(value)
            if averages and not here:
                runtime.host.call(self._ema.swap)

        exchange(state.read(average) for _, average in averages)
        try:
            yield
        except tf.errors.OpError:
            raise  # It may come from a device that is gone, which another call could wait for without end.
        except BaseException:
            exchange(weights)
            raise
        exchange(weights)

    def restore(self, state: Mapping[str, np.ndarray | Source]) -> None:
        """Puts a snapshot, or a shard of one, whose names and shapes fit, into every replica's variables.

        What is a source is made when it is due.
        """
        variables, held = self.variables(), self._runtime.state
        held.bring_home(but=[variables[name] for name in state])
        for name, value in state.items():
            held.write(variables[name], value)
        refresh(self.model)


def refresh(model: keras.Model) -> None:
    """Has a model compute by weights that it has been given: a Normalization goes by constants made of them."""
    for layer in layers_of(model, keras.layers.Normalization):
        layer.finalize_state()


def weight_names(model: keras.Model) -> dict[str, keras.Variable]:
    """A model's weights, and states of recurrent layers, by the names that they have in a checkpoint, in its order."""
    named: dict[str, keras.Variable] = {}
    for variable in (*model.weights, *rnn_states(model)):
        named[unique_name(as_if_first(f"{MODEL}{variable.path}", model), named)] = variable
    return named


def _with_unsaved(others: Sequence[keras.Variable], named: Mapping[str, Variable]) -> dict[str, tf.Variable]:
    """Variables by their names, and what others there are, such as the states of seed generators."""
    known, named = {id(variable) for variable in named.values()}, dict(named)
    for variable in {id(one): one for one in others}.values():
        if id(variable) not in known:
            named[unique_name(f"{MODEL}{variable.path}", named)] = variable
    return {name: plain(variable) for name, variable in named.items()}


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

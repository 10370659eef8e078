"""Statistics and counts that a forward pass assigns: which they are, and how those of a batch's parts are put together.

Which they are is told from a model's frozen weights by tracing one pass. Its parts are on replicas and in microbatches.
A moving average is affine in the mean over a batch's rows: its changes are averaged. What layers of one's own keep may
add up over the rows, as counts do, or be the largest or smallest so far: that is found by trial, on the two halves of a
batch and on both together. What is neither is refused by name.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from launcher.data.batch_spec import BatchSpec
from launcher.data.pipeline import WEIGHT, Batch
from launcher.errors import UsageError
from launcher.machine.no_autograph import call_converted
from launcher.step.layers import layers_of, owners, turn_off_dropout
from launcher.tasks.base import Task
from launcher.tasks.keras_metrics import arrays, fold_of, halves
from launcher.tasks.keras_private import rnn_states

_ROWS = 64  # at most, of the batch that is tried
_STARTS = (0, 3, -3)  # added to the values: what is the largest so far may not move from the one it has
_SIGNS = {"max": 1, "min": -1}
# What does not change a variable that it is given.
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})
# Weights of Keras's layers that nothing but an optimizer assigns; layers in which anything may be done.
_FROZEN = {
    *("kernel", "bias", "gamma", "beta", "embeddings", "depthwise_kernel", "pointwise_kernel", "recurrent_kernel"),
    *("mean", "variance", "count"),  # of a Normalization
}
_ANY = keras.layers.Lambda, keras.layers.Wrapper


class Statistic(NamedTuple):
    """A variable that a forward pass assigns, and how its values on parts of a batch are put together.

    Attributes:
      fold: "mean" of the parts' changes, "rows" for their mean by real rows, "sum" of the changes; or "max" or "min" of
        the values, as of what is the same on all of them.
    """

    variable: keras.Variable
    fold: str

    def gained(self, before: tf.Tensor, rows: tf.Tensor, microbatch: tf.Tensor | int, of: int) -> tf.Tensor:
        """The gain of a part over the value before it, to be added to what others do; of whole numbers, int64.

        Args:
          rows: its real ones; a part without any runs on rows that fill it up.
          microbatch: its number among so many of this replica; of an extreme, each part has a place of its own.
        """
        after = tf.convert_to_tensor(self.variable.value)
        if self.fold == "mean":
            return after - before
        if not after.dtype.is_floating:
            before, after = tf.cast(before, tf.int64), tf.cast(after, tf.int64)
        if sign := _SIGNS.get(self.fold):
            found = tf.where(rows > 0, sign * after, after.dtype.min)
            context = tf.distribute.get_replica_context()
            number = context.replica_id_in_sync_group * of + microbatch
            mine = tf.equal(tf.range(context.num_replicas_in_sync * of), number)
            return tf.where(tf.reshape(mine, [-1, *[1] * len(found.shape)]), found, tf.zeros_like(found))
        found = tf.where(rows > 0, after - before, tf.zeros_like(after))
        return (
            found if self.fold == "sum" else tf.cast(rows, found.dtype) * tf.concat([tf.reshape(found, [-1]), [1]], 0)
        )

    def moved(self, before: tf.Tensor, gained: tf.Tensor, num_parts: int) -> tf.Tensor:
        """The new value, from what so many parts have gained together."""
        if sign := _SIGNS.get(self.fold):
            return tf.cast(sign * tf.reduce_max(gained, axis=0), before.dtype)
        if self.fold == "rows":
            gained = tf.reshape(gained[:-1] / gained[-1], before.shape)
        return before + tf.cast(gained / num_parts if self.fold == "mean" else gained, before.dtype)


Gains = Sequence[tuple[Statistic, tf.Tensor]]
"""Each statistic or overwritten weight, and what it gained in all microbatches of all replicas together."""


def candidates(model: keras.Model) -> list[keras.Variable]:
    """Variables that a forward pass could move: numbers that are neither trained nor states of seed generators."""
    seeds = {id(variable) for variable in seed_states(model)}
    return [
        variable
        for variable in (*model.non_trainable_variables, *rnn_states(model))
        if id(variable) not in seeds and variable.dtype != "string"
    ]


def is_moving(variable: keras.Variable) -> bool:
    """Whether a variable that is assigned is averaged over replicas, as a moving statistic; else it is a count."""
    return bool(tf.dtypes.as_dtype(variable.dtype).is_floating)


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """States of the model's seed generators: in Keras 3 they are variables but not weights."""
    weights = {id(variable) for variable in model.weights}
    return [
        variable
        for variable in model.variables
        if id(variable) not in weights and variable.path.endswith("seed_generator_state")
    ]


def assigned(task: Task, model: keras.Model, spec: Callable[[], BatchSpec]) -> list[keras.Variable]:
    """The `candidates` that the task's loss assigns in training: no frozen weights, nothing of frozen layers.

    The loss is traced once, as the default strategy's only replica and under no strategy's scope; nothing runs.

    Args:
      spec: called for the shapes and dtypes of a microbatch, if they are needed.

    Returns:
      In the model's order. All candidates when the loss cannot be traced here, because the data are not there or it
      fails: `Trainer.trace` then says why.
    """
    found = candidates(model)
    if not found:
        return []
    handles: list[list[tf.Tensor]] = []

    def forward(batch: Mapping[str, tf.Tensor]) -> None:
        for variable in found:  # of any copy, since strategies differ in which of them this trace assigns
            copies = getattr(variable.value, "values", ())
            handles.append([variable.value.handle, *(copy.handle for copy in copies)])
        call_converted(task.loss, model, dict(batch), True)

    try:
        traced = tf.function(forward, autograph=False).get_concrete_function(spec())
    except Exception:  # of the user's code; the step's own trace meets it again, where it is explained
        return found
    inner = {id(outer): inside for outer, inside in captures(traced)}
    inside = [[inner[id(handle)] for handle in copies if id(handle) in inner] for copies in handles]
    if not any(inside):  # no variable is recognised
        return found
    return [one for one, resources in zip(found, inside, strict=True) if any(map(_is_changed, resources))]


def of_keras(model: keras.Model) -> list[keras.Variable] | None:
    """Those that layers of Keras may assign in training, without a trace; None where that is not known by their names.

    Among them may be what a call with `training=False` leaves alone: to put that back changes nothing in one part of a
    batch, but would be averaged over several.
    """
    layers, found = layers_of(model), candidates(model)
    norms = [one for one in layers if isinstance(one, keras.layers.BatchNormalization)]
    moves = {id(weight): norm.trainable for norm in norms for weight in norm.non_trainable_variables}
    known = all(one.__module__.startswith("keras.") and not isinstance(one, _ANY) for one in layers)
    if known and all(id(one) in moves or one.path.rpartition("/")[2] in _FROZEN for one in found):
        return [one for one in found if moves.get(id(one))]
    return None


def _is_changed(resource: tf.Tensor) -> bool:
    """Whether a graph changes a resource that it is given, itself or in what it calls."""
    # Leans on TensorFlow: operations that call functions tell by this attribute which of their inputs these only read.
    # Noticed by tests/step/test_moving_statistics.py. Then: see `auto_control_deps_utils`; an operation without it is
    # taken to change what it is given, and every untrained variable that it is given is averaged.
    for user in resource.consumers():
        try:
            read = [*range(len(user.inputs))] if user.type in _READS else user.get_attr("_read_only_resource_inputs")
        except ValueError:
            return True
        if any(one is resource and place not in read for place, one in enumerate(user.inputs)):
            return True
    return False


def captures(traced: tf.types.experimental.ConcreteFunction) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Each tensor from outside that a function uses, and its placeholder inside."""
    outer = traced.captured_inputs
    return zip(outer, traced.inputs[len(traced.inputs) - len(outer) :], strict=True)


def usual(variable: keras.Variable) -> Statistic:
    """The statistic that a variable is taken for without a trial."""
    return Statistic(variable, "mean" if is_moving(variable) else "max")


def is_overwritten(weight: keras.Variable) -> bool:
    """Whether Keras overwrites a trained weight by its gradient, as it does with the scales of float8."""
    return getattr(weight, "overwrite_with_gradient", False)


def moving(statistics: Sequence[Statistic], weights: Sequence[keras.Variable]) -> list[Statistic]:
    """Statistics that are put together from the parts of a batch: also the largest gradients of overwritten weights."""
    return [*statistics, *(Statistic(one, "max") for one in weights if is_overwritten(one))]


def present(statistics: Sequence[Statistic]) -> list[tf.Tensor]:
    """Values of statistics, as they are now."""
    return [tf.convert_to_tensor(one.variable.value) for one in statistics]


def unknown(model: keras.Model, assigned: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Variables among the assigned ones that are of layers neither Keras's nor the launcher's."""
    found = owners(model, lambda layer: layer.weights)

    def is_known(layer: object) -> bool:
        return isinstance(layer, keras.layers.BatchNormalization) or layer.__module__.startswith(
            ("keras.", "launcher.models.")
        )

    return [one for one in assigned if id(one) in found and not is_known(found[id(one)].layer)]


def tried(
    model: keras.Model,
    assigned: Sequence[keras.Variable],
    batch: Batch,
    forward: Callable[[Batch], object],
    beside: Sequence[keras.Variable] = (),
) -> list[Statistic]:
    """The assigned variables, those that are `unknown` by a trial, after which all are as they were.

    Args:
      batch: of the training data, two rows or more, of which some are tried.
      forward: does with a batch what a training step does that assigns.
      beside: what it assigns, too, such as trained weights that are kept within bounds.

    Raises:
      UsageError: of one, the parts of a batch cannot be put together.
    """
    states, random = unknown(model, assigned), np.random.default_rng(0)
    kept = [*assigned, *beside, *seed_states(model)]
    before = arrays(kept)
    folds = {id(one): usual(one) for one in assigned}

    def put_back() -> None:
        for variable, value in zip(kept, before, strict=True):
            variable.assign(value)

    def drawn(one: tf.Tensor) -> tf.Tensor:
        """In the range of the batch: its halves could be alike by chance."""
        if not (one.dtype.is_floating or one.dtype.is_integer):
            return one
        return tf.cast(random.uniform(np.min(one), np.max(one) + 1, one.shape), one.dtype)

    def changes(start: int, part: Batch) -> list[np.ndarray]:
        put_back()
        for one in states:
            one.assign(one.numpy() + np.array(start).astype(one.dtype))
        begun = arrays(states)
        forward(part)
        return [one.numpy().astype(np.float64) - old for one, old in zip(states, begun, strict=True)]

    trials = []
    rows = min(_ROWS, len(batch[WEIGHT])) // 2 * 2
    with turn_off_dropout(model) as undo:
        undo.callback(put_back)
        for one in layers_of(model, keras.layers.BatchNormalization):  # a row is to be no matter of the others
            for part in (*one.weights, one):  # weights have it from their layer, unless they are frozen by themselves
                undo.callback(setattr, part, "trainable", part.trainable)
            one.trainable = False
        for start in _STARTS:
            both = {name: one[:rows] for name, one in batch.items()}
            both |= {name: drawn(one) for name, one in both.items() if start and name != WEIGHT}
            parts = [part for part, *_ in halves((both, None, None, None))]
            with contextlib.suppress(Exception) if start else contextlib.nullcontext():  # values that it may not take
                trials.append([changes(start, part) for part in (*parts, both)])
    for place, one in enumerate(states):
        found = [[change[place] for change in trial] for trial in trials]
        none = np.full(one.shape, np.inf if one.dtype == "bool" else 0.0)  # truths have no sum
        fold = fold_of(none, found, averages=is_moving(one))
        if fold is None:
            raise UsageError(
                f"{one.path}: what is assigned to it is no mean, sum, maximum or minimum over the rows of a batch, so "
                "parts of one, on replicas or in microbatches, cannot be put together: keep sums in it, divide where "
                "they are used, or train on one replica with train.microbatches = 1"
            )
        if np.any(found):  # else, nothing is known
            folds[id(one)] = Statistic(one, fold.over_steps)
    return list(folds.values())

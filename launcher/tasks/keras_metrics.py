"""States of a compiled model's metrics, put together over replicas and steps.

Keras updates a metric once with each batch. Here a batch lies on several replicas, and any number of steps is reported
together. The states of Keras's own metrics add up. What others do is found by trial: on two halves of a batch, the two
one after the other, and both as one batch. A state that does not add up over the rows of a batch is updated with the
whole global batch, as Keras does; one that is no sum, maximum or minimum over batches is refused.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.errors import UsageError
from launcher.tasks.keras_private import undivided
from launcher.tasks.keras_weights import each_tensor, padding_left_out, weights_of

Batch = tuple[Any, Any, Any, Any]
"""x, y, outputs and sample weights, as Keras's `compute_metrics` takes them."""

# A function that is given as a metric may give one number a batch; R2Score counts rows whatever they weigh; those with
# an axis may take it along the batch. Not all of them are in the oldest Keras.
_KINDS = ("MeanMetricWrapper", "R2Score", "CosineSimilarity", "PearsonCorrelation", "ConcordanceCorrelation")
_TO_BE_TRIED = tuple(getattr(keras.metrics, name, None) for name in _KINDS)


class Fold(NamedTuple):
    """The way in which one state is put together.

    Attributes:
      over_steps: "sum", "max" or "min".
      whole: it takes all rows of a global batch together; else the replicas' states add up.
    """

    over_steps: str
    whole: bool


class Frozen(keras.StatelessScope):
    """A scope in which variables have given values, and assigning changes nothing."""

    def add_update(self, update: Any) -> None:
        del update


def is_overridden(model: keras.Model, method: str = "compute_metrics") -> bool:
    """Whether the model computes its metrics, or what else, by a method of its own."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def arrays(variables: Sequence[keras.Variable]) -> list[np.ndarray]:
    """Copies of their values."""
    return [np.array(variable.numpy()) for variable in variables]


def has_unknown(model: keras.Model) -> bool:
    """Whether the model has metrics of which nothing is known before a trial."""
    return is_overridden(model) or not all(one.of_keras for one in _names(model).values())


def of_layers(model: keras.Model, x: Any) -> frozenset[int]:
    """Ids of the states that the model's layers update where they are called."""
    own = [one for group in model.metrics if group.name not in ("loss", "compile_metrics") for one in group.variables]
    with keras.StatelessScope() as scope:
        for training in (True, False) if own else ():
            model(x, training=training)
    return frozenset(id(one) for one in own if scope.get_current_value(one) is not None)


def updated(
    model: keras.Model, start: Sequence[Any], batch: Batch, calls: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """The states of the model's metrics after a batch, and what `compute_metrics` returns for it.

    Args:
      calls: whether the model is called, too, for what its layers update.
    """
    with undivided(), keras.StatelessScope([*zip(model.metrics_variables, start, strict=True)]) as scope:
        if calls:
            model(batch[0], training=False)
        logs = model.compute_metrics(*batch)
        return [scope.get_current_value(variable) for variable in model.metrics_variables], logs


def count_losses(model: keras.Model, scope: keras.StatelessScope, before: set[int], weight: tf.Tensor) -> None:
    """Has the means of single losses, which `compute_loss` has just taken in a scope, be over the weight of the batch.

    Args:
      before: ids of the values that the scope held before.
      weight: float32 scalar, of the batch.
    """
    for metric in model.metrics:
        values = [scope.get_current_value(variable) for variable in metric.variables]
        if type(metric) is keras.metrics.Mean and not before & {*map(id, values)}:
            mean = tf.math.divide_no_nan(*values)
            for variable, value in zip(metric.variables, (mean * weight, weight), strict=True):
                scope.add_update((variable, value))


def of_all_replicas(batch: Batch, real: tf.Tensor, *, needs_x: bool, padded: bool = False) -> Batch:
    """The real rows of the global batch, or all of them, on every replica; in replica context.

    Gradients go through the replica's own rows alone: what others computed is constant, so there is no collective in
    the backward pass, and the sum over replicas is the gradient of whatever is made of the whole.
    """
    context = tf.distribute.get_replica_context()
    present = None if padded else context.all_gather(tf.identity(real), axis=0) > 0

    def gathered(one: tf.Tensor) -> tf.Tensor:
        missing = [[0, real.shape[0] - tf.shape(one)[0]], *[[0, 0]] * (one.shape.rank - 1)]
        whole = side_by_side(tf.ensure_shape(tf.pad(one, missing), [real.shape[0], *one.shape[1:]]))
        return whole if padded else tf.boolean_mask(whole, present)

    x, *rest = batch
    x, y, outputs, weight = (each_tensor(part, gathered) for part in (x if needs_x else None, *rest))
    return x, y, outputs, weight


def side_by_side(one: tf.Tensor) -> tf.Tensor:
    """All replicas' tensors, one after another along the first axis, with gradients through this replica's own."""
    context = tf.distribute.get_replica_context()
    # Collectives know neither bool nor all kinds of floats.
    wire = (tf.float32 if one.dtype.is_floating else tf.int32) if one.dtype.size < 4 else one.dtype
    whole = tf.cast(context.all_gather(tf.cast(tf.stop_gradient(one), wire), axis=0), one.dtype)
    if not one.dtype.is_floating:
        return whole
    replicas = context.num_replicas_in_sync
    is_own = tf.equal(tf.range(replicas), context.replica_id_in_sync_group)
    parts = tf.reshape(whole, tf.concat([[replicas], tf.shape(one)], axis=0))
    parts = tf.where(tf.reshape(is_own, [-1, *[1] * one.shape.rank]), one[tf.newaxis], parts)
    return tf.ensure_shape(tf.reshape(parts, tf.shape(whole)), whole.shape)


def folds(model: keras.Model, batch: Batch, of_loss: Collection[int], calls: bool = False) -> list[Fold]:
    """Folds of the model's metrics' variables, found on a batch of two real examples or more.

    Args:
      of_loss: ids of the variables that `compute_loss` counts in.
      calls: as of `updated`.

    Raises:
      UsageError: a state is put together in no way that is known.
    """
    names, variables = _names(model), model.metrics_variables
    found = [Fold("sum", False)] * len(variables)
    known = {*of_loss, *(one for one, named in names.items() if named.of_keras)}
    open_ones = [index for index, variable in enumerate(variables) if id(variable) not in known]
    if not open_ones:
        return found
    start, trials = arrays(variables), []
    for both in variants(batch):
        first, second = halves(both)
        after = [updated(model, start, part, calls)[0] for part in (first, second, both)]
        after += [updated(model, after[0], second, calls)[0], updated(model, after[1], first, calls)[0]]
        trials.append([[np.asarray(state, np.float64) for state in states] for states in after])
    for index in open_ones:
        fold = fold_of(start[index].astype(np.float64), [[states[index] for states in trial] for trial in trials])
        if fold is None:
            raise UsageError(
                f"metric {names[id(variables[index])].name!r} keeps {variables[index].name!r}, which is no sum, "
                "maximum or minimum over batches, so what several steps make of it is not known; keep sums in it, and "
                "divide in result()"
            )
        found[index] = fold
    return found


def fold_of(start: np.ndarray, trials: Sequence[Sequence[np.ndarray]], averages: bool = False) -> Fold | None:
    """From a state after the first half, the second, both as one batch, the second after the first, and the reverse.

    Args:
      trials: without the last two, where parts one after another are as one batch.
      averages: whether it may be a mean by rows, too, "rows", which is tried before the extremes.
    """
    trials = [trial for trial in trials if not any(np.isnan(state).any() for state in trial)]
    merges: dict[str, Callable[..., Any]] = {
        "sum": lambda one, other: one + other - start,
        **({"rows": lambda one, other: (one + other) / 2} if averages else {}),
        "max": np.maximum,
        "min": np.minimum,
    }
    for name, merge in merges.items():
        merged = [(merge(first, second), both, after or [both]) for first, second, both, *after in trials]
        if all(equal(one, whole) for whole, _, after in merged for one in after):
            # Where nothing moved it, nothing is known of how its rows add up.
            moved = any(not equal(trial[0], start) and not equal(trial[1], start) for trial in trials)
            adds_up = all(equal(both, whole) for whole, both, _ in merged)
            return Fold(name, whole=name != "sum" or not (moved and adds_up))
    return None


def equal(one: npt.ArrayLike, other: npt.ArrayLike) -> bool:
    """Whether all numbers are the same but for rounding."""
    return np.allclose(one, other, rtol=1e-4, atol=1e-6)


def of_one_batch(model: keras.Model, batch: Batch) -> tuple[str, ...]:
    """Names of what an overridden `compute_metrics` returns that depends on the batch itself, not on states alone."""
    if not is_overridden(model):
        return ()
    variables = model.metrics_variables
    with Frozen([*zip(variables, arrays(variables), strict=True)]):
        one, other = (numbers(model.compute_metrics(*part)) for part in halves(batch))
    return tuple(name for name in one if not np.array_equal(one[name], other[name], equal_nan=True))


def ignores_weights(model: keras.Model, batch: Batch) -> list[str]:
    """Names of the metrics that rows of weight 0 change."""
    start = arrays(model.metrics_variables)
    x, y, outputs, weight = batch
    real = np.zeros(_num_rows(x), np.float32)
    real[: len(real) // 2] = 1
    weights = weights_of(outputs, weight, tf.constant(real))
    names, alone = _names(model), updated(model, start, halves(batch)[0])[0]
    try:
        with padding_left_out(model, tf.constant(real)):
            together = updated(model, start, (x, y, outputs, weights))[0]
    except (ValueError, TypeError, AssertionError, tf.errors.InvalidArgumentError):
        return [named.name for named in names.values() if not named.of_keras]
    pairs = zip(model.metrics_variables, alone, together, strict=True)
    return [names[id(variable)].name for variable, one, other in pairs if not equal(one, other)]


def of_whole_batches(model: keras.Model, found: Sequence[Fold]) -> dict[int, str]:
    """Ids of the states that take whole batches, and the names of their metrics."""
    names = _names(model)
    pairs = zip(map(id, model.metrics_variables), found, strict=True)
    return {one: names[one].name for one, fold in pairs if fold.whole}


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """The first and the second half of a batch's rows."""
    middle = _num_rows(batch[0]) // 2

    def part(rows: slice) -> Batch:
        x, y, outputs, weight = (each_tensor(one, lambda tensor: tensor[rows]) for one in batch)
        return x, y, outputs, weight

    return part(slice(middle)), part(slice(middle, None))


def _num_rows(x: Any) -> int:
    return len(next(one for one in keras.tree.flatten(x) if one is not None))


def variants(batch: Batch) -> Iterator[Batch]:
    """The batch, and with outputs of other sizes: a model that is not trained yet may give almost the same for all."""
    random = np.random.default_rng(0)
    x, y, outputs, weight = batch
    yield batch
    yield x, y, each_tensor(outputs, lambda one: tf.cast(random.uniform(size=one.shape), one.dtype)), weight
    yield x, y, each_tensor(outputs, lambda one: tf.cast(random.normal(0, 3, one.shape), one.dtype)), weight


class _Named(NamedTuple):
    name: str
    of_keras: bool


def _names(model: keras.Model) -> dict[int, _Named]:
    """The metric that each variable belongs to, by the variable's id."""
    overridden = is_overridden(model)
    found: dict[int, _Named] = {}
    for group in model.metrics:
        compiled = group.name == "compile_metrics"
        for metric in group.metrics if compiled else [group]:
            own = type(metric).__module__.startswith("keras.") and type(metric) not in _TO_BE_TRIED
            named = _Named(metric.name, own and (compiled or not overridden or metric.name == "loss"))
            found |= {id(variable): named for variable in metric.variables}
    return found


def put_together(
    variables: Sequence[keras.Variable], initial: Sequence[np.ndarray], names: Sequence[str], sums: Mapping[str, Any]
) -> Frozen:
    """A scope in which states are what all replicas and steps made of their first values.

    Args:
      names: of the vectors of `sums` that states are in, one after another; extremes are in "max:…" and "min:…".
    """
    left, mapping = {name: np.atleast_1d(part) for name, part in sums.items()}, []
    for variable, before, name in zip(variables, initial, names, strict=True):
        part, left[name] = np.split(left[name], [before.size])
        value = part.reshape(before.shape) + (0 if name.startswith(("max:", "min:")) else before)
        mapping.append((variable, value.astype(before.dtype)))
    return Frozen(mapping)


def floats(name: str, number: np.ndarray) -> dict[str, float]:
    """A result by its name, or each of several by one of its own."""
    return {f"{name}_{i}" if number.ndim else name: float(one) for i, one in enumerate(number.flat)}


def leaves(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results by name, also those of metrics that give several by names of their own."""
    return {
        inner: leaf
        for name, value in results.items()
        for inner, leaf in (leaves(value) if isinstance(value, dict) else {name: value}).items()
    }


def numbers(results: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`leaves` as arrays; inside the scope, as a result may be a variable, which has its value there alone."""
    return {name: np.asarray(keras.ops.convert_to_tensor(value)) for name, value in leaves(results).items()}

"""Parts of Keras that are private and have no public form. Tried with Keras 3.8.0 to 3.15.1.

In a stateless scope `model.losses` has what was added inside of it alone, and reductions divide by the replicas.
Keras's own trainers step around the one by `_losses_override`, and around the other by undoing it.
"""

import contextlib
import contextvars
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Leans on TensorFlow: the seed of the process is `_seed` of its context, and `_rng` gives those of single operations.
# Tried with 2.16 to 2.21. Noticed by tests/modes/test_fit_alone.py. Then: see what tf.random.set_seed sets.
from tensorflow.python.eager import context

from launcher.errors import TrainingError
from launcher.machine import xla
from launcher.machine.replaced import Shared, put
from launcher.machine.replicas import context_of_several, sum_over_replicas
from launcher.models.transformer.attention_kernel import attend_as_keras

# Leans on Keras: models have `_losses_override`, `_flatten_layers` and `_distribute_strategy`, layers `_auto_config`,
# variables `_value` and `_initialize`, metrics `_fn_kwargs`, BatchNormalization `_moments`, optimizers `_var_key`,
# `_trainable_variables`, their indices and `_distribution_strategy`, trainers the three functions, numbers without a
# seed the other one, what a program was seeded with `get_random_seed`, the module of `keras.ops` its backend's
# dot_product_attention. Noticed by tests/models/test_keras_attention.py, tests/tasks/test_keras_metrics.py,
# tests/tasks/test_own_train_step.py, tests/step/test_layer_policies.py, tests/step/test_statistics.py,
# tests/modes/test_fit.py, tests/modes/test_fit_model.py. Then: see how Keras's own
# TensorFlow trainer does it; a TrainingError or an AttributeError names what is gone.
GLOBAL_SEEDS = "global_seed_generator"  # of the module of SeedGenerator: a generator of each thread's own
_OF_LOSSES = "a compiled model's loss is taken over replicas"
SCALES = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
_MEAN = "reduce_weighted_values"


def with_local_metrics(build: Callable[[], Any]) -> Any:
    """The model that `build` returns, having made metrics whose states each replica has for itself.

    In Keras 3.8 every update of one adds up over the replicas by itself, which would then be done twice.
    """

    def local(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
        on_read = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
        if kwargs.get("aggregation") == tf.VariableAggregation.SUM and not on_read:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return next_creator(**kwargs)

    with tf.variable_creator_scope(local):
        return build()


_undivided = Shared()
Factor = Callable[[tf.Tensor, tf.Tensor | None], tf.Tensor | float]
"""Of the values that a Loss object takes the mean of, and their mask: what the mean is multiplied by."""
_factor: contextvars.ContextVar[Factor | None] = contextvars.ContextVar("factor", default=None)


def undivided() -> contextlib.AbstractContextManager[None]:
    """Has Keras leave the replicas out of losses that it reduces: it takes 1/replicas, for a sum over equal parts.

    TrainingError where this Keras has other names for it.
    """
    return _undivided.standing(_undivide)


def _undivide(undo: contextlib.ExitStack) -> None:
    """Replaces the functions by which Keras divides losses, and has its weighted mean multiplied by `Factor`.

    A mask that says of rows what values have more axes of is given those axes.
    """
    module = sys.modules[keras.losses.Loss.__module__]
    if missing := [name for name in (*SCALES, _MEAN) if not hasattr(module, name)]:
        raise _unknown(missing[0], _OF_LOSSES)
    of_keras = getattr(module, _MEAN)

    def mean(values: tf.Tensor, *args: Any, mask: tf.Tensor | None = None, **rest: Any) -> Any:
        if mask is not None:  # of rows, where values have other axes
            mask = mask[(..., *[None] * (values.shape.rank - mask.shape.rank))]
        found, factor = of_keras(values, *args, mask=mask, **rest), _factor.get()
        return found if factor is None else found * tf.cast(factor(values, mask), found.dtype)

    for name, other in {**dict.fromkeys(SCALES, lambda value: value), _MEAN: mean}.items():
        put(undo, module, name, other)


@contextlib.contextmanager
def keras_losses_of(losses: Sequence[tf.Tensor], model: keras.Model, factor: Factor | None = None) -> Iterator[None]:
    """Has Keras compute a loss as on one device, with these as the model's own, also inside a stateless scope.

    Here a part's mean is weighted by its examples, and each Loss object's multiplied by a factor. TrainingError as of
    `undivided`.
    """
    if not hasattr(model, "_losses_override"):
        raise _unknown("_losses_override", _OF_LOSSES)

    def of_mean(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | float:
        model._losses_override.clear()  # other replicas' threads have their turns where a factor waits for them
        found = 1.0 if factor is None else factor(values, mask)
        model._losses_override[:] = losses
        return found

    token = _factor.set(of_mean)
    with undivided():
        try:
            model._losses_override[:] = losses
            yield
        finally:
            model._losses_override.clear()
            _factor.reset(token)


def _unknown(name: str, what: str) -> TrainingError:
    return TrainingError(f"Keras {keras.version()} has no {name}, by which {what}; install keras 3.8 to 3.15")


def rnn_states(model: keras.Model) -> list[keras.Variable]:
    """States from which stateful recurrent layers go on in the next batch; Keras does not count them as weights."""
    layers = [one for one in model._flatten_layers() if isinstance(one, keras.layers.RNN) and one.stateful]
    return [state for layer in layers for state in keras.tree.flatten(layer.states or [])]


@contextlib.contextmanager
def kept_states(model: keras.Model) -> Iterator[None]:
    """Has recurrent layers afterwards go on from where they were, or begin."""
    before = {id(one): one.numpy() for one in rnn_states(model)}
    yield
    for one in rnn_states(model):
        one.assign(before.get(id(one), np.zeros(one.shape)))


_real_rows: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("real rows", default=None)


@contextlib.contextmanager
def of_rows(real: tf.Tensor | None) -> Iterator[None]:
    """Tells batch normalisation which rows of the batch are real: above 0, float32 [rows]; 0 for what fills it up."""
    token = _real_rows.set(real)
    try:
        yield
    finally:
        _real_rows.reset(token)


def synchronize_moments(layer: keras.layers.BatchNormalization) -> None:
    """Has a synchronized layer take the moments, over all replicas, of real rows and of what a mask leaves alone."""
    of_keras = layer._moments

    def moments(inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        real = _real_rows.get()
        if not layer.synchronized or context_of_several() is None or (mask is None and real is None):
            return of_keras(inputs, mask)
        kept = tf.constant(True) if mask is None else tf.cast(mask, tf.bool)[..., tf.newaxis]
        if real is not None:
            # A layer may be called on several rows of each example, one after the other; on others it is told nothing.
            count, rows = tf.shape(inputs)[0], tf.size(real)
            is_real = (tf.gather(real, tf.range(count) * rows // count) > 0) | (count % rows != 0)
            kept &= tf.reshape(is_real, [-1, *[1] * (inputs.shape.rank - 1)])

        def total(values: tf.Tensor) -> tf.Tensor:
            return sum_over_replicas(tf.reduce_sum(tf.where(kept, values, 0.0), layer._reduction_axes, keepdims=True))

        count = total(tf.ones_like(inputs)) + keras.config.epsilon()
        mean = total(inputs) / count
        return tf.squeeze(mean), tf.squeeze(total(tf.square(inputs - mean)) / count)

    layer._moments = moments


def crop_to_known_size(layer: keras.layers.RandomCrop) -> None:
    """Has a layer that crops where it draws give a part of its own size, which XLA cannot tell from both ends."""
    of_keras = layer.transform_images

    def crop(images: tf.Tensor, transformation: Any, training: bool = True) -> tf.Tensor:
        if not (training and tf.is_tensor(transformation[0]) and layer.data_format == "channels_last"):
            return of_keras(images, transformation, training=training)
        begin = [*[0] * (images.shape.rank - 3), *transformation, 0]
        size = [*images.shape[:-3], layer.height, layer.width, images.shape[-1]]
        size = [-1 if one is None else one for one in size]  # the rest
        return tf.slice(tf.cast(images, layer.compute_dtype), begin, size)

    layer.transform_images = crop


_attends = contextlib.ExitStack()


def attend_by_kernel(on: bool) -> None:
    """Whether Keras's scaled dot-product attention is that of `attend_as_keras` where XLA compiles, in this process."""
    _attends.close()
    if not on:
        return
    nn = sys.modules[keras.ops.dot_product_attention.__module__].backend.nn
    of_keras = nn.dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> tf.Tensor:
        found = attend_as_keras(*args, **kwargs) if xla.is_compiling() else None
        return of_keras(*args, **kwargs) if found is None else found

    put(_attends, nn, of_keras.__name__, attend)


def is_along_batch(metric: keras.metrics.Metric) -> bool:
    """Whether a metric that wraps a function was told to take it along the rows of a batch."""
    return 0 in keras.tree.flatten(getattr(metric, "_fn_kwargs", {}).get("axis"))


def is_from_config(model: keras.Model) -> bool:
    """Whether a model's layers were made from a file or a config, which names what code leaves to Keras: `trainable`
    and a dtype. Layers that do not tell, such as wrappers of others and models inside, are not asked.
    """
    asked = [one for one in model.layers if not isinstance(one, keras.layers.InputLayer)]
    given = [one.config for layer in asked if (one := getattr(layer, "_auto_config", None))]
    return bool(given) and all("trainable" in one and one.get("dtype") for one in given)


def forget_names() -> None:
    """Has names of layers count from the first again, as they do in a new process, by which checkpoints go."""
    sys.modules[keras.backend.get_uid.__module__].reset_uids()


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy that a model was made under, and on which Keras's fit trains it; None for none."""
    return getattr(model, "_distribute_strategy", None)


def given_metrics(model: keras.Model) -> list[Any]:
    """Metrics that a model was compiled with."""
    compiled = getattr(model, "_compile_metrics", None)
    given = [getattr(compiled, name, None) for name in ("_user_metrics", "_user_weighted_metrics")]
    return [one for one in keras.tree.flatten(given) if one is not None]


def calls_of(model: keras.Model) -> list[Any]:
    """Calls of a functional model, in order, each with its arguments, tensors by their numbers; and its outputs.

    Empty for another model. By the nodes from which Keras writes a config, which not every layer has.
    """
    numbers, calls, nodes = dict[int, str](), list[Any](), getattr(model, "_nodes_by_depth", {})
    for node in (node for depth in sorted(nodes, reverse=True) for node in nodes[depth]):
        operation, given = node.operation, (node.arguments.args, node.arguments.kwargs)
        if isinstance(operation, keras.Layer):  # by its place, which tells calls of one from those of two
            operation = f"{type(operation).__name__} {model.operations.index(operation)}"
        calls.append([operation, keras.tree.map_structure(lambda one: numbers.get(id(one), one), given)])
        numbers.update({id(one): f"#{len(numbers) + at}" for at, one in enumerate(node.outputs)})
    return [*calls, [numbers.get(id(one)) for one in model.outputs]] if calls else []


def seed_of_program() -> int | None:
    """The seed that `keras.utils.set_random_seed`, or TensorFlow's, was called with, from any thread, or None."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


_counted_from: weakref.WeakKeyDictionary[keras.Model, dict[str, int]] = weakref.WeakKeyDictionary()


def _firsts(parts: Sequence[Any]) -> dict[str, int]:
    """The first count of each name that Keras has counted up in this process."""
    found = dict[str, int]()
    for part in parts:
        name = part.name.removeprefix("forward_").removeprefix("backward_")  # as a Bidirectional has it
        base, _, number = name.rpartition("_")
        base, number = (base, number) if number.isdigit() else (name, "0")
        if base.replace("_", "") == type(part).__name__.lower():
            found[base] = min(found.get(base, sys.maxsize), int(number))
    return {base: first for base, first in found.items() if first}


def as_if_first(name: str, model: keras.Model) -> str:
    """A name in a checkpoint, with counts of Keras as if a model that was given were the first of its process."""
    firsts = _counted_from.get(model)
    if not firsts:
        return name
    counted = re.compile(rf"(?<![a-z0-9])({'|'.join(firsts)})_(\d+)(?!\d)")
    return counted.sub(lambda it: f"{it[1]}_{int(it[2]) - firsts[it[1]]}".removesuffix("_0"), name)


class Held:
    """A model's, its parts', metrics' and optimizers' hold on a strategy, with the values that its variables have."""

    def __init__(self, model: keras.Model):
        kinds = (keras.Model, keras.Variable, keras.optimizers.Optimizer)
        for kind, name in zip(kinds, ("_flatten_layers", "_initialize", "_var_key"), strict=True):
            if not hasattr(kind, name):
                raise _unknown(name, "a model that is made already is put on other devices")
        self._parts = parts = list[Any](model._flatten_layers())
        self._models = [part for part in parts if isinstance(part, keras.Model)]
        inner = [value for part in parts for value in vars(part).values()]
        optimizers = [one for one in inner if isinstance(one, keras.optimizers.Optimizer)]
        self._optimizers = [*optimizers, *(getattr(one, "inner_optimizer", one) for one in optimizers)]
        _counted_from[model] = _firsts([*parts, *self._optimizers])
        variables = [one for part in [*parts, *optimizers] for one in part.variables]
        variables += [one for held in self._models for one in held.metrics_variables]
        for held in self._models:  # metrics that were given to compile; before the first batch nothing else names them
            metrics = [one for one in given_metrics(held) if isinstance(one, keras.metrics.Metric)]
            variables += [variable for one in metrics for variable in one.variables]
        found = {id(one): one for one in variables if getattr(one, "_value", None) is not None}
        self._values = [(one, one.numpy()) for one in found.values()]

    def make(self) -> None:
        """Makes the variables anew in the current strategy's scope, with these values; what was traced is forgotten."""
        for variable, value in self._values:
            variable._initialize(value)
        for part in self._parts:
            for function in (one for kind in type(part).__mro__ for one in vars(kind).values()):
                getattr(function, "_descriptor_cache", {}).pop(part, None)  # of a tf.function, its traces
        for optimizer in self._optimizers:
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            weights = getattr(optimizer, "_trainable_variables", ())
            optimizer._trainable_variables_indices = {optimizer._var_key(one): at for at, one in enumerate(weights)}
        for model in self._models:
            model._distribute_strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
            model.train_function = model.test_function = model.predict_function = None

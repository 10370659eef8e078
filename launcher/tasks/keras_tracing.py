"""Traces of a Keras model's own step, without what stands between its mathematics and one device.

A step that is written for one device calls optimizers, differentiates its loss and updates metrics by itself. While a
replica traces it, these give way to what the replica says:

- `apply_gradients` and `apply` of every optimizer, and `scale_loss`;
- a `tf.function`, which is traced into the step itself, by AutoGraph;
- the gradient of a loss by trained weights begins with the loss scale and the replica's share of the examples, and
  comes back without them, so that what the step does to gradients it does to those of its mean; that of a loss with
  a dimension, of whose elements TensorFlow takes the sum, comes back as an estimate of the sum over all examples;
- a metric's mean of one number counts the replica's examples, so that sums over replicas are sums over examples;
- losses are means over the replica's own examples, whether Keras or the step takes them;
- numbers that are drawn without a generator, by Keras or by `tf.random`, come from the replica's.

The numbers of a run are its own, those of the process by Python, NumPy, TensorFlow and Keras the program's: in
`drawn_from` they begin with a seed, and after it each goes on as if it had not been. TensorFlow's own way to set a seed
would also have each `tf.function` of the program begin its numbers anew.

Replicas' threads take turns while they are traced. So the replacements stand once for all of them, and each looks up
what its own thread traces.
"""

import contextlib
import contextvars
import dataclasses
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.machine import loops
from launcher.machine.no_autograph import call_converted, no_autograph
from launcher.machine.replaced import Shared, put
from launcher.tasks.keras_private import GLOBAL_SEEDS, SCALES, context

_NOT_0 = 2**31  # a tensor cannot be a seed beside the seed 0 of a process

Result = tuple[keras.metrics.Metric, str | None]
Apply = Callable[[keras.optimizers.Optimizer, Sequence[Any], Sequence[keras.Variable] | None], None]


@dataclasses.dataclass(kw_only=True)
class Tracing:
    """One replica's trace of a step: what it goes by, and what it finds.

    Attributes:
      apply: called in place of an optimizer's, with the optimizer, gradients and variables as they were given.
      num_real: float32 scalar, the replica's examples.
      total: float32 scalar, the examples of all replicas, if `has_sums`.
      seeds: for numbers that are drawn without a generator.
      weights: ids of the trained variables.
      upstream: float32 scalar, what a loss is multiplied by where its gradient begins.
      downstream: float32 scalar, what its gradient is divided by.
      differentiates: whether gradients are computed; else they are zeros, which costs nothing and needs no variables.
      losses: what was differentiated by trained weights, or the means of its elements.
      has_sums: whether what was differentiated had dimensions.
      results: what metrics gave as their results, each with the metric and the name of one of several.
    """

    apply: Apply
    num_real: tf.Tensor
    seeds: keras.random.SeedGenerator
    total: tf.Tensor | float = 1.0
    weights: frozenset[int] = frozenset()
    upstream: tf.Tensor | float = 1.0
    downstream: tf.Tensor | float = 1.0
    differentiates: bool = True
    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    has_sums: bool = False
    results: list[tuple[Any, Result]] = dataclasses.field(default_factory=list)


_tracing: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("tracing", default=None)
_standing = Shared()


@contextlib.contextmanager
def replica(tracing: Tracing, metrics: Sequence[keras.metrics.Metric]) -> Iterator[None]:
    """A block in which this thread traces a step of one replica, which updates these metrics."""
    with _standing.standing(functools.partial(_stand, metrics)):
        token = _tracing.set(tracing)
        try:
            yield
        finally:
            _tracing.reset(token)


@contextlib.contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """A block in which what is drawn, such as a model's first values or a dataset's order, follows from the seed."""
    process = vars(context.context())
    # No variable of a strategy, as Keras's own would be.
    seeds = types.SimpleNamespace(next=lambda ordered=True: tf.constant(np.random.randint(2**31 - 1, size=2), tf.int64))
    with contextlib.ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        undo.callback(np.random.set_state, np.random.get_state())
        undo.callback(process.update, _seed=process["_seed"], _rng=process.get("_rng"))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        process.update(_seed=seed or _NOT_0, _rng=random.Random(seed))
        _stand_for_numbers(undo, lambda: seeds)
        yield


def _stand(metrics: Sequence[keras.metrics.Metric], undo: contextlib.ExitStack) -> None:
    """Replaces what Keras and TensorFlow do between a step and one device, until `undo` is closed.

    What replaces a function is called with the thread's trace and the function that it replaces, before the arguments.
    Threads that trace nothing get the function itself.
    """
    replace = functools.partial(_replace, undo, _tracing.get)
    kinds = [keras.optimizers.Optimizer]
    for kind in kinds:
        kinds += kind.__subclasses__()
        replace(kind, "apply", _apply)
        replace(kind, "apply_gradients", lambda _, __, optimizer, pairs: optimizer.apply(*zip(*pairs, strict=True)))
        replace(kind, "scale_loss", _unscaled)
    replace(type(tf.function(_stand)), "__call__", _called)
    replace(tf.GradientTape, "gradient", _gradient)
    replace(keras.metrics.Mean, "update_state", _update_state)
    for name in SCALES:
        replace(sys.modules[keras.losses.Loss.__module__], name, _unscaled)
    _stand_for_numbers(undo, lambda: getattr(_tracing.get(), "seeds", None))
    for metric in metrics:
        replace(metric, "result", functools.partial(_result, metric))


def _stand_for_numbers(undo: contextlib.ExitStack, seeds: Callable[[], Any]) -> None:
    """Has numbers that are drawn without a generator come from those of `seeds`, where it gives any."""
    _replace(undo, seeds, sys.modules[keras.random.SeedGenerator.__module__], GLOBAL_SEEDS, lambda own, _: own)
    for name in ("normal", "truncated_normal", "uniform"):
        # Else by a state of the process, which another attempt would not have.
        _replace(undo, seeds, tf.random, name, functools.partial(_drawn, getattr(tf.random, f"stateless_{name}")))


def _replace(
    undo: contextlib.ExitStack, get: Callable[[], Any], owner: Any, name: str, other: Callable[..., Any]
) -> None:
    """Has `other(found, real, *arguments)` answer for what an owner has, or inherits, where `get` finds something."""
    real = getattr(owner, name)

    @no_autograph
    def answer(*args: Any, **rest: Any) -> Any:
        found = get()
        return real(*args, **rest) if found is None else other(found, real, *args, **rest)

    put(undo, owner, name, answer)


def _unscaled(tracing: Tracing, real: Any, *args: Any) -> Any:
    """The last argument as it is, of functions that scale it: an optimizer's loss, or a loss by the replicas."""
    return args[-1]


def _drawn(stateless: Any, seeds: Any, real: Any, shape: Any, *args: Any, seed: Any = None, **rest: Any) -> tf.Tensor:
    """Numbers of `tf.random` by the stateless function of the same name, with the next of these seeds."""
    return stateless(shape, seeds.next(), *args, **rest)


def _apply(
    tracing: Tracing, real: Any, optimizer: keras.optimizers.Optimizer, grads: Any, trainable_variables: Any = None
) -> None:
    """Hands gradients and variables to the trace, as they were given to an optimizer.

    A LossScaleOptimizer's are those of the one inside: the loss scale is the replica's business.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    tracing.apply(inner, list(grads), None if trainable_variables is None else list(trainable_variables))


def _called(tracing: Tracing, real: Any, function: Any, *args: Any, **rest: Any) -> Any:
    """The call of a `tf.function`, traced into the step."""
    return call_converted(function.python_function, *args, **rest)


def _gradient(
    tracing: Tracing,
    real: Any,
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    output_gradients: Any = None,
    **rest: Any,
) -> Any:
    """The gradient of a loss by trained weights, which begins with the loss scale and comes back without it.

    Any other gradient, such as one by inputs, or of what has a gradient given, is TensorFlow's own.
    """
    leaves, by = tf.nest.flatten(target), keras.tree.flatten(sources)
    loops.count_turns(tf.compat.v1.get_default_graph())
    are_sums = any(leaf.shape != () for leaf in leaves)
    if not tracing.differentiates:
        tracing.has_sums |= are_sums and all(isinstance(leaf, (keras.Variable, tf.Variable)) for leaf in by)
        return keras.tree.map_structure(_zeros, sources)
    if (
        output_gradients is not None
        or any(id(source) not in tracing.weights for source in by)
        or any((leaf.shape != ()) != are_sums for leaf in leaves)
    ):
        return real(tape, target, sources, output_gradients=output_gradients, **rest)
    tracing.losses += [tf.reduce_mean(leaf) for leaf in leaves]
    begins = tf.nest.map_structure(lambda leaf: tf.fill(tf.shape(leaf), tf.cast(tracing.upstream, leaf.dtype)), target)
    gradients = real(tape, target, sources, output_gradients=begins, **rest)
    downstream = tracing.downstream
    if are_sums:
        downstream *= tf.maximum(tracing.num_real, 1.0) / tracing.total

    def as_if_alone(gradient: Any, source: Any) -> Any:
        if gradient is None or getattr(source, "overwrite_with_gradient", False):
            return gradient
        return tf.cast(tf.convert_to_tensor(gradient), tf.float32) / downstream

    # Of TensorFlow's, as it is what made the structure, and to which None is a leaf in every version.
    return tf.nest.map_structure(as_if_alone, gradients, sources)


def _zeros(source: Any) -> tf.Tensor:
    return tf.zeros(source.shape, source.dtype) if isinstance(source, keras.Variable) else tf.zeros_like(source)


def _update_state(
    tracing: Tracing, real: Any, metric: keras.metrics.Mean, values: Any, sample_weight: Any = None
) -> Any:
    """Updates a mean, which counts the replica's examples where it is given one number of them all."""
    if sample_weight is None and not len(keras.ops.shape(values)):
        sample_weight = tracing.num_real
    return real(metric, values, sample_weight=sample_weight)


def _result(metric: keras.metrics.Metric, tracing: Tracing, real: Any) -> Any:
    """The metric's result, and a note in the trace of which metric gave it: what a step returns is told by that."""
    value = real()
    leaves = value.items() if isinstance(value, dict) else [(None, value)]
    tracing.results += [(leaf, (metric, name)) for name, leaf in leaves]
    return value

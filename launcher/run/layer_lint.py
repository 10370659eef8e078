"""Traps of the libraries underneath that a built model meets: of a plan, a report, the doctor and `launcher.lint`.

docs/traps.md has all traps. `launcher.precision_report.lint` adds what only a traced step shows.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import versions
from launcher.machine.replaced import put
from launcher.reporting.units import first
from launcher.step import layer_policies
from launcher.step.layers import Placed, layers_of, walk
from launcher.tasks.base import Task
from launcher.tasks.keras_model import KerasTask
from launcher.tasks.keras_private import given_metrics

_DIGITS = {"bfloat16": 8, "float16": 11}  # binary ones of a number, the first included
_ATTENDS = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention
_UNSEEN: tuple[Any, Any] = None, None
_FLOAT32 = "give the layer dtype='float32'"
# Of equal logits of so many classes, or a larger number squared, float16 makes 0, or infinity.
_TOO_MANY = 65520


@dataclasses.dataclass(frozen=True, kw_only=True)
class LintFinding:
    """One thing that could be better."""

    rule: str  # its name, such as "softmax in 16 bits"
    level: str = "warn"  # where it costs accuracy, memory or speed; "info" where it is only good to know
    path: str = ""  # of the layer, variable or operation; empty for the recipe as a whole
    text: str  # what was seen
    fix: str  # what to do

    def __str__(self) -> str:
        return f"{self.path}: {self.text}; {self.fix}"


def lint(model: keras.Model, x: Any = None) -> list[LintFinding]:
    """Traps that a Keras model meets in Keras's own `fit`; docs/traps.md has each. Nothing is trained.

    Args:
      model: built, and compiled if its optimizer and metrics are to be looked at.
      x: a batch of inputs, as the model takes them: then findings say how many of its ids or masked steps they are of.

    Returns:
      Findings, each with the layer's path, what was seen and the remedy; text by `str`.

    Raises:
      UsageError: the model is not built.

    Example:
      >>> for trap in launcher.lint(model): print(trap)
    """
    if not model.built:
        raise UsageError(f"launcher.lint: model {model.name!r} is not built: call it on a batch, or model.build(shape)")
    return [*_left(model, x, x), *_mended(model, x)]


def of_run(model: keras.Model, task: Task, *, measured: bool = False) -> Iterator[LintFinding]:
    """Findings in a model of a task, made under the policy of the run, but for what a run mends.

    `measured`: data is read, for their numbers.
    """
    batch = task.first_batch()[0] if measured and isinstance(task, KerasTask) else None
    return _left(model, (getattr(task, "example", None) or [None])[0] if batch is None else batch, batch)


def _warn(rule: str, path: str, text: str, fix: str = _FLOAT32, level: str = "warn") -> LintFinding:
    return LintFinding(rule=rule, level=level, path=path, text=text, fix=fix)


def _left(model: keras.Model, x: Any, batch: Any) -> Iterator[LintFinding]:
    """What a run meets as Keras's `fit` does; of inputs like `x`, with numbers of a `batch`."""
    is_graph = layer_policies.is_graph(model)
    last = [id(layer) for layer in layer_policies.making_outputs(model)]
    placed = [*walk(model)]
    narrow = _narrow(placed)
    tables = [one for one in placed if isinstance(one.layer, keras.layers.Embedding) and _may_round(one)]
    pools = [one for one in narrow if isinstance(one.layer, keras.layers.GlobalAveragePooling1D)]
    calls = _calls(model, x, [one.layer for one in (*tables, *pools)])
    for computing in narrow:
        layer, dtype = computing.layer, computing.layer.compute_dtype
        digits = _DIGITS[dtype]
        limit = 2**digits  # the largest whole number up to which the dtype has all
        ends = _ends(layer) if id(layer) in last else ""
        if ends == "sigmoid" or (ends == "softmax" and _by_cross_entropy(model)):
            text = f"{ends} is computed in {dtype}{_of_head(ends, limit, layer)}"
            yield _warn("head in 16 bits", computing.path, text)
        elif ends and is_graph:
            text = (
                f"the model's output is {dtype}: its loss sees {digits} binary digits, and not all wholes above {limit}"
            )
            yield _warn("outputs in 16 bits", computing.path, text)
        sentinel = getattr(layer, "mask_value", 0)
        if sentinel and float(tf.cast(sentinel, dtype)) != sentinel:
            text = f"mask_value {sentinel:g} is no number of {dtype}, so that nothing is masked"
            yield _warn("sentinel in 16 bits", computing.path, text + _unmasked(layer, batch))
        if dtype == "float16" and calls.get(id(layer), _UNSEEN)[1] is not None:
            text = "what a mask leaves of a sequence is added up in float16: sums above 65504 are infinite"
            yield _warn("pooling in float16", computing.path, text)
    for table in tables:
        given, _ = calls.get(id(table.layer), _UNSEEN)
        limit = 2 ** _DIGITS.get(given.dtype.name if given is not None else "", 99)
        if table.layer.input_dim > limit:
            text = f"ids come as {given.dtype.name}, which changes many of those above {limit}{_rounded(given, batch)}"
            yield _warn("ids in 16 bits", table.path, text, "give the ids as integers")
    yield from _narrow_weights(model)
    yield from _of_optimizer(model)
    for layer in (one.layer for one in placed if isinstance(one.layer, keras.layers.RandomCrop)):
        images = getattr(layer, "input", None)  # of a functional model
        size = layer.height, layer.width
        if images is not None and (shape := images.shape[layer.height_axis :][:2]) != size:
            text = f"crops in training alone: evaluation gets {shape[0]} x {shape[1]} for {size[0]} x {size[1]}"
            yield _warn("crop in training alone", layer.name, text, f"put keras.layers.CenterCrop{size} behind it")


def _mended(model: keras.Model, x: Any) -> Iterator[LintFinding]:
    """What Keras's `fit` meets, and a run does not."""
    placed = [*walk(model)]
    norms = [layer for layer, *_ in placed if getattr(layer, "synchronized", False) is True]
    calls = _calls(model, x, norms)
    if masked := [layer.path for layer in norms if calls.get(id(layer), _UNSEEN)[1] is not None]:
        yield _warn(
            "masked statistics of one replica",
            first(masked),
            "a mask arrives, with which synchronized=True does nothing: each replica has statistics of its own",
            "end the mask before it, where padding may count, or train by launcher.fit",
        )
    drops: dict[tuple[str, float], list[str]] = {}
    for found in _narrow(placed):
        if isinstance(found.layer, keras.layers.Dropout):
            drops.setdefault((found.layer.compute_dtype, found.layer.rate), []).append(found.path)
    for (dtype, rate), paths in drops.items():
        count = 2 ** (_DIGITS[dtype] - 1)
        share = math.ceil(float(tf.cast(rate, dtype)) * count) / count
        if abs(share - rate) > 0.05 * rate:
            yield _warn(
                "dropout in 16 bits",
                first(paths),
                f"numbers are drawn in {dtype}, which has {count} of them: rate {rate:g} drops {share:.3g}",
                f"{_FLOAT32}, or train by launcher.fit",
            )
    yield from _of_compile(model, [one.path for one in _narrow(placed) if one.layer.compute_dtype == "float16"])


def _of_compile(model: keras.Model, narrow: Sequence[str]) -> Iterator[LintFinding]:
    """What Keras's `fit` makes of an optimizer and metrics, and a run does not."""
    optimizer = getattr(model, "optimizer", None)
    own_step = type(model).train_step is not keras.Model.train_step
    if narrow and optimizer and not own_step and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        yield _warn(
            "no loss scale",
            first(narrow),
            f"float16 rounds gradients below {2.0**-25:.0e} to 0, and {optimizer.name} scales no loss",
            "compile with keras.optimizers.LossScaleOptimizer(optimizer), or train by launcher.fit",
        )
    inner = _optimizer(model)
    steps = getattr(inner, "gradient_accumulation_steps", None)
    if steps and isinstance(inner.get_config().get("learning_rate"), dict):
        yield _warn(
            "schedule of parts",
            inner.name,
            f"its schedule is read {steps} times an update: a decay over 1000 updates ends after {1000 // steps}",
            f"give the schedule {steps} times as many steps, or launcher.fit microbatches={steps}",
        )
    for metric in given_metrics(model) if versions.keeps_metrics_variables() else ():
        if _returns_variable(metric):
            yield _warn(
                "metric that is a variable",
                metric.name,
                "result() returns its variable: an epoch's history shows validation's number as training's",
                "return keras.ops.copy(variable), or train by launcher.fit",
            )


def _of_optimizer(model: keras.Model) -> Iterator[LintFinding]:
    """What Keras's own optimizers do otherwise than their papers."""
    optimizer = _optimizer(model)
    if type(optimizer) is keras.optimizers.Nadam:
        keras_has, paper_has = (optimizer.beta_1 * (1 - 0.5 * 0.96 ** (100 * rate)) for rate in (1, 1 / 250))
        yield _warn(
            "momentum of Nadam",
            optimizer.name,
            f"its momentum warms up 250 times too fast: {keras_has:.3f} at step 100, the paper's {paper_has:.3f}",
            "expect other rates than the paper's or torch's to fit",
            level="info",
        )
    elif type(optimizer) is getattr(keras.optimizers, "Muon", None):
        weights = [one for layer in layers_of(model, _ATTENDS) for one in layer.trainable_variables]
        flat = [one.path for one in weights if len(one.shape) == 2 and not one.path.endswith("kernel")]
        flat = [path for path in flat if not any(re.search(one, path) for one in optimizer.exclude_layers)]
        if flat:
            cubes = sum(len(one.shape) == 3 for one in weights)
            yield _warn(
                "attention under Muon",
                first(flat),
                f"Muon takes the biases of heads for matrices, and leaves {cubes} kernels of attention to AdamW",
                "exclude_layers=['bias'] leaves biases to AdamW, too",
            )


def _narrow_weights(model: keras.Model) -> Iterator[LintFinding]:
    """Layers that store weights in 16 bits."""
    optimizer = _optimizer(model)
    narrow = [one for one in model.variables if one.dtype in _DIGITS]
    for path, dtype, trained in dict.fromkeys(
        (one.path.rpartition("/")[0], one.dtype, one.trainable) for one in narrow
    ):
        what = "weights" if trained else "statistics"
        loses = "updates below their last place are lost" if trained else "a moving average stops moving"
        decay = getattr(optimizer, "beta_2", 0.0)
        if trained and decay < 1 == float(tf.cast(decay, dtype)):
            loses += f", and beta_2 = {decay} of {optimizer.name} rounds to 1, so that nothing moves"
        text = f"{what} are stored as {dtype}: {loses}"
        yield _warn(f"{what} in 16 bits", path, text, f"give it the policy mixed_{dtype}, which keeps them in float32")


def _optimizer(model: keras.Model) -> Any:
    """The one that a model was compiled with, without a loss scale around it; None for none."""
    found = getattr(model, "optimizer", None)
    return getattr(found, "inner_optimizer", found)


def _calls(model: keras.Model, x: Any, layers: Sequence[keras.layers.Layer]) -> dict[int, tuple[tf.Tensor, Any]]:
    """Input and mask of the last call of each of some layers, by the layer's id, of a pass that is traced.

    Of inputs like `x`, or those that a functional model says; none of a model that cannot be traced by itself.
    """
    seen: dict[int, tuple[tf.Tensor, Any]] = {}
    x = getattr(model, "inputs", None) if x is None else x
    if not layers or x is None:
        return seen

    def recording(layer: keras.layers.Layer, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **named: Any) -> Any:
            seen[id(layer)] = tf.convert_to_tensor(args[0]), named.get("mask")
            return call(*args, **named)

        return recorded

    with contextlib.ExitStack() as undo, contextlib.suppress(Exception):
        for layer in layers:
            put(undo, layer, "call", recording(layer, layer.call))
        specs = keras.tree.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, _dtype(leaf)), x)
        tf.function(lambda inputs: model(inputs), autograph=False).get_concrete_function(specs)
    return seen


def _dtype(leaf: Any) -> tf.DType:
    """As Keras takes it."""
    kind = tf.string if getattr(leaf.dtype, "kind", "") == "U" else tf.as_dtype(leaf.dtype)
    return tf.float32 if kind == tf.float64 else kind


def _narrow(placed: Sequence[Placed]) -> list[Placed]:
    """The layers that compute in 16 bits, without models, which have the run's policy whatever their file says."""
    others = keras.Model, keras.layers.InputLayer
    return [one for one in placed if one.layer.compute_dtype in _DIGITS and not isinstance(one.layer, others)]


def _may_round(found: Placed) -> bool:
    """Whether a layer around it, but for a functional model, would cast ids to 16 bits."""
    return any(one.compute_dtype in _DIGITS and not layer_policies.is_graph(one) for one in found.around)


def _floats(batch: Any) -> list[np.ndarray]:
    """Inputs of a batch in floating point."""
    leaves = [one for one in keras.tree.flatten(batch) if one is not None]
    return [np.asarray(one, np.float32) for one in leaves if _dtype(one).is_floating]


def _rounded(given: tf.Tensor, batch: Any) -> str:
    """How many ids of a batch the layer gets otherwise; "" where they are not among its inputs as they are."""
    for ids in _floats(batch):
        if ids.shape == tuple(given.shape):
            changed = ids != tf.cast(tf.cast(ids, given.dtype), tf.float32).numpy()
            return f": {np.sum(changed)} of the {ids.size} in a batch"
    return ""


def _unmasked(layer: Any, batch: Any) -> str:
    """How many steps of a batch are the sentinel, and how many of these are masked; "" where none is."""
    steps, masked = 0, 0
    for values in _floats(batch):
        empty = np.all(values == layer.mask_value, axis=-1)
        steps += np.sum(empty)
        masked += np.sum(empty & ~layer.compute_mask(tf.cast(values, layer.compute_dtype)).numpy())
    return f": {masked} of the {steps} steps in a batch that are {layer.mask_value:g}" if steps else ""


def _returns_variable(metric: Any) -> bool:
    with contextlib.suppress(Exception):  # a name, a function, or one that has seen nothing yet
        result = metric.result()
        return any(result is one or result is one.value for one in metric.variables)
    return False


def _by_cross_entropy(model: keras.Model) -> bool:
    """Whether a loss that a model was compiled with is a cross entropy; also where it was compiled with none."""
    losses = keras.tree.flatten(getattr(model, "loss", None) or "crossentropy")
    names = [getattr(one, "__name__", getattr(one, "name", str(one))) for one in losses]
    return any("crossentropy" in name.replace("_", "").lower() for name in names)


def _of_head(ends: str, limit: int, layer: Any) -> str:
    """What 16 bits do to the probabilities of a head."""
    if ends == "sigmoid":
        logit = math.log(2 * limit)
        return f", which rounds it to 1 from a logit of {logit:.2g} on, so that a confident mistake has no gradient"
    most = -math.log(keras.config.epsilon())
    text = (
        ": behind its cast to float32 Keras's cross entropy finds no logits, so that a mistake by a logit of "
        f"{most:.2g} has no gradient"
    )
    classes = getattr(layer, "units", 0)
    return text + f", and of {classes} equal logits each share is 0" * (limit == 2048 and classes >= _TOO_MANY)


def _ends(layer: keras.layers.Layer) -> str:
    """The end of a model in a layer that makes its output, such as "softmax" or "dense"."""
    ends = getattr(layer, "activation", None) or layer
    ends = getattr(ends, "activation", ends)  # which may be a layer
    return (ends if isinstance(ends, str) else getattr(ends, "__name__", type(ends).__name__)).lower()

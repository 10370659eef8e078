"""Layers of a built model that do not go together with 16 bits: notes of a plan, and part of a report.

`launcher.precision_report.lint` adds what only a traced step shows.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import keras
import tensorflow as tf

from launcher.step import layer_policies
from launcher.step.layers import layers_of
from launcher.tasks.base import Task

_DIGITS = {"bfloat16": 8, "float16": 11}  # binary ones of a number, the first included
_SQUASHES = ("sigmoid", "softmax")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LintFinding:
    """One thing that could be better."""

    rule: str  # its name, such as "softmax in 16 bits"
    level: str = "warn"  # where it costs accuracy, memory or speed; "info" where it is only good to know
    path: str = ""  # of the layer, variable or operation; empty for the recipe as a whole
    text: str  # what was seen
    fix: str  # what to do


def lint(model: keras.Model, task: Task) -> Iterator[LintFinding]:
    """Findings in a model of a task, made under the policy of the run."""
    last = [id(layer) for layer in layer_policies.making_outputs(model)]
    is_graph = layer_policies.is_graph(model)
    inputs = keras.tree.flatten((getattr(task, "example", None) or [()])[0])
    rounds_inputs = not is_graph and any(tensor.dtype.is_floating for tensor in inputs)
    masks = any(getattr(layer, "mask_zero", hasattr(layer, "mask_value")) for layer in layers_of(model))
    for computing in layer_policies.computing(model):
        layer, dtype = computing.layer, computing.layer.compute_dtype
        if dtype not in _DIGITS:
            continue
        limit = 2 ** _DIGITS[dtype]  # the largest whole number up to which the dtype has all
        found = functools.partial(LintFinding, path=computing.path, fix="give the layer dtype='float32'")
        ends = _ends(layer) if id(layer) in last else ""
        if ends in _SQUASHES:
            logit = math.log(2 * limit)
            text = (
                f"{ends} is computed in {dtype}, which rounds it to 0 or 1 from a logit of {logit:.2g} on, so that a "
                "confident mistake has no gradient; in float16 a softmax of 65,520 classes is 0 everywhere"
            )
            yield found(rule="head in 16 bits", text=text)
        elif ends and is_graph:
            text = (
                f"the model's output is {dtype}: logits lose bits before the loss sees them, whole numbers above "
                f"{limit} are rounded, and in float16 the square of 256 is infinite to metrics"
            )
            yield found(rule="outputs in 16 bits", text=text)
        sentinel = getattr(layer, "mask_value", 0)
        if sentinel and float(tf.cast(sentinel, dtype)) != sentinel:
            text = f"mask_value {sentinel:g} is no number of {dtype}, so that nothing is masked"
            yield found(rule="sentinel in 16 bits", text=text)
        if rounds_inputs and isinstance(layer, keras.layers.Embedding):
            text = (
                f"the ids come as floating-point numbers, which the model casts to {dtype} first: above {limit} many "
                "change"
            )
            yield found(rule="ids in 16 bits", text=text, fix="give the ids as integers")
        if masks and dtype == "float16" and isinstance(layer, keras.layers.GlobalAveragePooling1D):
            text = "what a mask leaves of a sequence is added up in float16: sums above 65504 are infinite"
            yield found(rule="pooling in float16", text=text)


def _ends(layer: keras.layers.Layer) -> str:
    """The end of a model in a layer that makes its output, such as "softmax" or "dense"."""
    ends = getattr(layer, "activation", None) or layer
    ends = getattr(ends, "activation", ends)  # which may be a layer
    return (ends if isinstance(ends, str) else getattr(ends, "__name__", type(ends).__name__)).lower()

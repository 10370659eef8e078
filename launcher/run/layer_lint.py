"""Layers of a built model that do not go together with 16 bits: notes of a plan, and part of a report.

Each rule is a row of `RULES`; `launcher.precision_report.lint` adds what only a traced step shows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class Seen(NamedTuple):
    """A layer, as a rule looks at it.

    Attributes:
      layer, dtype: a layer, and the 16 bits it computes in.
      limit: the largest whole number up to which the dtype has all.
      ends: what makes an output of the model, such as "softmax" or "dense"; "" of other layers.
      rounds_inputs: whether the model casts floating-point inputs before any layer sees them.
      masks: whether a layer of the model makes masks.
    """

    layer: Any
    dtype: str
    limit: int
    ends: str
    rounds_inputs: bool
    masks: bool


class Rule(NamedTuple):
    """One thing to look for.

    Attributes:
      name: of the finding.
      number: what is seen at a layer, for the text; 0 for nothing.
      text, fix: what is wrong, and what to do.
    """

    name: str
    number: Callable[[Seen], float]
    text: str
    fix: str = "give the layer dtype='float32'"


RULES = (
    Rule(
        "head in 16 bits",
        lambda seen: math.log(2 * seen.limit) * (seen.ends in _SQUASHES),
        "{ends} is computed in {dtype}, which rounds it to 0 or 1 from a logit of {number:.2g} on, so that a confident "
        "mistake has no gradient; in float16 a softmax of 65,520 classes is 0 everywhere",
    ),
    Rule(
        "outputs in 16 bits",
        lambda seen: seen.limit * (seen.ends not in ("", *_SQUASHES)),
        "the model's output is {dtype}: logits lose bits before the loss sees them, whole numbers above {number} are "
        "rounded, and in float16 the square of 256 is infinite to metrics",
    ),
    Rule(
        "sentinel in 16 bits",
        lambda seen: (value := getattr(seen.layer, "mask_value", 0)) * (float(tf.cast(value, seen.dtype)) != value),
        "mask_value {number:g} is no number of {dtype}, so that nothing is masked",
    ),
    Rule(
        "ids in 16 bits",
        lambda seen: seen.limit * (seen.rounds_inputs and isinstance(seen.layer, keras.layers.Embedding)),
        "the ids come as floating-point numbers, which the model casts to {dtype} first: above {number} many change",
        "give the ids as integers",
    ),
    Rule(
        "pooling in float16",
        lambda seen: (
            65504
            * (seen.masks and seen.dtype == "float16" and isinstance(seen.layer, keras.layers.GlobalAveragePooling1D))
        ),
        "what a mask leaves of a sequence is added up in float16: sums above {number} are infinite",
    ),
)


def lint(model: keras.Model, task: Task) -> Iterator[LintFinding]:
    """Findings of `RULES` in a model of a task, made under the policy of the run."""
    last = [id(layer) for layer in layer_policies.making_outputs(model)]
    is_graph = layer_policies.is_graph(model)
    inputs = keras.tree.flatten((getattr(task, "example", None) or [()])[0])
    rounds = not is_graph and any(tensor.dtype.is_floating for tensor in inputs)
    masks = any(getattr(layer, "mask_zero", hasattr(layer, "mask_value")) for layer in layers_of(model))
    for computing in layer_policies.computing(model):
        layer, dtype = computing.layer, computing.layer.compute_dtype
        ends = getattr(layer, "activation", None) or layer
        ends = getattr(ends, "activation", ends)  # which may be a layer
        ends = (ends if isinstance(ends, str) else getattr(ends, "__name__", type(ends).__name__)).lower()
        if id(layer) not in last or not (is_graph or ends in _SQUASHES):
            ends = ""
        for rule in RULES if dtype in _DIGITS else ():
            seen = Seen(layer, dtype, 2 ** _DIGITS[dtype], ends, rounds, masks)
            if number := rule.number(seen):
                text = rule.text.format(number=number, **seen._asdict())
                yield LintFinding(rule=rule.name, path=computing.path, text=text, fix=rule.fix)

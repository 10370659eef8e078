"""Weights of a model that are trained, and how fast: weights frozen and learning rates multiplied by pattern."""

import math
from collections.abc import Mapping, Sequence

import keras

from launcher.config.bound_types import checked_patterns
from launcher.errors import UsageError
from launcher.reporting.units import first
from launcher.step import layers

FREEZE, RATES = "train.freeze", "train.rate_multipliers"


def check(patterns: Sequence[str], multipliers: Mapping[str, float]) -> None:
    """Raises UsageError for a pattern that is no regular expression, or a multiplier that is not above 0."""
    checked_patterns(FREEZE, patterns)
    checked_patterns(RATES, multipliers)
    for pattern, multiplier in multipliers.items():
        if not (math.isfinite(multiplier) and multiplier > 0):
            raise UsageError(
                f"{RATES}[{pattern!r}] = {multiplier}: must be finite and above 0; {FREEZE} is for what is not trained"
            )


def freeze(model: keras.Model, patterns: Sequence[str]) -> None:
    """Takes what the patterns name, see `layers.named`, out of training; before the optimizer is made.

    A layer whose weights are all named is frozen as a whole, as by Keras's `layer.trainable = False`: a
    BatchNormalization then uses its moving statistics and leaves them as they are. UsageError where a pattern names
    nothing, or nothing is left to train.
    """
    if not patterns:
        return
    frozen = {id(item.layer) for item, _ in _named(FREEZE, dict.fromkeys(patterns, True), model)}
    for layer in layers.layers_of(model):
        if id(layer) in frozen or (layer.weights and all(id(weight) in frozen for weight in layer.weights)):
            layer.trainable = False
    for weight in model.weights:
        if id(weight) in frozen:
            weight.trainable = False
    if not model.trainable_variables:
        raise UsageError(f"{FREEZE} = {tuple(patterns)}: leaves nothing of {model.name} to train")


def rate_multipliers(model: keras.Model, multipliers: Mapping[str, float]) -> list[float]:
    """Factors of the learning rate of each trained weight by pattern, see `layers.named`, in the order of
    `model.trainable_variables`.

    Raises:
      UsageError: a pattern names nothing that is trained, or two give one weight different factors.
    """
    chosen = {id(item.layer): by for item, by in _named(RATES, multipliers, model)} if multipliers else {}
    trained = model.trainable_variables
    idle = set(multipliers) - {chosen.get(id(variable)) for variable in trained}
    if idle:
        raise UsageError(f"{RATES}: {min(idle)!r} gives no trained weight of {model.name} its rate")
    return [float(multipliers[chosen[id(one)]]) if id(one) in chosen else 1.0 for one in trained]


def describe(model: keras.Model, patterns: Sequence[str], multipliers: Mapping[str, float]) -> dict[str, str]:
    """The lines of the plan about it; none where nothing is bound."""
    lines = {}
    if patterns:
        trained = {id(variable) for variable in model.trainable_variables}
        frozen = [item.place for item in layers.weights(model) if id(item.layer) not in trained]
        lines["frozen"] = f"{len(frozen)} of {len(model.weights)} weights are not trained: {first(frozen)}"
    if multipliers:
        pairs = list(zip(model.trainable_variables, rate_multipliers(model, multipliers), strict=True))
        parts = {factor: [variable.path for variable, own in pairs if own == factor] for _, factor in pairs}
        lines["rates"] = "; ".join(
            f"x {factor:g} for {len(paths)} weights: {first(paths)}" for factor, paths in parts.items() if factor != 1.0
        )
    return lines


def _named(binding: str, patterns: Mapping[str, object], model: keras.Model) -> list[tuple[layers.Placed, str]]:
    items = [*layers.walk(model), *layers.weights(model)]
    return list(layers.named(binding, patterns, items, what=f"layer or weight of {model.name}"))

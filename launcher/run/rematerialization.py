"""`train.rematerialize`: layers that compute their activations again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from launcher.errors import UsageError
from launcher.run.plan import RunPlan
from launcher.step.layers import walk

BINDING = "train.rematerialize"


def apply(model: keras.Model, plan: RunPlan) -> None:
    """Has every layer of the model that can compute its activations again, or not, as the plan says.

    Args:
      model: built.
      plan: one that says nothing leaves the layers as the model made them.

    Raises:
      UsageError: the model has no such layer.
    """
    if plan.rematerialize is None:
        return
    layers = list(layers_of(model))
    if not layers:
        raise UsageError(
            f"{BINDING} = {plan.recipe.rematerialize!r}: {model.name} has no layer that can compute its activations "
            "again, as the blocks of models.transformer can, and any layer with a boolean attribute `rematerialize` "
            "that its call() goes by; leave the binding out"
        )
    for layer in layers:
        layer.rematerialize = plan.rematerialize


def layers_of(model: keras.Model) -> Iterator[Any]:
    """The layers that can: those with a boolean attribute `rematerialize`."""
    return (layer for layer, *_ in walk(model) if isinstance(getattr(layer, "rematerialize", None), bool))

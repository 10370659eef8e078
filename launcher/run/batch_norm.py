"""`train.batch_norm`: which examples batch normalisation takes its statistics over, and what TensorFlow cannot do."""

from __future__ import annotations

from collections.abc import Callable

import keras

from launcher.errors import UsageError
from launcher.run.plan import RunPlan
from launcher.run.recipe import Recipe
from launcher.step.layers import group_size, walk

BINDING = "train.batch_norm"

_GLOBAL = (
    "batch normalisation takes its statistics over the global batch, as on one device; where the last batch of an "
    "epoch is short, over what it is filled up with, too"
)
_LOCAL = (
    "batch normalisation takes its statistics over each microbatch of each replica by itself, {} examples; another "
    "number of either trains another function"
)


def apply(model: keras.Model, plan: RunPlan, note: Callable[[str], None]) -> None:
    """Has every layer of the model that can take its statistics over all replicas do so, or not, as the plan says.

    Args:
      model: built.
      plan: "auto" leaves the layers as the model made them, but for Keras's own in a compiled Keras model.
      note: told what a person should know.

    Raises:
      UsageError: the model has no such layer, or one that takes them over groups.
    """
    requested = plan.recipe.batch_norm
    layers = [layer for layer, *_ in walk(model) if isinstance(getattr(layer, "synchronized", None), bool)]
    if requested == "auto":
        layers = [one for one in layers if is_global(plan.recipe) and isinstance(one, keras.layers.BatchNormalization)]
    elif not layers:
        raise UsageError(f"{BINDING} = {requested!r}: {model.name} has no batch normalisation; leave the binding out")
    for layer in layers:
        if requested == "local":
            layer.synchronized = False
        elif group := group_size(layer):
            raise UsageError(
                f"{BINDING} = 'global': layer {layer.name!r} takes its statistics over groups of {group} examples, "
                "which is the same on any topology, too; leave the binding out, or make the layer without groups"
            )
        elif plan.num_parts > 1:
            layer.synchronized = True
    if not all(group_size(layer) for layer in layers):
        note(_LOCAL.format(plan.microbatch_size) if requested == "local" else _GLOBAL)


def is_global(recipe: Recipe) -> bool:
    """Whether the batch normalisation of Keras is to see the global batch, as on one device."""
    return recipe.batch_norm == "global" or (recipe.batch_norm == "auto" and recipe.task.statistics_over_global_batch)


def check(model: keras.Model, plan: RunPlan) -> None:
    """Refuses, before anything is traced or written, what a normalisation layer could not do.

    Raises:
      UsageError: groups that do not fit a microbatch, or statistics over all replicas inside a loop or under XLA, where
        TensorFlow allows no collective.
    """
    for layer, *_ in walk(model):
        group = group_size(layer)
        if group and plan.microbatch_size % group:
            raise UsageError(
                f"layer {layer.name!r} takes its statistics over groups of {group} examples, which does not divide the "
                f"{plan.microbatch_size} of one microbatch on one replica; bind the layer's group size to a divisor "
                f"(e.g. resnet.norm_group_size = {plan.microbatch_size}), or change train.global_batch_size, "
                "train.microbatches or the number of replicas"
            )
        if getattr(layer, "synchronized", False) and (plan.microbatches > 1 or plan.jit_compile):
            grouped = ", or bind its group size, e.g. resnet.norm_group_size" if hasattr(layer, "group_size") else ""
            raise UsageError(
                f"layer {layer.name!r} takes its statistics over the global batch, by a collective inside the forward "
                f"pass, which works neither with train.microbatches > 1 (it is {plan.microbatches}) nor, but on TPUs, "
                f"with train.jit_compile (it is {plan.jit_compile}); {BINDING} = 'local' has each replica take them "
                f"over its own examples, as Keras does on several{grouped}"
            )

"""How a step computes what its recipe says: attention, loss and optimizer state, a sentence each for the plan."""

from __future__ import annotations

import keras

from launcher.optimizers.parts import bytes_of, part_of
from launcher.reporting.units import bytes_text
from launcher.run import attention
from launcher.run.plan import RunPlan
from launcher.tasks import text


def describe(plan: RunPlan, model: keras.Model) -> dict[str, str]:
    """The lines of the plan, and of preflight's report, about it.

    Args:
      plan: resolved.
      model: built for it.
    """
    lines = attention.describe(plan, model)
    if held := _shared_state(plan, model):
        lines["optimizer state"] = held
    if shape := plan.recipe.task.logits_shape:
        lines["loss"] = text.describe_loss(plan.loss_pieces, model, plan.microbatch_size, shape)
    return lines


def _shared_state(plan: RunPlan, model: keras.Model) -> str:
    """How the state of the optimizer and the averages are shared out; "" where the recipe does not ask for it.

    Told of state of the size of a weight, of which Adam has two: what an optimizer has is known once it is built.
    """
    if not plan.recipe.shard_optimizer:
        return ""
    replicas = plan.strategy.num_replicas
    if replicas == 1:
        return "train.shard_optimizer = True: one replica holds all of it"
    parts = [(variable, part_of(variable, replicas)) for variable in model.trainable_variables]
    whole = bytes_of([variable for variable, _ in parts])
    held = bytes_of([variable if part is None else part for variable, part in parts])
    divided = bytes_of([variable for variable, part in parts if part is not None])
    return (
        f"shared out over {replicas} replicas: {bytes_text(held)} of {bytes_text(whole)} on each, for every slot and "
        f"average of the weights; {bytes_text(divided)} of weights are put together a step"
    )

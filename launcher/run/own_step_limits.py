"""What a recipe may not bind beside a model that has a `train_step` of its own, and what to do instead."""

from collections.abc import Iterator

from launcher.errors import UsageError
from launcher.run.plan import RunPlan


def check(plan: RunPlan) -> None:
    """Raises UsageError for what cannot be done about a step that is the model's own."""
    for binding, instead in _wrong(plan):
        raise UsageError(f"{binding}: the model has a train_step or test_step of its own; {instead}")


def _wrong(plan: RunPlan) -> Iterator[tuple[str, str]]:
    recipe = plan.recipe
    if recipe.optimizer is not None:
        yield "train.optimizer", "it applies the optimizers that the model holds: leave the binding out"
    if plan.microbatches > 1:
        yield f"train.microbatches = {plan.microbatches}", "what it does with its gradients cannot be divided: bind 1"
    if plan.strategy.accelerator == "tpu":
        yield "a TPU", "it is not compiled by XLA here: train on CPUs or GPUs, or write a task, see docs/own_task.md"
    if plan.jit_compile:
        yield "train.jit_compile = True", "it is not compiled by XLA here: leave the binding out"
    if recipe.clipping.bounds:
        (name, bound), *_ = recipe.clipping.bounds.items()
        of_keras = {"global_norm": "global_clipnorm", "value": "clipvalue", "layer_norm": "clipnorm"}
        given = f"give {of_keras[name]}={bound}" if name in of_keras else "give a bound"
        yield f"Clipping.{name} = {bound}", f"{given} to the optimizer that it is for, and leave the binding out"
    if recipe.penalty is not None:
        yield "train.penalty", "add the penalty to the loss in it, and leave the binding out"
    if recipe.precision_watch is not None:
        yield "train.precision_watch", "only the gradients of one loss can be watched: leave the binding out"
    if recipe.spikes is not None and recipe.spikes.action == "skip":
        yield "Spikes.action = 'skip'", "it is over before its loss is known: use 'note', 'stop' or 'rewind'"

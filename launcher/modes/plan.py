"""A recipe's plan: resolved with the flags, and described."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence

import keras

from launcher.config import gin_bindings
from launcher.modes import Request
from launcher.reporting.run_folder import LOW_IS_BEST, Change, RunRecord
from launcher.run import computed, loading
from launcher.run.plan import RunPlan
from launcher.step import freezing, layer_policies, wire_error
from launcher.step.moving_statistics import is_moving


def resolve(request: Request, *, connect: bool = True) -> RunPlan:
    """The plan that the recipe and the flags make on this machine; see `loading.Machine.resolve`."""
    return make_machine(request, connect=connect).resolve(request.gin_file, request.gin_param)


def make_machine(request: Request, *, connect: bool = True) -> loading.Machine:
    """The devices that the flags ask for."""
    return loading.Machine(
        environ=os.environ,
        strategy=request.strategy,
        replicas=request.replicas,
        tpu=request.tpu,
        seed=request.seed,
        deterministic=request.deterministic,
        connect=connect,
    )


def describe(
    resolved: RunPlan,
    model: keras.Model,
    assigned: Sequence[keras.Variable],
    unused: Collection[int] = (),
    notes: Sequence[str] = (),
) -> dict[str, str]:
    """The plan with what only the built model can tell.

    Args:
      resolved: the plan.
      model: built.
      assigned: what a forward pass assigns besides trained weights.
      unused: positions of the trained variables that the loss does not depend on, as far as is known.
      notes: what `session.build_model` had to say.
    """
    sizes = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    lines = resolved.describe()
    lines["parameters"] = f"{sum(sizes):,} trained of {model.count_params():,} in {model.name}"
    if overrides := layer_policies.describe(model, resolved.recipe.precision_overrides):
        lines["layer policies"] = overrides
    lines |= computed.describe(resolved, model)
    lines |= freezing.describe(model, resolved.recipe.freeze, resolved.recipe.rate_multipliers)
    moving = [math.prod(variable.shape) for variable in assigned if is_moving(variable)]
    sent = [size for index, size in enumerate(sizes) if index not in unused]
    lines["wire"] = wire_error.describe(sent, resolved.wire_dtype.name, moving, resolved.strategy.num_replicas)
    more = resolved.recipe.task.notes(model, resolved.strategy.accelerator)
    for number, note in enumerate((*gin_bindings.notes(), *resolved.notes, *notes, *more), start=1):
        lines[f"note {number}"] = note
    return lines


def record(resolved: RunPlan, request: Request, described: Mapping[str, str], started: float) -> RunRecord:
    """What a training begins with, for its report.

    Args:
      resolved: the plan.
      request: the flags.
      described: as `describe` returns.
      started: Unix seconds at which the process began with it.
    """
    recipe, examples = resolved.recipe, resolved.data.num_train_examples
    program = (
        ["python", "-m", "launcher.main"]
        if sys.argv[0].endswith(os.path.join("launcher", "main.py"))
        else [os.path.basename(sys.argv[0])]
    )
    return RunRecord(
        started=started,
        command=" ".join(map(_quoted, [*program, *sys.argv[1:]])),
        recipe=request.gin_file,
        changes=tuple(Change(name=name, recipe=old, run=new) for name, old, new in gin_bindings.changed()),
        plan=dict(described),
        total_steps=resolved.total_steps,
        steps_per_epoch=examples / recipe.global_batch_size if examples else None,
        best_metric=recipe.best_metric,
        low_is_best=recipe.best_metric in LOW_IS_BEST,
        price_per_hour=recipe.price_per_hour,
    )


def _quoted(word: str) -> str:
    """A word for a shell; what holds single quotes, as bindings do, in double ones where they change nothing."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)

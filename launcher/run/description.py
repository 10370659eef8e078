"""A run's plan in lines for people, and in the record that its report begins with."""

import contextlib
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras

from launcher.config import gin_bindings
from launcher.errors import notebook
from launcher.machine import installation
from launcher.optimizers import Optimizer, Optimizers
from launcher.reporting.run_folder import LOW_IS_BEST, Change, RunRecord
from launcher.reporting.units import first
from launcher.run import layer_lint, layer_settings
from launcher.run.plan import RunPlan
from launcher.run.session import with_loss_scale
from launcher.step import freezing, layer_policies, reduce_error, rows
from launcher.step.local_pass import Traced
from launcher.step.statistics import is_moving

_GIT = "git describe --always --dirty --abbrev=40 --exclude='*' && git diff HEAD --no-ext-diff"
_DIFF_CHARACTERS = 200_000
_NOT_TRACED = Traced()


def describe(
    resolved: RunPlan,
    model: keras.Model,
    assigned: Sequence[keras.Variable],
    traced: Traced = _NOT_TRACED,
    notes: Sequence[str] = (),
) -> dict[str, str]:
    """The plan with what only the built model can tell.

    Args:
      resolved: the plan.
      model: built.
      assigned: what a forward pass assigns besides trained weights.
      traced: what is known of the step.
      notes: what `session.build_model` had to say.
    """
    sizes = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    lines = with_loss_scale(resolved, model).describe()
    lines["parameters"] = f"{sum(sizes):,} trained of {model.count_params():,} in {model.name}"
    if overrides := layer_policies.describe(model, resolved.recipe.precision_overrides):
        lines["layer policies"] = overrides
    lines |= layer_settings.describe(resolved, model)
    lines |= freezing.describe(model, resolved.recipe.freeze, resolved.recipe.rate_multipliers)
    moving = [math.prod(variable.shape) for variable in assigned if is_moving(variable)]
    sent = [size for index, size in enumerate(sizes) if index not in {*traced.unused, *traced.tables}]
    reduced = resolved.reduce_dtype.name, resolved.strategy.num_replicas
    lines["reduction"] = reduce_error.describe(sent, reduced[0], moving, reduced[1])
    lines |= rows.describe(
        model,
        traced.lookups,
        traced.tables,
        *reduced,
        lazy=resolved.recipe.lazy_embeddings,
        averaged=resolved.recipe.ema_decay is not None,
    )
    task = resolved.recipe.task
    more = [
        *task.notes(model, resolved.strategy.accelerator),
        *map(str, layer_lint.of_run(model, task)),
    ]
    for number, note in enumerate((*resolved.notes, *notes, *more), start=1):
        lines[f"note {number}"] = note
    return lines


def decay(optimizer: Optimizer | Optimizers) -> dict[str, str]:
    """The line of the plan about a built optimizer's weight decay, if it has one."""
    pairs = [(one.path, rate) for part in optimizer.parts for one, rate in zip(part.updated, part.decays, strict=True)]
    if not (rates := sorted({rate for _, rate in pairs if rate})):
        return {}
    decayed, kept = ([path for path, rate in pairs if bool(rate) is is_decayed] for is_decayed in (True, False))
    numbers = " and ".join(f"{rate:g}" for rate in rates)
    return {
        "weight decay": f"{numbers}, of {first(decayed)}; " + (f"not of {first(kept)}" if kept else "of all weights")
    }


def record(resolved: RunPlan, recipe_files: Sequence[str], described: Mapping[str, str], started: float) -> RunRecord:
    """The record that a training begins with, for its report.

    `described` is as `describe` returns it, `started` in Unix seconds.
    """
    recipe, examples = resolved.recipe, resolved.data.num_train_examples
    is_installed = os.path.basename(sys.argv[0]) == "launcher"  # the program of that name
    program, words = ("launcher", sys.argv[1:]) if is_installed else (installation.python(), sys.orig_argv[1:])
    command = " ".join([program, *map(_quoted, words)])
    commit, diff = "", ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        said = subprocess.run(_GIT, shell=True, capture_output=True, text=True, errors="replace", timeout=5).stdout
        commit, _, diff = said.partition("\n")
    return RunRecord(
        started=started,
        command=command if notebook.shell() is None else "launcher.fit in a notebook",  # not the kernel's
        recipe=tuple(recipe_files),
        changes=tuple(Change(name=name, recipe=old, run=new) for name, old, new in gin_bindings.changed()),
        plan={**described, **({"commit": commit} if commit else {})},
        diff=diff[:_DIFF_CHARACTERS],
        # By the names of folders: to read what lies in each takes most of a second.
        packages=tuple(sorted(one.stem for place in {*sys.path} for one in Path(place).glob("*.dist-info"))),
        total_steps=resolved.total_steps,
        steps_per_epoch=examples / recipe.global_batch_size if examples else None,
        best_metric=recipe.best_metric,
        low_is_best=recipe.best_metric in LOW_IS_BEST,
    )


def _quoted(word: str) -> str:
    """A word for a shell; what holds single quotes, as bindings do, in double ones where they change nothing."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)

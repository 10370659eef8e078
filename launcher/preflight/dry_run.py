"""`--dry_run`: the plan of a recipe, with its model built to check it; nothing is connected to or written."""

import keras
import tensorflow as tf

from launcher.config import gin_bindings, gin_used
from launcher.errors import EXIT_DONE, UsageError
from launcher.machine.accelerators import V5E
from launcher.modes import MODES, Request, commands
from launcher.modes.plan import resolve
from launcher.preflight.slices import SLICES, Slice
from launcher.reporting.reporter import Reporter
from launcher.run import layer_settings, session
from launcher.run.description import describe
from launcher.run.plan import RunPlan, check_shard
from launcher.run.start import start_weights
from launcher.runtime import initial_values
from launcher.step_program import lowering


def run(request: Request) -> int:
    """Shows the plan and stops; that devices or data are missing is said, and no error."""
    with gin_bindings.usage_errors():
        return show(resolve(request, connect=False), request)


def show(resolved: RunPlan, request: Request) -> int:
    """Shows a plan for --dry_run, having built the model to check it; returns the exit code."""
    if MODES[request.mode].trains:
        check_shard(resolved)
    notes: list[str] = []
    with initial_values.left_out(), initial_values.scope(tf.distribute.get_strategy()):
        model = session.build_model(resolved, notes.append)
    layer_settings.check_batch_norm(model, resolved)
    session.build_optimizer(resolved)
    if resolved.recipe.start.path is not None:
        notes.append(start_weights.read(resolved.recipe.start, model, None).note)
    gin_used.check_all_used(traced=False)
    where = _slice_for(resolved, model, request.replicas) if resolved.strategy.is_absent else None
    shown = resolved if where is None else lowering.for_replicas(resolved, where.num_replicas)
    lines = describe(shown, model, session.forward_assigns(shown, model), notes=notes)
    if where is not None:
        command = commands.on_same_recipe(request, "--mode=preflight", where.flag, flags=("data_dir", "seed"))
        lines["shown for"] = where.describe()
        lines["preflight"] = f"whether it fits there, and how fast it can be: {command}"
    try:
        resolved.data.check()
    except UsageError as error:
        lines["data"] += f"; NOT PREPARED: {error}"
    reporter = Reporter(model_dir="", total_steps=resolved.total_steps, is_chief=resolved.cluster.is_chief)
    reporter.plan(lines)
    return EXIT_DONE


def _slice_for(resolved: RunPlan, model: keras.Model, replicas: int | None) -> Slice:
    """The largest TPU v5e slice, of so many replicas if they are given, among which the batch can be divided."""
    slices = [where for where in SLICES.values() if where.chip is V5E and replicas in (None, where.num_replicas)]
    for where in sorted(slices, key=lambda where: -where.num_replicas):
        try:
            layer_settings.check_batch_norm(model, lowering.for_replicas(resolved, where.num_replicas))
        except UsageError:
            continue
        return where
    raise UsageError(f"--replicas={replicas}: no slice of TPU v5e has so many; leave it out to plan for the largest")

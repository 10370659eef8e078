"""`--mode=precision_report`: what 16 bits do to a recipe's gradients, and which loss scale fits."""

import dataclasses
import os

from launcher.checkpoints import CheckpointStore
from launcher.config import gin_bindings, gin_used
from launcher.errors import EXIT_DONE, UsageError
from launcher.model_dir import check_model_dir
from launcher.modes import Request
from launcher.precision_report import findings
from launcher.precision_report.examine import PrecisionReportSettings, examine
from launcher.reporting import report, strict_json
from launcher.reporting.console import make_console
from launcher.run import loading, session
from launcher.run.plan import RunPlan
from launcher.run.start import starting_point
from launcher.step import precision


@gin_bindings.usage_errors()
def run(request: Request) -> int:
    """Reports on a recipe, as the flags gave it; prints it and writes precision.json.

    It takes GPUs, or logical CPU devices where there is no GPU; one by default. Where the folder of the run has a
    checkpoint, the weights are those of the newest.

    Raises:
      UsageError: the recipe cannot be built, its data is not there, or the folder cannot be written.
    """
    replicas, model_dir = request.replicas, request.run_dir
    resolved = loading.Machine(
        # The machine may have neither the TPU nor the cluster that the recipe is for.
        environ={},
        strategy="mirrored" if replicas is not None and replicas > 1 else "one_device",
        replicas=replicas,
        seed=request.seed,
        connect=not request.dry_run,
    ).resolve(request.gin_file, request.gin_param)
    settings = PrecisionReportSettings()
    own = resolved.policy
    resolved = _under(settings.policy_for(own), resolved)
    console = make_console(total_steps=settings.batches)
    lines = {
        "recipe": ", ".join(request.gin_file),
        "policy": f"{resolved.policy}" + ("" if own == resolved.policy else f" (the recipe's is {own})"),
        "replicas": f"{resolved.strategy.num_replicas} on {resolved.strategy.accelerator}",
        "batch": f"{resolved.recipe.global_batch_size}, of which {resolved.microbatch_size} at a time on each replica",
        "calibration": f"{settings.batches} batches",
        "reduce dtype": resolved.reduce_dtype.name,
    }
    console.plan(lines)
    if request.dry_run:
        return EXIT_DONE
    if "://" in model_dir:
        raise UsageError(f"--model_dir={model_dir}: a report is written to a local folder; name one")
    resolved.data.check()
    resolved.recipe.task.check()
    check_model_dir(model_dir)
    built = session.build(resolved)
    store = CheckpointStore(os.path.join(model_dir, "checkpoints"), is_chief=False)
    start = starting_point.restore(store, built.trainer, same_order=False, start_from=resolved.recipe.start)
    weights = start.notes[0] if start.notes else "initial"
    weights = weights if start.step is None else f"of step {start.step} in {model_dir}"
    for note in (f"weights: {weights}", *built.notes):
        console.note(note)
    # A run in another policy left another policy's scale.
    scale = built.trainer.loss_scale if own == resolved.policy else float(resolved.loss_scale.initial().scale)
    found = examine(built, settings, scale, console.note)
    gin_used.check_all_used()
    findings.show(found, console, layers=settings.layers)
    described = {**lines, "weights": weights, "seed": str(resolved.seed)}
    content = strict_json.dumps(findings.as_json(found, described), indent=1)
    console.note(f"written: {report.write_result(model_dir, 'precision.json', content)}")
    console.close()
    return EXIT_DONE


def _under(policy: str, resolved: RunPlan) -> RunPlan:
    """The plan under another policy, with the loss scale and the reduce dtype that go with it."""
    recipe = dataclasses.replace(resolved.recipe, precision=policy)
    return dataclasses.replace(
        resolved,
        recipe=recipe,
        policy=policy,
        policy_why="precision_report",
        loss_scale=precision.resolve_loss_scale(recipe.loss_scale, policy),
        reduce_dtype=precision.resolve_reduce_dtype(recipe.reduce_dtype, policy),
    )

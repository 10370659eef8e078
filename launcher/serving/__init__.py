"""Serving of trained models: `--mode=predict`, `--mode=export`, and the session with saved weights for both."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError
from launcher.run import assets, session, starting_point
from launcher.run.plan import RunPlan


@contextlib.contextmanager
def trained(
    plan: RunPlan, model_dir: str, mode: str, *, replicas_allowed: bool = False
) -> Iterator[tuple[session.Session, int]]:
    """Builds the session with the weights of the best checkpoint, else of the newest, and yields it with its step.

    The average of the weights is taken where `train.evaluate_ema` says so. The task gets the assets kept beside the
    checkpoints, so that no data set is needed.

    Raises:
      UsageError: no checkpoint, or one of another recipe; several workers, or replicas where they are not allowed.
    """
    if plan.cluster.num_workers > 1 or (plan.strategy.num_replicas > 1 and not replicas_allowed):
        where = "in one process" if replicas_allowed else "in one process on one device"
        raise UsageError(
            f"--mode={mode} runs {where}, and here are {plan.strategy.num_replicas} replicas in "
            f"{plan.cluster.num_workers} process(es); leave --replicas out, and start it apart from a job's workers"
        )
    store = CheckpointStore(os.path.join(model_dir, "checkpoints"), is_chief=False)
    step = store.best() or store.latest()
    if step is None:
        raise UsageError(f"--mode={mode}: no checkpoint in {model_dir}; train first, or name another --model_dir")
    use_assets = getattr(plan.recipe.task, "use_assets", None)
    if use_assets is not None:
        use_assets(assets.read(model_dir))
    made = session.build(plan)
    made.trainer.restore(starting_point.read(store, made.trainer, step))
    averaged = (
        made.trainer.ema.in_place_of_weights(made.strategy) if plan.recipe.evaluate_ema else contextlib.nullcontext()
    )
    with averaged:
        yield made, step

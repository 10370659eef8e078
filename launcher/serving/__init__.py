"""Serving of trained models: `--mode=predict`, `--mode=export`, MODEL_DIR/model.keras, and the weights for all."""

import os
from collections.abc import Callable

from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError
from launcher.run import session
from launcher.run.plan import RunPlan
from launcher.run.start import assets
from launcher.serving import weights
from launcher.serving.weights import Weights


def checkpoints_of(model_dir: str) -> CheckpointStore:
    """The checkpoints of a run, to be read."""
    return CheckpointStore(os.path.join(model_dir, "checkpoints"), is_chief=False)


def trained(
    plan: RunPlan, model_dir: str, mode: str, build: Callable[[RunPlan], session.Session] | None = None
) -> tuple[session.Session, Weights]:
    """Builds the session with the weights of the best checkpoint, else of the newest, and returns both.

    The average of the weights is taken where `train.evaluate_ema` says so. The task gets the assets kept beside the
    checkpoints, so that no data set is needed. UsageError where there is no checkpoint, or one of another recipe, and
    for several workers, or replicas without what builds a session on several.
    """
    if plan.cluster.num_workers > 1 or (plan.strategy.num_replicas > 1 and build is None):
        where = "in one process" if build else "in one process on one device"
        raise UsageError(
            f"--mode={mode} runs {where}, and here are {plan.strategy.num_replicas} replicas in "
            f"{plan.cluster.num_workers} process(es); leave --replicas out, and start it apart from a job's workers"
        )
    store = checkpoints_of(model_dir)
    step = weights.step_of(store, "best")
    if step is None:
        raise UsageError(f"--mode={mode}: no checkpoint in {model_dir}; train first, or name another --model_dir")
    plan.recipe.task.use_assets(assets.read(model_dir))
    made = (build or session.build)(plan)
    found = weights.read(store, step, made.model, averaged=plan.recipe.evaluate_ema)
    made.trainer.state.restore(found.arrays)
    return made, found

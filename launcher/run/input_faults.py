"""Faults of what a run reads: files that are damaged, and what it has found before and is gone now.

What is gone may come back, as a folder that was not mounted, so a retry may help.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from launcher.config import gin_bindings, gin_files
from launcher.data.kinds import DataOfFiles
from launcher.errors import MissingInputError, PeerError, UsageError, failures
from launcher.reporting import attempts, run_folder
from launcher.run.plan import RunPlan
from launcher.step.trainer import Trainer


@contextlib.contextmanager
def damage_named(plan: RunPlan, trainer: Trainer) -> Iterator[None]:
    """Names the user's files of which batches cannot be made; data with a method `damage` finds them."""
    try:
        yield
    except tf.errors.OpError as error:
        data = plan.data
        if (
            not isinstance(data, DataOfFiles) or "Iterator" not in str(error) or failures.is_machine_failure(error)
        ):  # from elsewhere
            raise
        # A step whose batch failed may have been counted.
        batch_of, size = trainer.left_out.batch_of, plan.recipe.global_batch_size
        first, last = batch_of(max(trainer.step, 1)), batch_of(trainer.step + trainer.loop_steps)
        damage = data.damage(seed=plan.seed, start=(first - 1) * size, stop=last * size)
        if damage is None:
            raise
        gone = isinstance(error, tf.errors.NotFoundError | tf.errors.PermissionDeniedError)
        raise (MissingInputError if gone else UsageError)(damage) from error


@contextlib.contextmanager
def input_was_there(model_dir: str) -> Iterator[None]:
    """Takes input that is missing for a failure of the machine, where an attempt of the same run has found it.

    Raises:
      PeerError: it is missing, this or an earlier attempt has begun to train, and the bindings name what they named.
    """
    try:
        yield
    except Exception as error:
        told = failures.explained(error)
        if not isinstance(told, MissingInputError) or not attempts.has_begun(model_dir) or _is_another(model_dir):
            raise
        raise PeerError(
            f"{told}. This run has trained before, so it may come back, as a folder that has to be mounted. Run the "
            "same command again when it is there, or choose another --model_dir for other data"
        ) from error


def check_checkpoints(model_dir: str) -> None:
    """Raises PeerError where there is no checkpoint to go on from, and an earlier attempt has saved one."""
    if (step := attempts.last_saved(model_dir)) is not None:
        raise PeerError(
            f"{os.path.join(model_dir, 'checkpoints')} has no checkpoint, and an earlier attempt of this run had one "
            f"of step {step} there. Is a folder not mounted? Run the same command again when it is. To begin anew, "
            f"choose another --model_dir, or remove {os.path.join(model_dir, attempts.FILE_NAME)}"
        )


def _is_another(model_dir: str) -> bool:
    """Whether a name or path is bound otherwise than where config.gin was written: then it may be the mistake."""
    for name, before in gin_files.values(Path(model_dir, run_folder.CONFIG)).items():
        with contextlib.suppress(UsageError):  # it is no plain value
            now = gin_bindings.bound(name, None)
            if isinstance(now, str) and not isinstance(before, gin_files.Name) and now != before:
                return True
    return False

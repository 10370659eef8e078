"""`--mode=export_step`: the training step as a program that runs without TensorFlow, with what it needs to run.

step.stablehlo     the step of all replicas, StableHLO in its portable form
arguments.json     its arguments and results in order, versions, and the configuration it was made from
variables.npz      the variables: of the newest checkpoint, else as a run starts
batches.npz        the global batch of the next step, stacked with those after it; where the data is prepared
run.py             runs it: python run.py --steps 10; needs JAX and NumPy
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import launcher
from launcher.checkpoints import CheckpointStore
from launcher.config import gin_used
from launcher.errors import UsageError
from launcher.run import session
from launcher.run.plan import RunPlan
from launcher.run.start import starting_point
from launcher.step_program import jax_parts, lowering, pod_module, runner
from launcher.step_program.lowering import Lowered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    step: int  # that the weights have been trained
    no_batches: str | None  # why there are none; None if there are
    notes: tuple[str, ...]  # on what of the step is not in the program


def run(plan: RunPlan, *, model_dir: str, export_dir: str, num_replicas: int, num_batches: int = 1) -> Exported:
    """Lowers the step of `plan` and writes it to a folder of its own, whole or not at all.

    Args:
      plan: of any strategy.
      model_dir: of a run; its newest checkpoint is taken, if it has one.
      export_dir: a folder that is empty or not there.
      num_batches: global batches to write, of consecutive steps.

    Raises:
      UsageError: the folder is not empty or cannot be written, the batch cannot be divided, the optimizer's state is
        shared out, JAX is missing, or the checkpoint is of another recipe.
    """
    _check_folder(export_dir)
    if plan.recipe.shard != "none":
        raise UsageError(
            f"train.shard = {plan.recipe.shard!r}: an exported step has the same variables on every replica; export it "
            "with --gin_param=\"train.shard = 'none'\", which trains to the same weights"
        )
    built = lowering.build(plan, num_replicas)
    store = CheckpointStore(os.path.join(model_dir, "checkpoints"), is_chief=False)
    starting_point.restore(store, built.trainer, same_order=False, start_from=plan.recipe.start)
    lowered = lowering.lower_session(built)
    gin_used.check_all_used()
    batches, no_batches = _batches(built, num_batches)
    partial = Path(f"{export_dir.rstrip(os.sep)}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(partial, lowered, batches)
        if os.path.isdir(export_dir):
            os.rmdir(export_dir)
        partial.rename(export_dir)
    except OSError as error:
        raise UsageError(
            f"--export_dir={export_dir} cannot be written: {error.strerror or error}; choose another"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(step=built.trainer.step, no_batches=no_batches, notes=lowered.notes)


def _check_folder(export_dir: str) -> None:
    if "://" in export_dir:
        raise UsageError(f"--export_dir={export_dir}: a step is exported to a local folder; copy it from there")
    if os.path.exists(export_dir) and (not os.path.isdir(export_dir) or os.listdir(export_dir)):
        raise UsageError(f"--export_dir={export_dir} exists and is not an empty folder; choose another")


def _batches(built: session.Session, count: int) -> tuple[dict[str, np.ndarray], str | None]:
    """Global batches from the trainer's step on, each tensor [count, global batch, ...]; else why there are none."""
    try:
        built.plan.data.check()
    except UsageError as error:
        return {}, str(error)
    num_replicas = built.plan.strategy.num_replicas
    shard = lowering.whole_shard(built.plan, start_step=built.trainer.left_out.batch_of(built.trainer.step + 1) - 1)
    parts = itertools.islice(built.plan.data.train_batches(shard).as_numpy_iterator(), count * num_replicas)
    stacked = tf.nest.map_structure(lambda *replicas: np.stack(replicas), *parts)
    # The batches of a step's replicas follow one another.
    return {
        name: value.reshape(count, num_replicas * value.shape[1], *value.shape[2:]) for name, value in stacked.items()
    }, None


def _write(folder: Path, lowered: Lowered, batches: dict[str, np.ndarray]) -> None:
    jax, program, plan = jax_parts.load(), lowered.program, lowered.session.plan
    portable, version = pod_module.serialize(jax, program.stablehlo)
    (folder / runner.PROGRAM).write_bytes(portable)
    variables = {name: variable.numpy() for name, variable in lowered.variables.items()}
    np.savez(folder / runner.VARIABLES, **_storable({**variables, **lowered.constants}))
    if batches:
        np.savez(folder / runner.BATCHES, **_storable(batches))
    described = {
        "format": 1,
        "num_replicas": program.num_replicas,
        "global_batch_size": plan.recipe.global_batch_size,
        "step": lowered.session.trainer.step,
        "policy": plan.policy,
        "reduce_dtype": plan.reduce_dtype.name,
        "seed": plan.seed,
        "arguments": [dataclasses.asdict(argument) for argument in program.arguments],
        "results": [dataclasses.asdict(result) for result in program.results],
        "versions": {
            "launcher": launcher.__version__,
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "jax": jax.version,
            "stablehlo": version,
        },
        "config": gin_used.operative_config(),
    }
    (folder / runner.DESCRIPTION).write_text(json.dumps(described, indent=1) + "\n", "utf-8")
    shutil.copyfile(runner.__file__, folder / "run.py")


def _storable(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """NumPy's file format forgets the names of dtypes that are not its own, such as bfloat16: their bits are stored."""
    return {name: array if array.dtype.isbuiltin else array.view(np.uint16) for name, array in arrays.items()}

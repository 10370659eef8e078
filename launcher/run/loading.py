"""A recipe from its gin files to a plan: the one way in for every mode."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.machine import cluster as cluster_lib
from launcher.machine import strategy as strategy_lib
from launcher.machine.strategy import StrategyPlan
from launcher.machine.tpu import NoTpuError
from launcher.run import plan
from launcher.run.plan import RunPlan
from launcher.run.recipe import Recipe


def import_builtins() -> None:
    """Makes the names that recipes may bind known to gin."""
    for name in (
        "launcher.data.images",
        "launcher.data.text.corpus",
        "launcher.data.text.pairs",
        "launcher.precision_report.settings",
        "launcher.tasks.image_classification",
        "launcher.tasks.keras_losses",
        "launcher.tasks.language_modelling",
        "launcher.tasks.translation",
        "launcher.verify.settings",
        "models.amplified",
        "models.lstm",
        "models.mlp",
        "models.resnet",
        "models.transformer",
    ):
        importlib.import_module(name)


def load(gin_files: Sequence[str], gin_params: Sequence[str], *, before_imports: Callable[[], None]) -> Recipe:
    """The recipe that the gin files and bindings make.

    Args:
      gin_files, gin_params: as the flags of these names.
      before_imports: as in `config.load`.

    Raises:
      UsageError: they contradict themselves or each other.
    """
    import_builtins()
    gin_bindings.load(gin_files, gin_params, before_imports=before_imports)
    # A recipe may say how any mode is to treat it, whichever mode this is.
    gin_bindings.check_settings()
    return Recipe()


def resolve(
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    *,
    environ: Mapping[str, str],
    strategy: str | None = None,
    replicas: int | None = None,
    tpu: str | None = None,
    seed: int | None = None,
    deterministic: bool = False,
    on: StrategyPlan | None = None,
    connect: bool = True,
) -> RunPlan:
    """Loads a recipe and puts it together with the flags (None: not given) and the machine.

    TensorFlow's devices cannot be set up after its first operation, which a module may run where it is imported. So
    they are before the first line of a module that the gin files import. Without such a module this is left to
    `session.build`, so that all that is wrong with a recipe is said before peers are waited for.

    Args:
      gin_files, gin_params: the recipe, as the flags of these names.
      environ, strategy, replicas, tpu, seed, deterministic, on: as in `plan.resolve`.
      connect: whether a session will be built from the plan; else no peer and no TPU is connected to, and a TPU need
        not be there.

    Raises:
      UsageError: the recipe, the flags or the environment are wrong, or devices are missing.
      PortTakenError: another process listens on this worker's port.
    """
    cluster = cluster_lib.resolve(environ)
    set_up_for: StrategyPlan | None = None
    made: tf.distribute.Strategy | None = None

    def decide(recipe_strategy: str) -> StrategyPlan:
        if on is not None:
            return on
        try:
            return strategy_lib.plan(
                requested=strategy or recipe_strategy, replicas=replicas, tpu=tpu, cluster=cluster, environ=environ
            )
        except NoTpuError as error:
            if connect:
                raise
            return strategy_lib.absent_tpu(replicas, why=f"NOT HERE: {error}")

    def set_up() -> None:
        nonlocal set_up_for, made
        set_up_for = decide(gin_bindings.bound("train.strategy", Recipe.strategy))
        if deterministic:
            tf.config.experimental.enable_op_determinism()
        # What a module draws, such as a split of its examples, must be the same in every worker and after a restart.
        keras.utils.set_random_seed(gin_bindings.bound("train.seed", Recipe.seed) if seed is None else seed)
        if connect:
            made = strategy_lib.build(set_up_for, cluster)
        else:
            strategy_lib.configure(set_up_for)

    recipe = load(gin_files, gin_params, before_imports=set_up)
    devices = decide(recipe.strategy)
    if set_up_for not in (None, devices):
        raise UsageError(
            f"devices were set up for {_described(set_up_for)} before the gin file's modules were imported, and now "
            f"{_described(devices)} is wanted: bind train.strategy and gpu.* to plain values, which need no import, "
            "and let no module change the environment"
        )
    resolved = plan.resolve(recipe, environ=environ, seed=seed, deterministic=deterministic, on=devices)
    return dataclasses.replace(resolved, made=made)


def _described(devices: StrategyPlan | None) -> str:
    return "nothing" if devices is None else f"{devices.kind} on {', '.join(devices.devices)}, {devices.gpu_options}"

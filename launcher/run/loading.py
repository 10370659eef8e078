"""A recipe from its gin files to a plan: the one way in for every mode."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.machine import cluster as cluster_lib
from launcher.machine import jax_devices, nvidia
from launcher.machine import strategy as strategy_lib
from launcher.machine import tpu as tpu_lib
from launcher.machine.devices import discover, settings_left
from launcher.machine.runtime_kinds import TENSORFLOW, RuntimeKind
from launcher.machine.strategy import StrategyPlan
from launcher.run import plan, programs
from launcher.run.plan import RunPlan
from launcher.run.recipe import Recipe
from launcher.runtime.tensorflow import TfRuntime
from launcher.step import precision
from launcher.tasks.base import open_data


def import_builtins() -> None:
    """Makes the names that recipes may bind known to gin."""
    for name in (
        "launcher.data.images.image_data",
        "launcher.data.text.corpus",
        "launcher.data.text.pairs",
        "launcher.precision_report.examine",
        "launcher.tasks.image_classification",
        "launcher.tasks.keras_model",
        "launcher.tasks.language_modelling",
        "launcher.tasks.translation",
        "launcher.verify.settings",
        "launcher.models.amplified",
        "launcher.models.lstm",
        "launcher.models.mlp",
        "launcher.models.resnet",
        "launcher.models.transformer",
    ):
        importlib.import_module(name)


def load(gin_files: Sequence[str], gin_params: Sequence[str], *, before_imports: Callable[[], None]) -> Recipe:
    """The recipe that gin files and bindings make, or that the first `launcher.fit` of a program makes with them."""
    path, others = programs.split(gin_files)
    if path is None:
        load_bindings(others, gin_params, before_imports=before_imports)
        return Recipe()
    load_bindings(others, gin_params, called_by_program=True)
    before_imports()
    return programs.first_call(path).recipe()


def load_bindings(
    gin_files: Sequence[str],
    gin_params: Sequence[str],
    *,
    before_imports: Callable[[], None] = lambda: None,
    called_by_program: bool = False,
    foreign: str | None = None,
) -> None:
    """Makes the bindings known to gin and checks them; for arguments and errors, see `gin_bindings.load`.

    `called_by_program`: whether they are bound beside a program, whose `launcher.fit` gives what is required.
    """
    import_builtins()
    called = ("train",) if called_by_program else ()
    gin_bindings.load(gin_files, gin_params, before_imports=before_imports, called_by_program=called, foreign=foreign)
    # A recipe may say how any mode is to treat it, whichever mode this is.
    gin_bindings.check_settings()


# Runtimes of this process, by what they were made for. A second run, as in a notebook, takes the same one: to connect
# to a TPU again clears what is on it, and collectives of two may take each other's place.
_made: dict[StrategyPlan, TfRuntime] = {}


@dataclasses.dataclass(kw_only=True)
class Machine:
    """The devices that the flags (None: not given) and this machine allow, set up at most once, and plans on them.

    Attributes:
      environ: the process's environment variables.
      on: devices that have been decided on elsewhere, such as those of a slice that is only compiled for; then neither
        this machine's devices nor the flags on them matter.
      connect: whether a session will be built from the plan; else no peer and no TPU is connected to, and a TPU need
        not be there.
      runtime: what runs the steps; None for TensorFlow, or JAX where that alone can use the machine's GPUs.
      made: the runtime, once it has been made.
    """

    environ: Mapping[str, str]
    strategy: str | None = None
    replicas: int | None = None
    tpu: str | None = None
    seed: int | None = None
    deterministic: bool = False
    on: StrategyPlan | None = None
    connect: bool = True
    runtime: RuntimeKind | None = None
    made: TfRuntime | None = None

    def __post_init__(self) -> None:
        self._cluster = cluster_lib.resolve(self.environ)
        self._set_up_for: StrategyPlan | None = None

    def resolve(self, gin_files: Sequence[str], gin_params: Sequence[str]) -> RunPlan:
        """Loads a recipe and puts it together with the flags and the machine.

        TensorFlow's devices cannot be set up after its first operation, which a module may run where it is imported. So
        they are before the first line of a module that the gin files import, or of a program. Without either this is
        left to `session.build`, so that all that is wrong with a recipe is said before peers are waited for.

        Raises:
          UsageError: the recipe, the flags or the environment are wrong, or devices are missing.
          PortTakenError: another process listens on this worker's port.
        """
        return self.plan_of(load(gin_files, gin_params, before_imports=self.begin))

    def set_up(self) -> None:
        """Sets up the devices that the bindings and flags ask for, before users' Python runs."""
        # For a strategy of the recipe's own, which its module makes afterwards, the devices are those of "auto".
        asked = gin_bindings.bound("train.strategy", Recipe.strategy, reference=Recipe.strategy)
        self._set_up_for = self._decide(asked)
        if self.deterministic:
            tf.config.experimental.enable_op_determinism()
        if self.connect:
            made = _made.get(self._set_up_for)
            self.made = made or TfRuntime(strategy_lib.build(self._set_up_for, self._cluster))
            if self._set_up_for.accelerator != "cpu" and self._set_up_for.kind != "multi_worker":
                _made[self._set_up_for] = self.made
        else:
            strategy_lib.configure(self._set_up_for)

    def begin(self) -> None:
        """Sets up, in a process of the launcher's, what users' Python finds there.

        What it draws, such as a split of its examples, must be the same in every worker and after a restart.
        """
        self.set_up()
        keras.utils.set_random_seed(gin_bindings.bound("train.seed", Recipe.seed) if self.seed is None else self.seed)

    def plan_of(self, recipe: Recipe) -> RunPlan:
        """The plan of a recipe on these devices; UsageError where it wants others than were set up for it."""
        devices = self._decide(recipe.strategy)
        if self._set_up_for not in (None, devices) and isinstance(recipe.strategy, str):
            raise UsageError(
                f"devices were set up for {_described(self._set_up_for)} before the gin file's modules were imported, "
                f"and now {_described(devices)} is wanted: bind train.strategy and gpu.* to plain values, which need "
                "no import, and let no module change the environment"
            )
        microbatches, microbatches_why = 1, "auto: how many fit is found when training starts, or by preflight"
        if recipe.microbatches != "auto":
            microbatches, microbatches_why = recipe.microbatches, ""
        rematerialize: bool | None = False
        rematerialize_why = "auto: whether the step fits without is found when training starts, or by preflight"
        if recipe.rematerialize != "auto":
            rematerialize, rematerialize_why = recipe.rematerialize, "train.rematerialize"
        policy, why = plan.policy_of(recipe, devices)
        if self._set_up_for is not None:
            devices = dataclasses.replace(devices, notes=(*devices.notes, *settings_left(devices)))
        data = open_data(recipe.task)
        resolved = RunPlan(
            recipe=recipe,
            data=data,
            cluster=self._cluster,
            strategy=devices,
            policy=policy,
            policy_why=why,
            loss_scale=precision.resolve_loss_scale(recipe.loss_scale, policy),  # until the layers say more
            reduce_dtype=precision.resolve_reduce_dtype(recipe.reduce_dtype, policy),
            total_steps=recipe.total_steps(data),
            eval_batch_size=recipe.eval_batch_size or recipe.global_batch_size,
            seed=recipe.seed if self.seed is None else self.seed,
            deterministic=self.deterministic,
            microbatches=microbatches,
            microbatches_why=microbatches_why,
            rematerialize=rematerialize,
            rematerialize_why=rematerialize_why,
            made=self.made,
        )
        resolved = plan.shared_by_fewer(resolved, cluster_lib.full_workers(self.environ, self._cluster.num_workers))
        plan.check_batches(resolved)
        return resolved

    def _decide(self, recipe_strategy: str | Callable[[], Any]) -> StrategyPlan:
        if self.on is not None:
            return self.on
        if self.runtime is not None and self.runtime.devices is not None:
            for name, value in (("--strategy", self.strategy), ("--tpu", self.tpu)):
                if value is not None:
                    raise UsageError(f"{name}={value} is for {TENSORFLOW.flag}: leave it out, or give --replicas")
            return self.runtime.devices(self.replicas, self._cluster, self.environ)
        requested = self.strategy or recipe_strategy
        if not isinstance(requested, str):
            own = requested()
            self.made = own if isinstance(own, TfRuntime) else TfRuntime(own)
            return strategy_lib.describe(self.made.strategy)
        gpus = nvidia.visible(self.environ) if requested == "auto" and self.runtime is None else []
        if gpus and not tpu_lib.named(self.tpu, self.environ) and not (here := discover()).gpus and not here.tpus:
            return jax_devices.plan_instead(gpus, self.replicas, self._cluster, self.environ)
        try:
            return strategy_lib.plan(
                requested=requested,
                replicas=self.replicas,
                tpu=self.tpu,
                cluster=self._cluster,
                environ=self.environ,
            )
        except tpu_lib.NoTpuError as error:
            if self.connect:
                raise
            return strategy_lib.absent_tpu(self.replicas, why=f"NOT HERE: {error}")


def _described(devices: StrategyPlan | None) -> str:
    return "nothing" if devices is None else f"{devices.kind} on {', '.join(devices.devices)}, {devices.gpu_options}"

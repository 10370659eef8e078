"""A run resolved: recipe, flags and machine put together by `loading.Machine`, before anything is built or written."""

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from launcher.data.kinds import DataAsStored, DataWithName, name_of
from launcher.data.pipeline import Batch, Data, rows_of_replica
from launcher.errors import UsageError
from launcher.machine import cluster as cluster_lib
from launcher.machine import strategy as strategy_lib
from launcher.machine.runtime_kinds import PJRT
from launcher.reporting.units import plural
from launcher.run.recipe import Recipe
from launcher.runtime.tensorflow import TfRuntime
from launcher.step import gradients, precision, reduce_error
from launcher.step.layers import group_size, layers_of
from launcher.step.statistics import seed_states
from launcher.tasks.cross_entropy import LossChunks

_MACOS = (
    "macOS: training on the CPU should work, with one worker or several; all of it was tried on Linux, none of it on a "
    "Mac. GPUs (tensorflow-metal) are not supported, and preflight's compilers have no wheels for it"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that is decided before the first variable exists.

    Attributes:
      data: the task's data, opened once.
      policy, policy_why: dtype policy, and the reason it was chosen.
      reduce_dtype: dtype gradients are reduced in.
      eval_batch_size: examples of one evaluation batch over all replicas.
      seed: base of all random numbers.
      deterministic: whether two runs on one topology must be bitwise equal.
      microbatches: parts each replica's batch is split in.
      microbatches_why: reason for their number, where the recipe leaves it open; else "".
      rematerialize: whether layers that can compute their activations again do so; None for the model's own setting.
      full_workers: those of the whole job, of which fewer may be there.
      rows: of each replica's batch, padding included, where fewer workers cannot share the global batch evenly; else 0.
      made: the runtime, where it had to be made before the recipe's own modules were imported; else None.
    """

    recipe: Recipe
    data: Data
    cluster: cluster_lib.Cluster
    strategy: strategy_lib.StrategyPlan
    policy: str
    policy_why: str
    loss_scale: precision.LossScale
    reduce_dtype: tf.DType
    total_steps: int
    eval_batch_size: int
    seed: int
    deterministic: bool = False
    microbatches: int = 1
    microbatches_why: str = ""
    rematerialize: bool | None = None
    rematerialize_why: str = ""
    full_workers: int = 1
    rows: int = 0
    made: TfRuntime | None = None

    @property
    def per_replica_batch_size(self) -> int:
        size, replicas = self.recipe.global_batch_size, self.strategy.num_replicas
        return self.rows or rows_of_replica(self.data, size, replicas, self.microbatches) or size // replicas

    @property
    def num_parts(self) -> int:
        """Forward passes that a global batch is divided among."""
        return self.strategy.num_replicas * self.microbatches

    @property
    def microbatch_size(self) -> int:
        """Examples of one forward pass of one replica."""
        return self.per_replica_batch_size // self.microbatches

    @property
    def jit_compile(self) -> bool:
        """Whether to have parts of the step compiled with XLA; on a TPU all of it is in any case, as one program."""
        return self.recipe.jit_compile and self.strategy.accelerator != "tpu"

    @property
    def is_compiled(self) -> bool:
        """Whether the model's part of the step is compiled, by whatever runs it."""
        return self.recipe.jit_compile or self.strategy.accelerator == "tpu" or self.strategy.runtime.compiles

    @property
    def is_one_program(self) -> bool:
        """Whether XLA compiles the whole step for GPUs."""
        return self.strategy.runtime.compiles and self.strategy.accelerator == "gpu"

    @property
    def finish_stored(self) -> Callable[[Batch], Batch] | None:
        """The function that finishes a batch in the step, where it comes to a GPU as it is stored; else None."""
        return self.data.finish_stored if self.is_one_program and isinstance(self.data, DataAsStored) else None

    @property
    def pads(self) -> bool:
        """Whether the last batch is short, or replicas do not divide one; datasets may have short ones besides."""
        size, evaluated, data = self.recipe.global_batch_size, self.eval_batch_size, self.data
        short = (data.num_train_examples or 0) % size or (data.num_eval_examples or 0) % evaluated
        return bool(short or size % self.num_parts or evaluated % self.strategy.num_replicas)

    @property
    def loss_chunks(self) -> LossChunks:
        return LossChunks(pieces=self.recipe.loss_chunks, accelerator=self.strategy.accelerator)

    @property
    def bucket_bytes(self) -> int:
        """Upper bound on one gradient collective."""
        alone = self.strategy.accelerator == "tpu" or self.recipe.shard == "all"
        default = gradients.TPU_BUCKET_BYTES if alone else gradients.DEFAULT_BUCKET_BYTES
        return self.recipe.bucket_bytes or default

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a person before the run: on the devices, and of dtypes that lose or gain nothing."""
        notes = [*self.strategy.notes]
        if platform.system() == "Darwin":
            notes.append(_MACOS)
        if warning := reduce_error.warning(self.reduce_dtype.name, self.strategy.num_replicas):
            notes.append(warning)
        if self.strategy.accelerator == "tpu" and self.policy != "mixed_bfloat16":
            notes.append(f"{self.policy}: a TPU multiplies in bfloat16; take train.precision = 'mixed_bfloat16'")
        if self.full_workers > self.cluster.num_workers:
            workers = f"{self.cluster.num_workers} of {self.full_workers} workers are there"
            notes.append(f"{workers}, for the same global batch: {plural(self.microbatches, 'microbatch')} a replica")
        return tuple(notes)

    def describe(self) -> dict[str, str]:
        """The plan as a person reads it."""
        recipe = self.recipe
        parts = ((self.strategy.num_replicas, "replica"), (self.microbatches, "microbatch"))
        split = " x ".join([*(plural(*part) for part in parts), str(self.microbatch_size)])
        padding = self.num_parts * self.microbatch_size - recipe.global_batch_size
        split += f", {padding} of them padding" if padding else ""
        split += ", images as bytes" if self.finish_stored else ""
        why = f" ({self.microbatches_why})" if self.microbatches_why else ""
        examples, details = (
            self.data.num_train_examples,
            self.data.details if isinstance(self.data, DataWithName) else "",
        )
        again = f"{'on' if self.rematerialize else 'off'} ({self.rematerialize_why})"
        epochs = f", {self.total_steps * recipe.global_batch_size / examples:.1f} epochs" if examples else ""
        return {
            "task": type(recipe.task).__name__,
            "data": f"{name_of(self.data)}: {_count(examples)} training, "
            f"{_count(self.data.num_eval_examples)} evaluation examples{details and f'; {details}'}",
            "cluster": self.cluster.description,
            "strategy": f"{self.strategy.kind} ({self.strategy.why})",
            "batch": f"{recipe.global_batch_size} examples a step = {split}{why}",
            **({} if self.rematerialize is None else {"rematerialisation": again}),
            "policy": f"{self.policy} ({self.policy_why})",
            "loss scale": "none" if self.loss_scale == precision.FixedLossScale(scale=1.0) else str(self.loss_scale),
            "steps": f"{self.total_steps:,}{epochs}",
            "seed": f"{self.seed}{', deterministic' if self.deterministic else ''}",
        }


def policy_of(recipe: Recipe, devices: strategy_lib.StrategyPlan) -> tuple[str, str]:
    """The dtype policy of a recipe on these devices, and the reason for it."""
    policy, why = recipe.precision, "train.precision"
    if policy == "auto":
        policy, why = strategy_lib.recommended_policy(devices)
    if policy not in precision.POLICIES:
        raise UsageError(f"train.precision = {policy!r}: expected 'auto' or one of {', '.join(precision.POLICIES)}")
    if precision.FLOAT8 in (policy, *recipe.precision_overrides.values()):
        compiles = recipe.jit_compile or devices.runtime.compiles
        strategy_lib.set_up_float8(devices, os.environ, compiles=compiles)
    return policy, why


def check_shard(plan: RunPlan) -> None:
    """Raises UsageError where a runtime is to divide weights that cannot."""
    if plan.recipe.shard == "all" and not plan.strategy.runtime.divides_weights:
        raise UsageError(f"train.shard = 'all' needs {PJRT.flag}; train.shard = 'optimizer' trains the same here")


def check_batches(plan: RunPlan) -> None:
    """Raises UsageError where a global batch is neither split evenly over replicas and microbatches nor padded."""
    recipe, num_replicas = plan.recipe, plan.strategy.num_replicas
    if plan.rows or rows_of_replica(plan.data, recipe.global_batch_size, num_replicas):
        return
    parts = num_replicas * plan.microbatches
    if recipe.global_batch_size % parts:
        below, above = recipe.global_batch_size // parts * parts, -(-recipe.global_batch_size // parts) * parts
        nearest = f"{below} or {above}" if below else str(above)
        raise UsageError(
            f"train.global_batch_size = {recipe.global_batch_size} cannot be split evenly over {num_replicas} replicas "
            f"x {plan.microbatches} microbatches; use a multiple of {parts}, such as {nearest}"
        )
    if plan.eval_batch_size % num_replicas:
        raise UsageError(
            f"train.eval_batch_size = {plan.eval_batch_size}: use a multiple of the {num_replicas} replicas"
        )


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def shared_by_fewer(plan: RunPlan, full_workers: int) -> RunPlan:
    """The plan of a job of `full_workers` on the workers that are there; UsageError where all could not share it.

    Where they cannot share the global batch evenly, all replicas have as many pieces, of which the last ones are
    padding, of weight 0. A piece is what a microbatch of the whole job is, so that layers see and draw what they would
    there; where none of them has statistics of the batch or random numbers, `finer_shares` makes pieces smaller.
    """
    here, replicas, size = plan.cluster.num_workers, plan.strategy.num_replicas, plan.recipe.global_batch_size
    fewer = dataclasses.replace(
        plan, full_workers=full_workers, microbatches=-(-plan.microbatches * full_workers // here)
    )
    if full_workers % here == 0 or rows_of_replica(plan.data, size, replicas):
        return fewer
    pieces = full_workers * (replicas // here) * plan.microbatches
    if size % pieces:
        raise UsageError(
            f"train.global_batch_size = {size} cannot be split evenly over the job's {full_workers} workers; use a "
            f"multiple of {pieces}"
        )
    evaluated = -(-plan.eval_batch_size // replicas) * replicas
    return dataclasses.replace(fewer, rows=fewer.microbatches * (size // pieces), eval_batch_size=evaluated)


def finer_shares(
    plan: RunPlan, model: keras.Model, statistics: Sequence[keras.Variable], note: Callable[[str], None]
) -> RunPlan:
    """The same in pieces that leave less to pad, where no layer has `statistics` of whole pieces or draws numbers for
    them; `note` is told.
    """
    sizes = {
        id(variable): group_size(layer)
        for layer in layers_of(model)
        for variable in layer.variables
        if group_size(layer)
    }
    if not plan.rows or seed_states(model) or any(id(variable) not in sizes for variable in statistics):
        return plan
    unit = math.lcm(*(size or 1 for size in sizes.values()))
    units = -(-plan.recipe.global_batch_size // (plan.strategy.num_replicas * unit))
    microbatches = -(-units * unit // plan.microbatch_size)
    rows = microbatches * unit * -(-units // microbatches)
    note(f"microbatches have {rows // microbatches} in place of {plan.microbatch_size} examples, to leave less to pad")
    return dataclasses.replace(plan, microbatches=microbatches, rows=rows)

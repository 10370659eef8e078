"""A plan made real: runtime, model, optimizer, trainer and evaluator."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import pathlib
import traceback
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

import launcher
from launcher.data import batch_spec
from launcher.data.order import ALL_IN
from launcher.data.pipeline import Shard, held
from launcher.errors import UsageError
from launcher.machine import strategy as strategy_lib
from launcher.machine.runtime_kinds import PJRT
from launcher.optimizers import Optimizer, Optimizers
from launcher.run import layer_settings
from launcher.run.evaluator import Evaluator
from launcher.run.plan import RunPlan, finer_shares
from launcher.run.recipe import Recipe
from launcher.runtime import Runtime, initial_values
from launcher.runtime.tensorflow import TfRuntime
from launcher.step import float8, freezing, layer_policies, precision, statistics
from launcher.step.clipping import Clipping
from launcher.step.layers import layers_of
from launcher.step.statistics import Statistic
from launcher.step.step_config import StepConfig
from launcher.step.trainer import Trainer
from launcher.tasks.base import Place
from launcher.tasks.keras_callbacks import fit_of
from launcher.tasks.keras_model import KerasTask
from launcher.tasks.keras_private import forget_names
from launcher.tasks.keras_tracing import drawn_from

_MODELS = pathlib.Path(launcher.__path__[-1], "models")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A model, its trainer and evaluator, for a mode to work with.

    `notes` are what a person should know of how the model was made.
    """

    plan: RunPlan
    runtime: Runtime
    model: keras.Model
    trainer: Trainer
    evaluator: Evaluator
    notes: tuple[str, ...] = ()


def build(plan: RunPlan) -> Session:
    """Builds a session in this process; the first call decides the devices, so there is one a process."""
    return build_on(plan.strategy.runtime.make(plan), plan)


def tf_runtime(plan: RunPlan) -> TfRuntime:
    """TensorFlow's runtime of a plan, made unless it has been."""
    if plan.made is not None:
        return plan.made
    if plan.deterministic:
        tf.config.experimental.enable_op_determinism()
    return TfRuntime(strategy_lib.build(plan.strategy, plan.cluster))


def build_on(runtime: Runtime, plan: RunPlan) -> Session:
    """The same on a runtime that exists, with as many replicas as the plan says."""
    recipe = plan.recipe
    # Names count up within a process: every build starts from the same ones. What an earlier session of this process
    # still holds is missing on a device; on a CPU Python's own collections will do.
    if not fit_of(recipe.task).has_model:
        forget_names()
        if plan.strategy.accelerator != "cpu":
            gc.collect()
    notes: list[str] = []
    with runtime.scope():
        model = build_model(plan, notes.append)
        if recipe.task.step_assigns is not None:
            for binding, instead in _unfit_for_own_step(plan):
                raise UsageError(f"{binding}: the model has a train_step or test_step of its own; {instead}")
        optimizer = build_optimizer(plan)
    plan = with_loss_scale(plan, model)
    assigns = forward_assigns(plan, model)
    plan = finer_shares(plan, model, assigns, notes.append)
    layer_settings.check_batch_norm(model, plan)
    if runtime.traits.one_copy:
        _check_one_copy(plan, [*assigns, *statistics.seed_states(model)])
    of_batches = statistics_of(plan, model, assigns)
    jit = plan.jit_compile and not runtime.traits.compiles
    divides = runtime.traits.divides_rows or plan.strategy.runtime.compiles  # that is lowered here alone
    place = Place(plan.strategy.num_replicas, plan.microbatches, plan.is_compiled, jit, plan.pads, divides)
    recipe.task.placed(place)
    if recipe.penalty is not None:
        recipe.penalty.check(model)
    trainer = Trainer(
        runtime=runtime,
        task=recipe.task,
        model=model,
        optimizer=optimizer,
        loss_scale=plan.loss_scale,
        config=step_config(plan, optimizer, runtime),
        total_steps=plan.total_steps,
        forward_assigns=of_batches,
        rate_multipliers=freezing.rate_multipliers(model, recipe.rate_multipliers),
        # TensorFlow refuses to read the clock inside a deterministic graph.
        measure_input_wait=not plan.deterministic,
        left_out=ALL_IN.with_ranges(recipe.skip_batches),
    )
    evaluator = Evaluator(runtime, model, plan)
    return Session(plan=plan, runtime=runtime, model=model, trainer=trainer, evaluator=evaluator, notes=(*notes,))


def _check_one_copy(plan: RunPlan, assigned: Sequence[keras.Variable]) -> None:
    """Refuses, by UsageError, what each replica would have to keep a value of its own of."""
    name = f"train.strategy: {plan.strategy.kind} has one copy of a variable for all replicas"
    if plan.recipe.shard != "none":
        raise UsageError(f"{name}, and train.shard = {plan.recipe.shard!r} gives each its part; leave it out")
    if plan.recipe.task.step_assigns is not None:
        raise UsageError(f"{name}, and the model has a train_step of its own; take a mirrored strategy")
    if assigned:
        raise UsageError(f"{name}, and each assigns {assigned[0].path} in its forward pass; take a mirrored strategy")


def with_loss_scale(plan: RunPlan, model: keras.Model) -> RunPlan:
    """The plan with the loss scale that "auto" is for a built model: one layer in float16 is enough, or an optimizer
    that was compiled with one, whatever the policy of the run is.
    """
    if plan.recipe.loss_scale != "auto":
        return plan
    scale = plan.loss_scale
    if any(computing.layer.compute_dtype == "float16" for computing in layer_policies.computing(model)):
        scale = precision.resolve_loss_scale("auto", "mixed_float16")
    return dataclasses.replace(plan, loss_scale=precision.of_optimizer(getattr(model, "optimizer", None), scale))


def forward_assigns(plan: RunPlan, model: keras.Model) -> list[keras.Variable]:
    """Variables that a microbatch of the plan assigns besides trained weights; see `statistics.assigned`."""

    if (assigns := plan.recipe.task.step_assigns) is not None:
        ids = {id(variable) for variable in assigns}
        return [variable for variable in statistics.candidates(model) if id(variable) in ids]

    is_whole = plan.num_parts == 1 and plan.recipe.ema_decay is None and isinstance(plan.recipe.task, KerasTask)
    if is_whole and (known := statistics.of_keras(model)) is not None:
        return known

    def spec() -> batch_spec.BatchSpec:
        size, replicas = plan.recipe.global_batch_size, plan.strategy.num_replicas
        shard = Shard(
            global_batch_size=size,
            num_replicas=replicas,
            seed=plan.seed,
            rows=plan.per_replica_batch_size,
        )
        whole = batch_spec.of_one_replica(plan.data, shard)
        return {key: tf.TensorSpec([plan.microbatch_size, *part.shape[1:]], part.dtype) for key, part in whole.items()}

    return statistics.assigned(plan.recipe.task, model, spec)


def statistics_of(plan: RunPlan, model: keras.Model, assigned: Sequence[keras.Variable]) -> list[Statistic]:
    """Statistics: how the parts of a batch give what is assigned, by a trial of what layers of one's own keep."""
    task, size = plan.recipe.task, plan.recipe.global_batch_size
    unknown = bool(statistics.unknown(model, assigned))
    if plan.num_parts == 1 or initial_values.are_left_out() or not unknown:
        task.counts_rows |= unknown
        return [*map(statistics.usual, assigned)]
    batch = next(held(plan.data.train_batches(Shard(global_batch_size=size, seed=plan.seed))))
    step = functools.partial(task.try_step, model)
    tried = statistics.tried(model, assigned, batch, step, task.step_assigns or ())
    task.counts_rows |= any(statistic.fold in ("sum", "rows") for statistic in tried)
    return tried


def float32_model(session: Session) -> keras.Model:
    """The session's model once more, its layers in float32 where they would be in 16 bits: what nothing is lost in.

    To give the layers of the one that is there another policy while it is traced is not enough: a cast in a functional
    model and the constants of a Normalization layer keep the dtype that they were made in. The global policy stays as
    it was; the weights are the copy's own until `precision_watch.copy_weights`.
    """
    source, policy = session.model, keras.config.dtype_policy()
    forget_names()  # as for any build, names of layers count from the beginning again
    try:
        with session.runtime.host.scope():
            copy = build_model(dataclasses.replace(session.plan, policy="float32"))
    finally:
        keras.config.set_dtype_policy(policy)
    if copy is source:
        raise UsageError("a second model is needed, in float32: give launcher.fit a function that builds the model")
    for layer, other in zip(layers_of(copy), layers_of(source), strict=False):
        in_8_bits = getattr(other, "quantization_mode", None) == "float8"
        if in_8_bits and layer.quantization_mode is None:  # whose weights it is to have
            layer.quantize("float8", type_check=False)
        if in_8_bits or layer.compute_dtype in ("float16", "bfloat16"):  # whatever the policy, when its code says so
            layer.dtype_policy = "float32"
    before, now = ([f"{one.path} {tuple(one.shape)}" for one in model.weights] for model in (source, copy))
    for was, built in itertools.zip_longest(before, now, fillvalue="nothing"):
        if was != built:
            raise UsageError(f"the task's model() built {built} and before it {was}: it must build the same each time")
    return copy


def build_model(plan: RunPlan, note: Callable[[str], None] = lambda text: None) -> keras.Model:
    """The task's model under the plan's policy and seed, in the current strategy scope; see `model_of`."""
    model = model_of(plan.recipe, policy=plan.policy, seed=plan.seed, note=note)
    layer_settings.apply(model, plan, note)
    return model


def model_of(recipe: Recipe, *, policy: str, seed: int, note: Callable[[str], None] = lambda text: None) -> keras.Model:
    """A recipe's model under a dtype policy, in the current strategy scope; `note` takes what a person should know."""
    keras.config.set_dtype_policy(precision.of_keras(policy))
    try:
        # A model that the program has made draws what it lacks as it would in Keras's fit.
        with contextlib.nullcontext() if fit_of(recipe.task).has_model else drawn_from(seed):
            model = recipe.task.model()
    except ValueError as error:
        # Our own models check their arguments, which are bindings; of a user's, `failures.explained` says where it was.
        if _MODELS not in pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).parents:
            raise
        raise UsageError(str(error)) from None
    if not isinstance(model, keras.Model):
        raise UsageError(f"the task's model() must return a keras.Model (Keras 3), got {type(model).__name__}")
    if not model.trainable_variables:
        raise UsageError(f"model {model.name!r} has no variables to train; call model.build(shape) in model()")
    if brought := layer_policies.follow_run(model, precision.of_keras(policy)):
        note(brought)
    layer_policies.apply(model, recipe.precision_overrides)
    freezing.freeze(model, recipe.freeze)
    if told := float8.apply(model, recipe.precision_overrides, of_run=policy == precision.FLOAT8):
        note(told)
    return model


def build_optimizer(plan: RunPlan) -> Optimizer | Optimizers:
    """The recipe's optimizer; a plain Keras optimizer is wrapped."""
    optimizer = (plan.recipe.optimizer or plan.recipe.task.optimizer)()
    if isinstance(optimizer, keras.optimizers.Optimizer):
        optimizer = Optimizer(optimizer)
    if not isinstance(optimizer, Optimizer | Optimizers):
        raise UsageError(f"train.optimizer must build an Optimizer, ours or Keras's, got {type(optimizer).__name__}")
    if plan.recipe.shard != "none":
        optimizer.check_shardable()
    return optimizer


def step_config(plan: RunPlan, optimizer: Optimizer | Optimizers, runtime: Runtime) -> StepConfig:
    """The configuration of one step of the plan; UsageError where recipe and optimizer both bound the gradients."""
    recipe = plan.recipe
    per_example = float(recipe.task.nominal_weight_per_example)
    return StepConfig(
        global_batch_size=recipe.global_batch_size,
        microbatches=plan.microbatches,
        rows=plan.microbatch_size,
        shared_by=plan.full_workers if plan.rows else 0,
        nominal_weight=recipe.global_batch_size * per_example,
        reduce_dtype=plan.reduce_dtype,
        bucket_bytes=plan.bucket_bytes,
        clipping=_clipping(recipe.clipping, optimizer),
        ema_decay=recipe.ema_decay,
        lazy_embeddings=recipe.lazy_embeddings,
        penalty=recipe.penalty,
        jit_compile=plan.jit_compile,
        loss_chunks=plan.loss_chunks,
        compiled=plan.is_compiled,
        finish_stored=plan.finish_stored,
        one_program=plan.is_one_program,
        seed=plan.seed,
        selects=plan.strategy.accelerator == "tpu"
        or runtime.traits.selects
        or recipe.shard == "all"
        or (recipe.shard == "optimizer" and optimizer.reduces_shards),
        one_copy=runtime.traits.one_copy,
        shards=1 if recipe.shard == "none" else plan.strategy.num_replicas,
        has_limits=recipe.spikes is not None and recipe.spikes.action == "skip",
    )


def _clipping(of_recipe: Clipping, optimizer: Optimizer | Optimizers) -> Clipping:
    """The recipe's bound on the gradients, or else the one that the Keras optimizer was made with."""
    theirs = optimizer.clipping
    if not theirs:
        return of_recipe
    if of_recipe.bounds not in ({}, theirs):
        bound, other = (
            {f"Clipping.{name}": bound for name, bound in bounds.items()} for bounds in (theirs, of_recipe.bounds)
        )
        raise UsageError(f"the optimizer clips gradients by {bound}, and the recipe binds {other}: give one of them")
    return dataclasses.replace(of_recipe, **theirs)


def _unfit_for_own_step(plan: RunPlan) -> Iterator[tuple[str, str]]:
    """Bindings that are about a step which the model has of its own, and what to do instead."""
    recipe = plan.recipe
    if recipe.optimizer is not None:
        yield "train.optimizer", "it applies the optimizers that the model holds: leave the binding out"
    if plan.microbatches > 1:
        yield f"train.microbatches = {plan.microbatches}", "what it does with its gradients cannot be divided: bind 1"
    if plan.strategy.accelerator == "tpu" and not plan.strategy.runtime.compiles:
        yield "a TPU", f"train with {PJRT.flag}, on CPUs or GPUs, or write a task, see docs/own_task.md"
    if plan.jit_compile:
        yield "train.jit_compile = True", "it is not compiled by XLA here: leave the binding out"
    if recipe.clipping.bounds:
        (name, bound), *_ = recipe.clipping.bounds.items()
        of_keras = {"global_norm": "global_clipnorm", "value": "clipvalue", "layer_norm": "clipnorm"}
        given = f"give {of_keras[name]}={bound}" if name in of_keras else "give a bound"
        yield f"Clipping.{name} = {bound}", f"{given} to the optimizer that it is for, and leave the binding out"
    if recipe.penalty is not None:
        yield "train.penalty", "add the penalty to the loss in it, and leave the binding out"
    if recipe.precision_watch is not None:
        yield "train.precision_watch", "only the gradients of one loss can be watched: leave the binding out"
    if recipe.spikes is not None and recipe.spikes.action == "skip":
        yield "Spikes.action = 'skip'", "it is over before its loss is known: use 'note', 'stop' or 'rewind'"

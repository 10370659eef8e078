"""`--mode=train`, `eval` and `train_and_eval`: the flags and the recipe become an order and a plan, which are run."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import keras

from launcher.checkpoints import CheckpointStore
from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, UsageError
from launcher.machine import cluster as cluster_lib
from launcher.machine import compile_cache
from launcher.machine.exit_barrier import chief_last
from launcher.machine.runtime_kinds import TENSORFLOW
from launcher.model_dir import check_model_dir, lease
from launcher.modes import MODES, Request, TrainRequest, commands
from launcher.modes.plan import make_machine, resolve
from launcher.reporting.summary import Stopwatch, take_beginning
from launcher.run import loading, memory_trial, programs, training
from launcher.run.actions.profile import ProfiledSteps
from launcher.run.input_faults import input_was_there
from launcher.run.plan import RunPlan, check_shard
from launcher.run.training import Order
from launcher.serving import model_file


def run(request: Request) -> int:
    """Trains, evaluates, or both, as the mode says.

    Raises:
      LauncherError: the flags, the recipe or the machine are wrong, or the run failed or was preempted.
    """
    program, others = programs.split(request.gin_file)
    # What a program does after its last `fit`, such as to predict, may need all workers.
    with chief_last(cluster_lib.resolve(os.environ)), input_was_there(request.run_dir):
        if program is None or not MODES[request.mode].trains:
            train_on(request, lambda: resolve(request))
        else:
            _run_program(request, program, others)
    return EXIT_DONE


def _run_program(request: Request, path: str, gin_files: Sequence[str]) -> None:
    """Runs a program to its end, with its calls of `launcher.fit` on the devices that the flags name.

    The first call's folder is that of the run, and the others' lie inside of it.
    """
    with gin_bindings.usage_errors():
        loading.load_bindings(gin_files, request.gin_param, called_by_program=True)
        machine = make_machine(request)
        machine.begin()
    calls = 0

    def at_fit(call: programs.FitCall) -> str:
        nonlocal calls
        calls += 1
        engine, known = call.settings.get("engine"), request.runtime.name
        if request.engine is None and engine not in (None, known):
            raise UsageError(
                f"{path}: fit has engine={engine!r}, and the devices were set up for {known} before the "
                f"program's first line: add --engine={engine}"
            )
        folder = request.run_dir if calls == 1 else os.path.join(request.run_dir, f"fit_{calls}")
        train_on(dataclasses.replace(request, model_dir=folder), lambda: machine.plan_of(call.recipe()))
        return folder

    with gin_bindings.usage_errors():
        programs.run(path, at_fit)
    if not calls:
        raise UsageError(f"--gin_file={path}: the program ended and did not call launcher.fit")


def train_on(request: Request, make_plan: Callable[[], RunPlan]) -> None:
    """Trains, evaluates, or both, by a plan that is made once the folder is known to be free.

    Raises:
      LauncherError: as in `run`.
    """
    cluster = cluster_lib.resolve(os.environ)
    from_chief = request.restore_from_chief and cluster.num_workers > 1
    if cluster.is_chief or not from_chief:
        check_model_dir(request.run_dir)
    # What an evaluation writes stands beside what a training does, and workers other than the chief write nothing.
    writes_to = request.run_dir if cluster.is_chief and MODES[request.mode].trains else None
    with lease.held(writes_to, environ=os.environ, say=print) as held:
        stopwatch = Stopwatch(started=take_beginning())
        with gin_bindings.usage_errors():
            plan = make_plan()
            if request.restore_from_chief and plan.strategy.runtime.has_devices:
                raise UsageError(
                    f"--restore_from_chief is for {TENSORFLOW.flag}: give every worker --model_dir on a disk that all "
                    "share"
                )
            if MODES[request.mode].trains:
                check_shard(plan)
            if memory_trial.is_open(plan) and MODES[request.mode].trains:
                plan = memory_trial.decide(plan, gin_files=request.gin_file, gin_params=request.gin_param)
            _check_stopping(request, plan)
            plan.data.check()
            plan.recipe.task.check()
            _prepare_compile_cache(request, plan)
        try:
            training.run(_order(request, plan, from_chief=from_chief), plan, held, stopwatch)
        except UsageError as error:
            if plan.strategy.otherwise:
                error.args = (f"{error}; {plan.strategy.otherwise}",)
            raise


def _check_stopping(request: Request, plan: RunPlan) -> None:
    if plan.recipe.early_stopping is None or not MODES[request.mode].trains:
        return
    if request.mode == "train" or not plan.data.num_eval_examples:
        why = "--mode=train does not evaluate" if request.mode == "train" else "the data has no evaluation examples"
        raise UsageError(f"train.early_stopping needs evaluations, and {why}: give evaluations, or bind it to None")


def _prepare_compile_cache(request: Request, plan: RunPlan) -> None:
    if not isinstance(request, TrainRequest) or request.compile_cache is None or plan.strategy.runtime.uses_jax:
        return
    if not plan.jit_compile:
        on_tpu = plan.strategy.accelerator == "tpu"
        why = "a TPU's programs are not kept" if on_tpu else "train.jit_compile is False, so that XLA compiles nothing"
        raise UsageError(f"--compile_cache={request.compile_cache}: {why}; leave the flag out")
    compile_cache.prepare(request.compile_cache)


def _order(request: Request, plan: RunPlan, *, from_chief: bool) -> Order:
    """Order that the flags give for the run; those of `TrainRequest` are None in other modes."""
    recipe, profile_steps = plan.recipe, getattr(request, "profile_steps", None)

    def save_model(model: keras.Model, store: CheckpointStore) -> str:
        which, averaged = recipe.checkpoints.save_model, recipe.evaluate_ema
        return model_file.save(model, store, request.run_dir, which, averaged=averaged)

    return Order(
        model_dir=request.run_dir,
        recipe_files=request.gin_file,
        trains=MODES[request.mode].trains,
        evaluates=request.mode != "train",
        from_chief=from_chief,
        profiled=None if profile_steps is None else ProfiledSteps.parse(profile_steps, plan.total_steps),
        metrics_port=getattr(request, "metrics_port", None),
        next_commands=lambda: commands.after_training(request, recipe.task),
        save_model=save_model,
    )

"""What `--mode` and `--dry_run` do, from the flags on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from launcher.checkpoints import CheckpointStore, Saver
from launcher.config import gin_bindings, gin_used
from launcher.errors import EXIT_DONE, EXIT_FAILED, LauncherError, UsageError, failures
from launcher.machine import cluster as cluster_lib
from launcher.machine import gce, tpu_runtime
from launcher.machine.farewell import chief_last
from launcher.model_dir import check_model_dir, default_model_dir, lease
from launcher.precision_report import command as precision_report
from launcher.preflight import command as preflight
from launcher.preflight.chips import V5E
from launcher.preflight.slices import SLICES, Slice
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch, make_summary
from launcher.run import assets, loading, session, starting_point
from launcher.run.actions import Action, Drill, LastEvents, SampleGradients, SaveConfig, TellSupervisor
from launcher.run.controller import Controller
from launcher.run.plan import RunPlan
from launcher.run.starting_point import StartingPoint
from launcher.serving import export, predict
from launcher.step import layer_policies, wire_error
from launcher.step.moving_statistics import is_moving
from launcher.step.trainer import Trainer
from launcher.step_program import export_step, lowering
from launcher.supervised.preemption import StopRequest
from launcher.supervised.progress import Progress
from launcher.verify import verification as verify


def run(options: Any) -> int:
    """Runs the mode that the parsed flags ask for; returns the exit code."""
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    if options.mode == "verify":
        return _verify(options)
    if options.mode == "export_step":
        return _export_step(options)
    if options.mode == "preflight":
        return _preflight(options)
    if options.mode == "precision_report":
        return _precision_report(options)
    if options.dry_run:
        with gin_bindings.usage_errors():
            return _dry_run(_resolve(options, connect=False), options)
    if options.mode in ("predict", "export"):
        return _serve(options)
    model_dir = options.model_dir or default_model_dir(options.gin_file)
    cluster = cluster_lib.resolve(os.environ)
    if cluster.is_chief or not _is_handed_over(options, cluster):
        check_model_dir(model_dir)
    # What an evaluation writes stands beside what a training does, and workers other than the chief write nothing.
    writes_to = model_dir if cluster.is_chief and options.mode != "eval" else None
    with lease.held(writes_to, environ=os.environ, say=print) as held:
        return _train(options, cluster, model_dir, held)


def _is_handed_over(options: Any, cluster: cluster_lib.Cluster) -> bool:
    return options.restore_from_chief and cluster.num_workers > 1


def _resolve(options: Any, *, connect: bool = True) -> RunPlan:
    return loading.resolve(
        options.gin_file,
        options.gin_param,
        environ=os.environ,
        strategy=options.strategy,
        replicas=options.replicas,
        tpu=options.tpu,
        seed=options.seed,
        deterministic=options.deterministic,
        connect=connect,
    )


def _train(options: Any, cluster: cluster_lib.Cluster, model_dir: str, held: lease.Lease) -> int:
    stopwatch = Stopwatch()
    handed_over = _is_handed_over(options, cluster)
    with gin_bindings.usage_errors():
        resolved = _resolve(options)
        resolved.data.check()
        if check_task := getattr(resolved.recipe.task, "check", None):
            check_task()
    reporter = Reporter(model_dir=model_dir, total_steps=resolved.total_steps, is_chief=cluster.is_chief)
    with chief_last(cluster), _summarised(options.mode, resolved, reporter, stopwatch, held) as standing:
        with gin_bindings.usage_errors():
            built = session.build(resolved)
        recipe = resolved.recipe
        store = CheckpointStore(
            os.path.join(model_dir, "checkpoints"),
            keep=recipe.keep_checkpoints,
            keep_every_hours=recipe.keep_checkpoint_every_hours,
            is_chief=cluster.is_chief,
            run={"seed": resolved.seed, "global_batch_size": recipe.global_batch_size},
            scaling=built.trainer.scaling,
            before_write=held.verify,
        )
        with stopwatch.phase("checkpoint"):
            restore = starting_point.restore_from_chief if handed_over else starting_point.restore
            start = restore(store, built.trainer, same_order=options.mode != "eval")
        if start.step is not None and (cluster.is_chief or not handed_over):
            assets.check(model_dir, recipe.task)
        if options.mode == "eval" and start.step is None:
            raise UsageError(f"--mode=eval: no checkpoint in {model_dir}; train first, or name another --model_dir")
        standing.start, standing.trainer = start, built.trainer
        _run_session(options.mode, built, store, standing, reporter, model_dir, stopwatch, held)
    return EXIT_DONE


def _serve(options: Any) -> int:
    if options.strategy is None and not options.tpu:
        options.strategy = "one_device"
    model_dir = options.model_dir or default_model_dir(options.gin_file)
    with gin_bindings.usage_errors():
        resolved = _resolve(options)
        if options.mode == "predict":
            predict.run(resolved, model_dir, input_path=options.input, output_path=options.output)
        else:
            export_dir = options.export_dir or os.path.join(model_dir, "export")
            step = export.run(resolved, model_dir, export_dir=export_dir)
            print(f"exported step {step} of {model_dir} to {export_dir}")
    return EXIT_DONE


def _export_step(options: Any) -> int:
    for flag in ("strategy", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=export_step makes a program for any devices; leave it out, "
                "and say how many replicas it has with --replicas"
            )
    num_replicas = options.replicas or 1
    options.strategy, options.replicas = "one_device", None
    model_dir = options.model_dir or default_model_dir(options.gin_file)
    with gin_bindings.usage_errors():
        resolved = _resolve(options, connect=False)
        if options.dry_run:
            return _dry_run(lowering.for_replicas(resolved, num_replicas), options)
        export_dir = options.export_dir or os.path.join(model_dir, "export_step")
        done = export_step.run(resolved, model_dir=model_dir, export_dir=export_dir, num_replicas=num_replicas)
    print(f"exported the step after step {done.step} for {done.num_replicas} replicas to {export_dir}")
    if done.no_batches is not None:
        print(f"without a batch: {done.no_batches}")
    print(f"run it with JAX: python {os.path.join(export_dir, 'run.py')} --steps 10")
    return EXIT_DONE


def _preflight(options: Any) -> int:
    for flag in ("strategy", "replicas", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=preflight compiles for the slices that --tpu_type names, "
                "whatever this machine has; leave it out"
            )
    with gin_bindings.usage_errors():
        return preflight.run(preflight.request(options), dry_run=options.dry_run)


def _verify(options: Any) -> int:
    for flag in ("strategy", "replicas", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=verify compares topologies of its own; bind them, such as "
                "--gin_param='verify.replicas = (2, 4)'"
            )
    model_dir = check_model_dir(options.model_dir or default_model_dir(options.gin_file))
    writes_to = None if options.dry_run else model_dir
    with lease.held(writes_to, environ=os.environ, say=print), gin_bindings.usage_errors():
        return verify.run(
            gin_files=options.gin_file,
            gin_params=options.gin_param,
            seed=options.seed,
            deterministic=options.deterministic,
            model_dir=model_dir,
            dry_run=options.dry_run,
        )


def _precision_report(options: Any) -> int:
    for flag in ("strategy", "tpu"):
        if getattr(options, flag) is not None:
            raise UsageError(
                f"--{flag}={getattr(options, flag)}: --mode=precision_report runs on this machine; leave it out, and "
                "say on how many replicas with --replicas"
            )
    with gin_bindings.usage_errors():
        return precision_report.run(
            gin_files=options.gin_file,
            gin_params=options.gin_param,
            replicas=options.replicas,
            seed=options.seed,
            model_dir=options.model_dir or default_model_dir(options.gin_file),
            dry_run=options.dry_run,
        )


def _dry_run(resolved: RunPlan, options: Any) -> int:
    model = session.build_model(resolved)
    session.check_normalization(model, resolved)
    session.build_optimizer(resolved)
    gin_used.check_all_used(traced=False)
    if resolved.strategy.is_absent:
        where = _slice_for(resolved, model, options.replicas)
        pod = lowering.for_replicas(resolved, where.num_replicas)
        lines = describe(pod, model, session.forward_assigns(pod, model))
        lines["shown for"] = where.describe()
        lines["preflight"] = f"whether it fits there, and how fast it can be: {preflight.command_line(options, where)}"
    else:
        lines = describe(resolved, model, session.forward_assigns(resolved, model))
    try:
        resolved.data.check()
    except UsageError as error:
        lines["data"] += f"; NOT PREPARED: {error}"
    reporter = Reporter(model_dir="", total_steps=resolved.total_steps, is_chief=resolved.cluster.is_chief)
    reporter.plan(lines)
    return EXIT_DONE


def _slice_for(resolved: RunPlan, model: keras.Model, replicas: int | None) -> Slice:
    """The largest TPU v5e slice, of so many replicas if they are given, among which the batch can be divided."""
    slices = [where for where in SLICES.values() if where.chip is V5E and replicas in (None, where.num_replicas)]
    for where in sorted(slices, key=lambda where: -where.num_replicas):
        try:
            session.check_normalization(model, lowering.for_replicas(resolved, where.num_replicas))
        except UsageError:
            continue
        return where
    raise UsageError(f"--replicas={replicas}: no slice of TPU v5e has so many; leave it out to plan for the largest")


def describe(
    resolved: RunPlan, model: keras.Model, assigned: Sequence[keras.Variable], unused: Collection[int] = ()
) -> dict[str, str]:
    """The plan with what only the built model can tell.

    Args:
      resolved: the plan.
      model: built.
      assigned: what a forward pass assigns besides trained weights.
      unused: positions of the trained variables that the loss does not depend on, as far as is known.
    """
    sizes = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    lines = resolved.describe()
    lines["parameters"] = f"{sum(sizes):,} trained of {model.count_params():,} in {model.name}"
    if overrides := layer_policies.in_effect(model, resolved.recipe.precision_overrides):
        lines["layer policies"] = layer_policies.describe(overrides)
    moving = [math.prod(variable.shape) for variable in assigned if is_moving(variable)]
    sent = [size for index, size in enumerate(sizes) if index not in unused]
    lines["wire"] = wire_error.describe(sent, resolved.wire_dtype.name, moving, resolved.strategy.num_replicas)
    task_notes = getattr(resolved.recipe.task, "notes", None)
    more = task_notes(model, resolved.strategy.accelerator) if task_notes is not None else ()
    for number, note in enumerate((*resolved.notes, *more), start=1):
        lines[f"note {number}"] = note
    return lines


@dataclasses.dataclass
class _Standing:
    """How far a run has come, for its summary.

    Attributes:
      start: what it goes on from; None until the folder is known to be this run's.
      trainer: None until then, too.
      last_events: its last measurements.
    """

    start: StartingPoint | None = None
    trainer: Trainer | None = None
    last_events: LastEvents = dataclasses.field(default_factory=LastEvents)

    def read(self, lost_devices: bool) -> tuple[int, float | None]:
        """Steps done and the loss scale; without devices to ask, what they said last."""
        if self.start is None or self.trainer is None:
            return 0, None
        if not lost_devices:
            return self.trainer.step, self.trainer.loss_scale
        return self.trainer.last_seen or (self.start.step or 0, None)


@contextlib.contextmanager
def _summarised(
    mode: str, resolved: RunPlan, reporter: Reporter, stopwatch: Stopwatch, held: lease.Lease
) -> Iterator[_Standing]:
    """Writes how the run inside ends to summary.json, whatever ends it.

    All but a user's mistake that shows before the run has found its place in the folder, which may be another run's.
    Nothing is written where another run has taken the folder over.
    """
    standing = _Standing()
    exit_code, error_text, lost_devices, is_ours = EXIT_FAILED, None, False, True
    try:
        yield standing
        exit_code = EXIT_DONE
    except BaseException as error:
        told = failures.explained(error)
        exit_code = failures.exit_code(told)
        error_text = str(told) if isinstance(told, LauncherError) else f"{type(error).__name__}: {error}"
        # What a host that is gone held cannot be asked for, and to ask may mean to wait without end.
        lost_devices = failures.is_peer_failure(error)
        is_ours = standing.start is not None or not isinstance(told, UsageError)
        raise
    finally:
        if mode == "eval" or not is_ours or held.ask():
            # Summary and report tell of the training, which may even be going on beside an evaluation.
            reporter.close()
        else:
            step, loss_scale = standing.read(lost_devices)
            summary = make_summary(
                exit_code=exit_code,
                error=error_text,
                metrics={"train": standing.last_events.train, "eval": standing.last_events.evaluation},
                step=step,
                strategy=resolved.strategy.kind,
                num_replicas=resolved.strategy.num_replicas,
                policy=resolved.policy,
                loss_scale=loss_scale,
                seconds=stopwatch.seconds(),
            )
            reporter.finish(summary)


def _run_session(
    mode: str,
    built: session.Session,
    store: CheckpointStore,
    standing: _Standing,
    reporter: Reporter,
    model_dir: str,
    stopwatch: Stopwatch,
    held: lease.Lease,
) -> None:
    resolved, start = built.plan, standing.start or StartingPoint()
    is_chief = resolved.cluster.is_chief
    stop = StopRequest()
    actions: list[Action] = [TellSupervisor(Progress(os.environ)), Drill(), standing.last_events]
    if is_chief:
        actions.append(SaveConfig(model_dir, reporter.note))
    if mode != "eval" and (watch := session.watch(built)) is not None:
        actions.append(SampleGradients(watch, reporter))
    controller = Controller(
        built,
        saver=Saver(
            store,
            asynchronous=resolved.recipe.asynchronous_checkpoints,
            on_error=resolved.recipe.on_checkpoint_error,
            warn=reporter.note,
            best=start.best,
            may_write=held.check,
        ),
        reporter=reporter,
        stopwatch=stopwatch,
        evaluate=mode != "train",
        actions=actions,
        stop_requested=stop,
    )
    with gin_bindings.usage_errors():
        if mode != "eval":
            with layer_policies.explained(resolved.recipe.precision_overrides):
                controller.prepare()
        # After the step is traced: a task may call configurables of its own in loss().
        gin_used.check_all_used(traced=mode != "eval")
    held.verify()
    if is_chief:
        _make_model_dir(model_dir)
        assets.save(model_dir, resolved.recipe.task)
    trainer = built.trainer
    lines = describe(resolved, built.model, trainer.statistics, trainer.replica_step.unused)
    reporter.plan({**lines, **tpu_runtime.describe(built.strategy)})
    if mode != "eval":
        # What an attempt that died had logged past its last checkpoint is about to happen again.
        reporter.truncate_after(-1 if start.step is None else start.step)
    if start.step is not None:
        reporter.note(f"restored step {start.step} from {model_dir}")
    for note in (*start.notes, *trainer.notes) if mode != "eval" else ():
        reporter.note(note)
    stopwatch.end_startup()
    if mode == "eval":
        controller.evaluate()
    else:
        with stop.installed():
            gce.watch(os.environ, stop.notice)
            controller.train()


def _make_model_dir(model_dir: str) -> None:
    try:
        tf.io.gfile.makedirs(model_dir)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--model_dir={model_dir} cannot be made: {error}; choose another --model_dir") from None

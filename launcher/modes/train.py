"""`--mode=train`, `eval` and `train_and_eval`: one run, from the flags to the controller's loop and the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import tensorflow as tf

from launcher.checkpoints import CheckpointStore, Saver
from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, EXIT_FAILED, LauncherError, UsageError, failures
from launcher.machine import cluster as cluster_lib
from launcher.machine import gce, tpu_runtime
from launcher.machine.farewell import chief_last
from launcher.model_dir import check_model_dir, lease
from launcher.modes import MODES, Request
from launcher.modes.plan import describe, resolve
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch, make_summary
from launcher.run import assets, session, starting_point
from launcher.run.controller import Controller, Outcome
from launcher.run.plan import RunPlan
from launcher.run.starting_point import StartingPoint
from launcher.step import layer_policies
from launcher.step.trainer import Trainer
from launcher.supervised.preemption import StopRequest
from launcher.supervised.progress import Progress


def run(request: Request) -> int:
    """Trains, evaluates, or both, as the mode says.

    Raises:
      LauncherError: the flags, the recipe or the machine are wrong, or the run failed or was preempted.
    """
    cluster = cluster_lib.resolve(os.environ)
    if cluster.is_chief or not _is_handed_over(request, cluster):
        check_model_dir(request.run_dir)
    # What an evaluation writes stands beside what a training does, and workers other than the chief write nothing.
    writes_to = request.run_dir if cluster.is_chief and MODES[request.mode].trains else None
    with lease.held(writes_to, environ=os.environ, say=print) as held:
        stopwatch = Stopwatch()
        with gin_bindings.usage_errors():
            plan = resolve(request)
            plan.data.check()
            if check_task := getattr(plan.recipe.task, "check", None):
                check_task()
        reporter = Reporter(model_dir=request.run_dir, total_steps=plan.total_steps, is_chief=cluster.is_chief)
        this = _Run(request=request, plan=plan, held=held, reporter=reporter, stopwatch=stopwatch)
        with chief_last(cluster), _summarised(this) as standing:
            _run(this, standing)
    return EXIT_DONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """What the parts of one run share."""

    request: Request
    plan: RunPlan
    held: lease.Lease
    reporter: Reporter
    stopwatch: Stopwatch

    @property
    def trains(self) -> bool:
        return MODES[self.request.mode].trains

    @property
    def model_dir(self) -> str:
        return self.request.run_dir

    @property
    def is_chief(self) -> bool:
        return self.plan.cluster.is_chief


@dataclasses.dataclass
class _Standing:
    """How far a run has come, for its summary.

    Attributes:
      start: what it goes on from; None until the folder is known to be this run's.
      trainer: None until then, too.
      outcome: its last measurements.
    """

    start: StartingPoint | None = None
    trainer: Trainer | None = None
    outcome: Outcome = dataclasses.field(default_factory=Outcome)

    def read(self, lost_devices: bool) -> tuple[int, float | None]:
        """Steps done and the loss scale; without devices to ask, what they said last."""
        if self.start is None or self.trainer is None:
            return 0, None
        if not lost_devices:
            return self.trainer.step, self.trainer.loss_scale
        return self.trainer.last_seen or (self.start.step or 0, None)


def _run(this: _Run, standing: _Standing) -> None:
    with gin_bindings.usage_errors():
        built = session.build(this.plan)
    store = _store(this, built)
    start = _restore(this, built, store)
    standing.start, standing.trainer = start, built.trainer
    stop = StopRequest()
    controller = _controller(this, built, store, start, stop)
    standing.outcome = controller.outcome
    with gin_bindings.usage_errors():
        if this.trains:
            with layer_policies.explained(this.plan.recipe.precision_overrides):
                controller.prepare()
        # After the step is traced: a task may call configurables of its own in loss().
        gin_bindings.check_all_used(traced=this.trains)
    this.held.verify()
    if this.is_chief:
        _make_model_dir(this.model_dir)
        assets.save(this.model_dir, this.plan.recipe.task)
    _announce(this, built, start)
    this.stopwatch.end_startup()
    if not this.trains:
        controller.evaluate()
        return
    with stop.installed():
        gce.watch(os.environ, stop.notice)
        controller.train()


def _store(this: _Run, built: session.Session) -> CheckpointStore:
    recipe = this.plan.recipe
    return CheckpointStore(
        os.path.join(this.model_dir, "checkpoints"),
        keep=recipe.keep_checkpoints,
        keep_every_hours=recipe.keep_checkpoint_every_hours,
        is_chief=this.is_chief,
        run={"seed": this.plan.seed, "global_batch_size": recipe.global_batch_size},
        scaling=built.trainer.scaling,
        before_write=this.held.verify,
    )


def _restore(this: _Run, built: session.Session, store: CheckpointStore) -> StartingPoint:
    handed_over = _is_handed_over(this.request, this.plan.cluster)
    with this.stopwatch.phase("checkpoint"):
        restore = starting_point.restore_from_chief if handed_over else starting_point.restore
        start = restore(store, built.trainer, same_order=this.trains)
    if start.step is not None and (this.is_chief or not handed_over):
        assets.check(this.model_dir, this.plan.recipe.task)
    if start.step is None and not this.trains:
        raise UsageError(f"--mode=eval: no checkpoint in {this.model_dir}; train first, or name another --model_dir")
    return start


def _is_handed_over(request: Request, cluster: cluster_lib.Cluster) -> bool:
    return request.restore_from_chief and cluster.num_workers > 1


def _controller(
    this: _Run, built: session.Session, store: CheckpointStore, start: StartingPoint, stop: StopRequest
) -> Controller:
    recipe, reporter = this.plan.recipe, this.reporter
    return Controller(
        trainer=built.trainer,
        evaluator=built.evaluator,
        data=this.plan.data,
        saver=Saver(
            store,
            asynchronous=recipe.asynchronous_checkpoints,
            on_error=recipe.on_checkpoint_error,
            warn=reporter.note,
            best=start.best,
            may_write=this.held.check,
        ),
        reporter=reporter,
        stopwatch=this.stopwatch,
        recipe=recipe,
        total_steps=this.plan.total_steps,
        evaluate=this.request.mode != "train",
        progress=Progress(os.environ),
        watch=session.watch(built) if this.trains else None,
        stop_requested=stop,
        after_first_step=lambda: _save_operative_config(this) if this.is_chief else None,
    )


def _announce(this: _Run, built: session.Session, start: StartingPoint) -> None:
    """Shows the plan, and what the run goes on from."""
    trainer, reporter = built.trainer, this.reporter
    lines = describe(this.plan, built.model, trainer.statistics, trainer.replica_step.unused)
    reporter.plan({**lines, **tpu_runtime.describe(built.strategy)})
    if this.trains:
        # What an attempt that died had logged past its last checkpoint is about to happen again.
        reporter.truncate_after(-1 if start.step is None else start.step)
    if start.step is not None:
        reporter.note(f"restored step {start.step} from {this.model_dir}")
    for note in (*start.notes, *trainer.notes) if this.trains else ():
        reporter.note(note)


@contextlib.contextmanager
def _summarised(this: _Run) -> Iterator[_Standing]:
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
        if not this.trains or not is_ours or this.held.ask():
            # Summary and report tell of the training, which may even be going on beside an evaluation.
            this.reporter.close()
        else:
            step, loss_scale = standing.read(lost_devices)
            summary = make_summary(
                exit_code=exit_code,
                error=error_text,
                metrics={"train": standing.outcome.train, "eval": standing.outcome.evaluation},
                step=step,
                strategy=this.plan.strategy.kind,
                num_replicas=this.plan.strategy.num_replicas,
                policy=this.plan.policy,
                loss_scale=loss_scale,
                seconds=this.stopwatch.seconds(),
            )
            this.reporter.finish(summary)


def _save_operative_config(this: _Run) -> None:
    try:
        gin_bindings.save_operative(os.path.join(this.model_dir, "config.gin"))
    except OSError as error:
        this.reporter.note(
            f"Could not write config.gin in {this.model_dir}: {error.strerror or error}. Training goes on without."
        )


def _make_model_dir(model_dir: str) -> None:
    try:
        tf.io.gfile.makedirs(model_dir)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--model_dir={model_dir} cannot be made: {error}; choose another --model_dir") from None

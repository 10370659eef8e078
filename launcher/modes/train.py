"""`--mode=train`, `eval` and `train_and_eval`: one run, from the flags to the controller's loop and the summary."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from launcher.checkpoints import DATA, CheckpointStore, Saver
from launcher.config import gin_bindings, gin_used
from launcher.data import pipeline
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, LauncherError, TrainingError, UsageError, failures
from launcher.machine import accelerators, compile_cache, farewell, gce, tpu_runtime
from launcher.machine import cluster as cluster_lib
from launcher.machine.farewell import chief_last
from launcher.model_dir import check_model_dir, lease
from launcher.modes import MODES, Request, TrainRequest, commands
from launcher.modes.plan import describe, make_machine, record, resolve
from launcher.reporting import attempts
from launcher.reporting.attempts import AttemptsFile
from launcher.reporting.reporter import Reporter
from launcher.reporting.sinks import Sink
from launcher.reporting.summary import Stopwatch, make_summary, take_beginning
from launcher.reporting.trackers import Prometheus
from launcher.run import assets, loading, memory_trial, programs, session, start_weights, starting_point
from launcher.run.actions import (
    Action,
    DrillFault,
    LastEvents,
    MeasureFlops,
    RecordAttempt,
    SampleGradients,
    SaveConfig,
    SealCompileCache,
    TellSupervisor,
)
from launcher.run.controller import Controller
from launcher.run.early_stopping import StopEarly
from launcher.run.input_faults import check_checkpoints, damage_named, input_was_there
from launcher.run.keras_callbacks import KerasCallbacks
from launcher.run.plan import RunPlan
from launcher.run.profile import ProfiledSteps, ProfileSteps
from launcher.run.programs import FitCall
from launcher.run.session import Session
from launcher.run.spikes import Rewind, SpikeWatch
from launcher.run.starting_point import StartingPoint
from launcher.run.worker_times import WorkerTimes
from launcher.serving import model_file
from launcher.step import layer_policies
from launcher.step.trainer import Trainer
from launcher.supervised import progress
from launcher.supervised.preemption import StopRequest
from launcher.supervised.progress import Progress

_SUMMARY_SECONDS = 3.0  # at most, of a process that is about to end whatever its main thread does


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
        loading.load_bindings_of_program(gin_files, request.gin_param)
        machine = make_machine(request)
        machine.set_up()
    calls = 0

    def at_fit(call: FitCall) -> str:
        nonlocal calls
        calls += 1
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
    if cluster.is_chief or not _is_handed_over(request, cluster):
        check_model_dir(request.run_dir)
    # What an evaluation writes stands beside what a training does, and workers other than the chief write nothing.
    writes_to = request.run_dir if cluster.is_chief and MODES[request.mode].trains else None
    with lease.held(writes_to, environ=os.environ, say=print) as held:
        stopwatch = Stopwatch(started=take_beginning())
        with gin_bindings.usage_errors():
            plan = make_plan()
            if memory_trial.is_open(plan) and MODES[request.mode].trains:
                plan = memory_trial.decide(plan, gin_files=request.gin_file, gin_params=request.gin_param)
            _check_stopping(request, plan)
            plan.data.check()
            plan.recipe.task.check()
            _prepare_compile_cache(request, plan)
        this = _Run(request, plan, held, stopwatch)
        with this.summarised(), input_was_there(request.run_dir):
            this.build_and_run()


def _check_stopping(request: Request, plan: RunPlan) -> None:
    if plan.recipe.early_stopping is None or not MODES[request.mode].trains:
        return
    if request.mode == "train" or not plan.data.num_eval_examples:
        why = "--mode=train does not evaluate" if request.mode == "train" else "the data has no evaluation examples"
        raise UsageError(f"train.early_stopping judges evaluations, and {why}: give evaluations, or bind it to None")


def _prepare_compile_cache(request: Request, plan: RunPlan) -> None:
    if not isinstance(request, TrainRequest) or request.compile_cache is None:
        return
    if not plan.jit_compile:
        on_tpu = plan.strategy.accelerator == "tpu"
        why = "a TPU's programs are not kept" if on_tpu else "train.jit_compile is False, so that XLA compiles nothing"
        raise UsageError(f"--compile_cache={request.compile_cache}: {why}; leave the flag out")
    compile_cache.prepare(request.compile_cache)


def _is_handed_over(request: Request, cluster: cluster_lib.Cluster) -> bool:
    return request.restore_from_chief and cluster.num_workers > 1


class _Run:
    """One training or evaluation, from its plan to its summary."""

    def __init__(self, request: Request, plan: RunPlan, held: lease.Lease, stopwatch: Stopwatch):
        self._request, self._plan, self._held, self._stopwatch = request, plan, held, stopwatch
        self._model_dir = request.run_dir
        self._trains = MODES[request.mode].trains
        self._is_chief = plan.cluster.is_chief
        self._reporter = Reporter(
            model_dir=request.run_dir,
            total_steps=plan.total_steps,
            is_chief=self._is_chief,
            sinks=self._sinks(),
            config=gin_used.operative_config,
        )
        # How far it has come, for its summary; both are None until the folder is known to be this run's.
        self._start: StartingPoint | None = None
        self._data: dict[str, Any] = {}  # what checkpoints record of the training data
        self._trainer: Trainer | None = None
        self._controller: Controller | None = None
        self._saver: Saver | None = None
        self._last_events = LastEvents()
        self._profile = self._make_profile()
        self._times: WorkerTimes | None = None
        self._spikes: SpikeWatch | None = None
        self._attempt = AttemptsFile(request.run_dir, os.environ, stopwatch.seconds)

    def _make_profile(self) -> ProfileSteps | None:
        wanted = self._request.profile_steps if isinstance(self._request, TrainRequest) else None
        if wanted is None:
            return None
        folder = os.path.join(self._model_dir, "tensorboard") if self._is_chief else None
        return ProfileSteps(ProfiledSteps.parse(wanted, self._plan.total_steps), folder, self._reporter.note)

    def _sinks(self) -> Sequence[Sink]:
        if not self._is_chief or not self._trains:
            return ()
        port = getattr(self._request, "metrics_port", None)
        return [*self._plan.recipe.sinks, *([Prometheus(port)] if port is not None else [])]

    def build_and_run(self) -> None:
        """Builds the session, restores it, and trains or evaluates."""
        with gin_bindings.usage_errors(), self._reporter.waiting("building the model"):
            built = session.build(self._plan)
            self._data = pipeline.described(self._plan.data) if self._trains else {}
        store = self._store(built)
        start = self._restore(built, store)
        self._start, self._trainer = start, built.trainer
        tell = Progress(os.environ)
        stop = StopRequest(self._leave, tell.stopping)
        lasting = [TellSupervisor(tell), *self._lasting_actions(built)]
        controller = self._make_controller(built, store, start, stop, lasting)
        with gin_bindings.usage_errors():
            if self._trains:
                with layer_policies.explained(self._plan.recipe.precision_overrides):
                    controller.prepare()
            # After the step is traced: a task may call configurables of its own in loss().
            gin_used.check_all_used(traced=self._trains)
        self._held.verify()
        if self._is_chief:
            _make_model_dir(self._model_dir)
            assets.save(self._model_dir, self._plan.recipe.task)
            start_weights.write_listing(self._model_dir, start.listing)
        if self._is_chief and self._trains:
            self._attempt.begin(built.trainer.step)
        self._announce(built, start)
        self._stopwatch.end_startup()
        with damage_named(self._plan, built.trainer):
            if not self._trains:
                controller.evaluate()
                return
            with stop.installed():
                gce.watch(os.environ, stop.notice)
                while (rewind := _train(controller)) is not None:
                    start = self._go_back(built, store, rewind)
                    controller = self._make_controller(built, store, start, stop, lasting)
                    controller.prepare()
        self._save_model(built, store)

    def _leave(self, seconds: float) -> str | None:
        """As `Controller.leave`, of all workers: the chief first, which TensorFlow may end as soon as one is gone."""
        assert self._controller is not None
        why = self._controller.leave(seconds)
        if why is not None and self._controller.has_trained:
            farewell.await_chief(self._plan.cluster)
            summarising = threading.Thread(target=self._summarise, args=(EXIT_PREEMPTED, why, True), daemon=True)
            summarising.start()
            summarising.join(_SUMMARY_SECONDS)
        return why

    def _go_back(self, built: Session, store: CheckpointStore, rewind: Rewind) -> StartingPoint:
        """Restores an earlier checkpoint, from which the run goes on as it would from a new attempt."""
        trainer, record = built.trainer, rewind.record
        if self._is_chief:
            self._attempt.end(trainer.step, f"step {record['step']}: {record['what']}")
            if store.go_back(rewind.before, rewind.checkpoints, record) is None:
                raise TrainingError(
                    f"step {record['step']}: {record['what']}, and there is no checkpoint before step {rewind.before} "
                    "to go back to: bind train.checkpoint_every, or more Checkpoints.keep"
                )
        # The others see the folder as the chief has left it.
        trainer.workers.any(False)
        trainer.left_out = trainer.left_out.with_ranges([record["left_out"]])
        self._start = start = self._restore(built, store)
        if self._is_chief:
            self._attempt.begin_again(trainer.step)
        first, last = record["left_out"]
        self._reporter.truncate_after(trainer.step, evaluated=not start.evaluation_due)
        self._reporter.spike({**record, "step": trainer.step, "spike_step": record["step"]})
        self._reporter.note(
            f"step {record['step']}: {record['what']}; gone back to step {start.step}, and from there the batches "
            f"{first} to {last} are left out"
        )
        return start

    def _save_model(self, built: Session, store: CheckpointStore) -> None:
        recipe = self._plan.recipe
        if not self._is_chief or recipe.checkpoints.save_model == "none":
            return
        with self._stopwatch.phase("checkpoint"):
            which, averaged = recipe.checkpoints.save_model, recipe.evaluate_ema
            note = model_file.save(built.model, store, self._model_dir, which, averaged=averaged)
        self._reporter.note(note)

    def _store(self, built: Session) -> CheckpointStore:
        recipe = self._plan.recipe
        return CheckpointStore(
            os.path.join(self._model_dir, "checkpoints"),
            keep=recipe.checkpoints.keep,
            keep_every_hours=recipe.checkpoints.keep_every_hours,
            is_chief=self._is_chief,
            run={"seed": self._plan.seed, "global_batch_size": recipe.global_batch_size, DATA: self._data},
            scaling=built.trainer.state.scaling,
            before_write=self._held.verify,
        )

    def _restore(self, built: Session, store: CheckpointStore) -> StartingPoint:
        handed_over = _is_handed_over(self._request, self._plan.cluster)
        with self._stopwatch.phase("checkpoint"):
            restore = starting_point.restore_from_chief if handed_over else starting_point.restore
            recipe, trains = self._plan.recipe, self._trains
            start = restore(store, built.trainer, same_order=trains, start_from=recipe.start if trains else None)
            if trains:
                may_change = recipe.checkpoints.on_changed_data == "continue"
                notes = starting_point.check_data(start, self._data, built.trainer, may_change=may_change)
                start = dataclasses.replace(start, notes=(*start.notes, *notes))
        if self._is_chief or not handed_over:
            if start.step is not None:
                assets.check(self._model_dir, recipe.task)
            elif trains:
                check_checkpoints(self._model_dir)
        if start.step is None and not self._trains:
            raise UsageError(
                f"--mode=eval: no checkpoint in {self._model_dir}; train first, or name another --model_dir"
            )
        return start

    def _lasting_actions(self, built: Session) -> list[Action]:
        """Those that go on where the run goes back to an earlier checkpoint."""
        actions: list[Action] = [DrillFault(), self._last_events]
        if self._is_chief:
            actions.append(SaveConfig(self._model_dir, self._reporter.note))
            if self._trains:
                actions.append(RecordAttempt(self._attempt))
            if self._trains and self._plan.strategy.accelerator != "tpu":  # whose graph holds one replica for all
                actions.append(MeasureFlops(built.trainer, _peak_flops(self._plan)))
        if self._trains and (watch := session.watch(built)) is not None:
            actions.append(SampleGradients(watch, self._reporter))
        if self._profile is not None:
            actions.append(self._profile)
        if isinstance(self._request, TrainRequest) and self._request.compile_cache is not None:
            actions.append(SealCompileCache(self._request.compile_cache))
        if self._trains and built.trainer.own_seconds is not None and self._plan.cluster.num_workers > 1:
            cluster = self._plan.cluster
            self._times = WorkerTimes(
                built.trainer, worker=cluster.index, num_workers=cluster.num_workers, note=self._reporter.note
            )
            actions.append(self._times)
        return actions

    def _restored_actions(self, built: Session, start: StartingPoint) -> list[Action]:
        """Those whose state is in checkpoints."""
        recipe, actions = self._plan.recipe, list[Action]()
        if not self._trains:
            return []
        if (callbacks := KerasCallbacks.of(built, start, is_chief=self._is_chief)) is not None:
            actions.append(callbacks)
        if recipe.spikes is not None:
            self._spikes = SpikeWatch(
                recipe.spikes,
                built.trainer,
                rewinds=start.rewinds,
                note=self._reporter.note,
                report=self._reporter.spike,
                state=start.host,
            )
            actions.append(self._spikes)
        if recipe.early_stopping is not None:
            actions.append(
                StopEarly(
                    recipe.early_stopping,
                    metric=recipe.best_metric,
                    total_steps=self._plan.total_steps,
                    state=start.host,
                )
            )
        return actions

    def _make_controller(
        self, built: Session, store: CheckpointStore, start: StartingPoint, stop: StopRequest, lasting: Sequence[Action]
    ) -> Controller:
        recipe = self._plan.recipe
        self._saver = Saver(
            store,
            asynchronous=recipe.checkpoints.asynchronous,
            on_error=recipe.checkpoints.on_error,
            warn=self._reporter.note,
            best=start.best,
            may_write=self._held.check,
            saved=self._attempt.saved,
        )
        self._controller = Controller(
            built,
            saver=self._saver,
            reporter=self._reporter,
            stopwatch=self._stopwatch,
            evaluate=self._request.mode != "train",
            actions=[*lasting, *self._restored_actions(built, start)],
            stop_requested=stop,
            evaluation_due=start.evaluation_due,
        )
        return self._controller

    def _announce(self, built: Session, start: StartingPoint) -> None:
        """Shows the plan, and what the run goes on from."""
        trainer, reporter = built.trainer, self._reporter
        lines = describe(self._plan, built.model, trainer.statistics, trainer.replica_step.unused, built.notes)
        recipe = {"recipe": ", ".join(self._request.gin_file)} if self._request.gin_file else {}
        lines = {**recipe, **lines, **tpu_runtime.describe(built.strategy), "results": self._model_dir}
        reporter.plan(lines, again=progress.is_restarted(os.environ))
        if self._trains:
            started = time.time() - self._stopwatch.seconds()["total"]
            reporter.begin(record(self._plan, self._request, lines, started))
            # What an attempt that died had logged past its last checkpoint is about to happen again.
            reporter.truncate_after(-1 if start.step is None else start.step, evaluated=not start.evaluation_due)
        if start.step is not None:
            reporter.note(f"restored step {start.step} from {self._model_dir}")
        for note in (*start.notes, *trainer.notes) if self._trains else ():
            reporter.note(note)

    @contextlib.contextmanager
    def summarised(self) -> Iterator[None]:
        """Writes how the run inside ends to summary.json, whatever ends it.

        All but a user's mistake that shows before the run has found its place in the folder, which may be another
        run's. Nothing is written where another run has taken the folder over.
        """
        exit_code, error_text, lost_devices, is_ours = EXIT_FAILED, None, False, True
        try:
            yield
            exit_code = EXIT_DONE
        except BaseException as error:
            told = failures.explained(error)
            exit_code = failures.exit_code(told)
            error_text = str(told) if isinstance(told, LauncherError) else f"{type(error).__name__}: {error}"
            # What a host that is gone held cannot be asked for, and to ask may mean to wait without end.
            lost_devices = failures.is_peer_failure(error)
            is_ours = self._start is not None or not isinstance(told, UsageError)
            raise
        finally:
            if self._profile is not None:
                self._profile.close()
            if not self._trains or not is_ours or self._held.ask():
                # Summary and report tell of the training, which may even be going on beside an evaluation.
                self._reporter.close()
            else:
                self._summarise(exit_code, error_text, lost_devices)

    def _summarise(self, exit_code: int, error_text: str | None, lost_devices: bool) -> None:
        step, loss_scale = self._progress(lost_devices)
        measured: dict[str, Any] = {}
        if self._is_chief and self._start is not None:
            self._attempt.end(step, attempts.ended_by(exit_code, error_text))
            measured |= attempts.reckon(self._model_dir)
        measured |= self._times.summary() if self._times else {}
        measured |= self._spikes.summary() if self._spikes else {}
        if self._controller is not None and (why := self._controller.ended_early):
            measured["ended_early"] = why
        summary = make_summary(
            exit_code=exit_code,
            error=error_text,
            metrics={"train": self._last_events.train, "eval": self._last_events.evaluation},
            step=step,
            strategy=self._plan.strategy.kind,
            num_replicas=self._plan.strategy.num_replicas,
            policy=self._plan.policy,
            loss_scale=loss_scale,
            seconds=self._stopwatch.seconds(),
            measured=measured,
        )
        best = self._saver.best if self._saver is not None else None
        self._reporter.finish(
            summary,
            best=(best.metric, best.value, best.step) if best is not None else None,
            commands=commands.after_training(self._request, self._plan.recipe.task),
        )

    def _progress(self, lost_devices: bool) -> tuple[int, float | None]:
        """Steps done and the loss scale; without devices to ask, what they said last."""
        if self._start is None or self._trainer is None:
            return 0, None
        if not lost_devices:
            return self._trainer.step, self._trainer.loss_scale
        return self._trainer.last_seen or (self._start.step or 0, None)


def _train(controller: Controller) -> Rewind | None:
    """Trains to the end, or until a spike has the run go back."""
    try:
        controller.train()
    except Rewind as rewind:
        return rewind
    return None


def _peak_flops(plan: RunPlan) -> float | None:
    """16-bit FLOP/s of the device of one replica; None in float32, and where there is no number to go by."""
    gpus = tf.config.list_physical_devices("GPU")
    if plan.strategy.accelerator != "gpu" or not plan.policy.startswith("mixed") or not gpus:
        return None
    peak = accelerators.gpu_peak(str(tf.config.experimental.get_device_details(gpus[0]).get("device_name")))
    return peak.value if peak else None


def _make_model_dir(model_dir: str) -> None:
    try:
        tf.io.gfile.makedirs(model_dir)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--model_dir={model_dir} cannot be made: {error}; choose another --model_dir") from None

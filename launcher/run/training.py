"""One run: its folder held, its model built and restored, trained or evaluated, and its summary written."""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from launcher.checkpoints import DATA, PROGRAM, CheckpointStore, Saver, Writers
from launcher.config import gin_bindings, gin_used
from launcher.data import pipeline
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, LauncherError, TrainingError, UsageError, failures
from launcher.machine import accelerators, compile_cache, exit_barrier, gce, tpu
from launcher.model_dir import lease
from launcher.reporting import attempts, strict_json
from launcher.reporting.console import Silence
from launcher.reporting.panels import Epochs
from launcher.reporting.reporter import Reporter
from launcher.reporting.sinks import Sink
from launcher.reporting.summary import FILE_NAME as SUMMARY
from launcher.reporting.summary import Stopwatch, make_summary
from launcher.reporting.trackers import Prometheus, TrainJobStatus
from launcher.run import description, session
from launcher.run.actions import base, keras_callbacks
from launcher.run.actions.early_stopping import StopEarly
from launcher.run.actions.precision_watch import Watch
from launcher.run.actions.profile import ProfiledSteps, ProfileSteps
from launcher.run.actions.replay import Replay
from launcher.run.actions.spikes import Rewind, SpikeDetector
from launcher.run.actions.worker_times import WorkerTimes
from launcher.run.controller import Controller
from launcher.run.input_faults import check_checkpoints, damage_named, input_was_there
from launcher.run.plan import RunPlan
from launcher.run.start import assets, program_record, start_weights, starting_point
from launcher.run.start.starting_point import StartingPoint
from launcher.step import layer_policies
from launcher.tasks.keras_callbacks import fit_of
from launcher.worker import drill, progress
from launcher.worker.preemption import StopRequest
from launcher.worker.progress import Progress

_logger = logging.getLogger(__name__)

_SUMMARY_SECONDS = 3.0  # at most, of a process that is about to end whatever its main thread does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """An order for a run: what a command asks, besides the plan.

    Attributes:
      model_dir: the folder of the run.
      recipe_files: those that the command names.
      trains, evaluates: what it does; one of them at least.
      from_chief: whether only the chief reads checkpoints, and hands them to the other workers.
      profiled: the steps that are traced, if any.
      metrics_port: the flag of this name.
      next_commands: returns what can be done with the trained model: commands by what they are for.
      save_model: writes the trained model beside its checkpoints, for the chief, and says where.
    """

    model_dir: str
    recipe_files: Sequence[str]
    trains: bool
    evaluates: bool
    from_chief: bool
    profiled: ProfiledSteps | None
    metrics_port: int | None
    next_commands: Callable[[], Mapping[str, str]]
    save_model: Callable[[keras.Model, CheckpointStore], str]


def run(order: Order, plan: RunPlan, held: lease.Lease, stopwatch: Stopwatch) -> None:
    """Trains, evaluates, or both, and writes summary.json, whatever ends it.

    Raises:
      LauncherError: the recipe or the machine are wrong, or the run failed or was preempted.
    """
    this = _Run(order, plan, held, stopwatch)
    with this.summarised(), input_was_there(order.model_dir):
        this.train_or_evaluate()


class _Run:
    """A run from its first moment to its last, with how far it is: built, restored, under way."""

    _built: session.Session
    _store: CheckpointStore

    def __init__(self, order: Order, plan: RunPlan, held: lease.Lease, stopwatch: Stopwatch):
        self._order, self._plan, self._held, self._stopwatch = order, plan, held, stopwatch
        self._is_chief = plan.cluster.is_chief
        self._start: StartingPoint | None = None  # once the model has its state
        self._controller: Controller | None = None  # unless the run goes back to an earlier checkpoint right now
        metrics: list[Sink] = [] if order.metrics_port is None else [Prometheus(order.metrics_port)]
        metrics += [TrainJobStatus(os.environ)] if TrainJobStatus.URL in os.environ else []
        self._fit = fit = fit_of(plan.recipe.task)
        an_epoch = pipeline.steps_per_epoch(plan.data, plan.recipe.global_batch_size) if order.trains else None
        epochs = Epochs(an_epoch, fit.initial_epoch, fit.verbose) if an_epoch and plan.recipe.task.callbacks() else None
        self._reporter = Reporter(
            model_dir=order.model_dir,
            total_steps=plan.total_steps,
            is_chief=self._is_chief,
            stream=Silence() if order.trains and not fit.verbose else None,
            sinks=[*plan.recipe.sinks, *metrics] if self._is_chief and order.trains else (),
            config=gin_used.operative_config,
            epochs=epochs,
            clock=stopwatch.trained,
        )
        self._last_rows: dict[str, base.Row] = {"train": {}, "eval": {}}
        self._actions: Sequence[base.Action] = ()
        self._callbacks: keras_callbacks.KerasCallbacks | None = None
        self._change = ""  # of the program, since an earlier attempt
        self._is_over = False  # since an earlier attempt, which has written all
        self._attempt = attempts.AttemptsFile(order.model_dir, os.environ, stopwatch.seconds)

    def train_or_evaluate(self) -> None:
        """Builds the session, restores it, and trains or evaluates."""
        trains = self._order.trains
        start = self._restore_first()
        tell = Progress(os.environ)
        stop = StopRequest(self._leave, tell.stopping)
        lasting = self._lasting_actions(tell)
        controller = self._go_on(start, stop, lasting)
        if trains and controller.has_ended and self._is_told(start):
            self._is_over = True
            self._say(f"{self._change}{self._change and '; '}{controller.ending}")
            gin_used.check_all_used(traced=False)
            self._give_back()
            return
        self._say(self._change)
        with gin_bindings.usage_errors():
            if trains:
                with layer_policies.explained(self._plan.recipe.precision_overrides):
                    controller.prepare()
            # After the step is traced: a task may call configurables of its own in loss().
            gin_used.check_all_used(traced=trains)
        self._held.verify()
        self._begin(start)
        with damage_named(self._plan, self._built.trainer):
            if not trains:
                controller.evaluate()
                return
            with stop.installed():
                gce.watch(os.environ, stop.notice)
                while (rewind := controller.train()) is not None:
                    controller = self._go_on(self._go_back(rewind), stop, lasting)
                    controller.prepare()
        self._give_back()
        if self._is_chief and self._plan.recipe.checkpoints.save_model != "none":
            with self._stopwatch.phase("checkpoint"):
                note = self._order.save_model(self._built.model, self._store)
            self._reporter.note(note)

    def _give_back(self) -> None:
        """Brings what a model has learnt to its own variables, where it is the caller's."""
        if self._fit.has_model:
            self._built.runtime.state.bring_home()

    def _say(self, note: str) -> None:
        """Tells people a note, in any case where the program has changed."""
        if note and self._is_chief:
            is_shown = self._fit.verbose or not self._change
            (self._reporter.note if is_shown else _logger.warning)(note)

    def _is_told(self, start: StartingPoint) -> bool:
        """Whether the chief's folder has a summary of the run's end, to all workers alike."""
        told = strict_json.read_object(Path(self._order.model_dir, SUMMARY)) if self._is_chief else {}
        is_of_end = told.get("status") == "completed" and told.get("step") == start.step
        return self._built.trainer.workers.any(is_of_end)

    def _restore_first(self) -> StartingPoint:
        """Builds the session and gives it the state from which the run goes on."""
        order, plan, recipe = self._order, self._plan, self._plan.recipe
        with gin_bindings.usage_errors(), self._reporter.waiting("building the model"):
            self._built = built = session.build(plan)
            data = pipeline.described(plan.data) if order.trains else {}
            program = program_record.described(plan, built.trainer, order.model_dir)
        self._store = CheckpointStore(
            os.path.join(order.model_dir, "checkpoints"),
            keep=recipe.checkpoints.keep,
            keep_every_hours=recipe.checkpoints.keep_every_hours,
            is_chief=self._is_chief,
            run={"seed": plan.seed, "global_batch_size": recipe.global_batch_size, DATA: data, PROGRAM: program},
            scaling=built.trainer.state.scaling,
            before_write=self._held.verify,
        )
        of_data, state = "", dict[str, Any]()
        if order.trains:
            self._change, of_data, state = program_record.settle(
                self._store, built.trainer, order.model_dir, recipe.checkpoints, order.from_chief
            )
        start = self._restore()
        built.trainer.state.restore(state)
        return dataclasses.replace(start, notes=(*start.notes, *filter(None, [of_data])))

    def _restore(self) -> StartingPoint:
        order, recipe, trainer = self._order, self._plan.recipe, self._built.trainer
        self._controller = None
        with self._stopwatch.phase("checkpoint"):
            start = starting_point.restore(
                self._store,
                trainer,
                same_order=order.trains,
                start_from=recipe.start if order.trains else None,
                from_chief=order.from_chief,
            )
        if self._is_chief or not order.from_chief:
            if start.step is not None:
                assets.check(order.model_dir, recipe.task)
            elif order.trains:
                check_checkpoints(order.model_dir)
        if start.step is None and not order.trains:
            raise UsageError(
                f"--mode=eval: no checkpoint in {order.model_dir}; train first, or name another --model_dir"
            )
        self._start = start
        return start

    def _lasting_actions(self, tell: Progress) -> list[base.Action]:
        """Actions that go on where the run goes back to an earlier checkpoint."""
        order, plan, built, note = self._order, self._plan, self._built, self._reporter.note
        trainer, by_jax = built.trainer, plan.strategy.runtime.uses_jax
        actions: list[base.Action] = [
            base.Calls(
                begins=lambda phase, step: tell.report(phase=phase, step=step),
                before_steps=drill.between_steps,
                on_log=lambda row: self._last_rows.update(train=row),
                on_evaluation=lambda row: self._last_rows.update(eval=row),
            )
        ]
        if self._is_chief:
            actions.append(base.SaveConfig(order.model_dir, note))
        if order.trains:
            if self._is_chief:
                actions.append(base.RecordAttempt(self._attempt))
                if plan.strategy.accelerator != "tpu":  # whose graph holds one replica for all
                    actions.append(base.MeasureFlops(trainer, _peak_flops(plan)))
            if (watch := plan.recipe.precision_watch) is not None:
                look = Watch(trainer, session.float32_model(built), self._reporter).look
                actions.append(base.LookAtBatches(trainer, plan.data, watch.every, look))
            if every := plan.recipe.replay_every:
                actions.append(base.LookAtBatches(trainer, plan.data, every, Replay(trainer, plan).look))
            if trainer.own_seconds is not None and plan.cluster.num_workers > 1:
                actions.append(WorkerTimes(trainer, plan.cluster, note=note, tell=tell))
        if order.profiled is not None:
            folder = os.path.join(order.model_dir, "tensorboard") if self._is_chief else None
            actions.append(ProfileSteps(order.profiled, folder, note, by_jax=by_jax))
        if (cache := compile_cache.folder_in_use) is not None:
            # What was compiled for the step and for the evaluation, as soon as it was.
            seal = functools.partial(compile_cache.seal_new, cache)
            actions.append(base.Calls(after_first_step=seal, on_evaluation=lambda row: seal()))
        return actions

    def _restored_actions(self, start: StartingPoint) -> list[base.Action]:
        """Actions whose state is in checkpoints."""
        recipe, actions = self._plan.recipe, list[base.Action]()
        if not self._order.trains:
            return actions
        built = self._built
        if self._callbacks is None and keras_callbacks.are_wanted(built):
            self._callbacks = keras_callbacks.KerasCallbacks(built, self._reporter, is_chief=self._is_chief)
        if self._callbacks is not None:
            self._callbacks.start_from(start)
            actions.append(self._callbacks)
        if recipe.spikes is not None:
            actions.append(SpikeDetector(recipe.spikes, built.trainer, start, self._reporter))
        if recipe.early_stopping is not None:
            total_steps, metric = self._plan.total_steps, recipe.best_metric
            actions.append(StopEarly(recipe.early_stopping, metric=metric, total_steps=total_steps, state=start.host))
        return actions

    def _go_on(self, start: StartingPoint, stop: StopRequest, lasting: Sequence[base.Action]) -> Controller:
        checkpoints, cluster, trainer = self._plan.recipe.checkpoints, self._plan.cluster, self._built.trainer
        saver = Saver(
            self._store,
            asynchronous=checkpoints.asynchronous,
            on_error=checkpoints.on_error,
            warn=self._reporter.note,
            best=start.best,
            may_write=self._held.check,
            saved=self._attempt.saved,
            writers=Writers(cluster.index, cluster.num_workers, trainer.workers.any)
            if trainer.state.is_written_together
            else None,
        )
        self._actions = [*lasting, *self._restored_actions(start)]
        self._controller = Controller(
            self._built,
            start,
            saver=saver,
            reporter=self._reporter,
            stopwatch=self._stopwatch,
            evaluates=self._order.evaluates,
            actions=self._actions,
            stop_requested=stop,
        )
        return self._controller

    def _begin(self, start: StartingPoint) -> None:
        """Makes the folder this run's, and shows the plan and what the run goes on from."""
        order, reporter, built, trainer = self._order, self._reporter, self._built, self._built.trainer
        if self._is_chief:
            assets.save(order.model_dir, self._plan.recipe.task)
            start_weights.write_listing(order.model_dir, start.listing)
            if order.trains:
                self._attempt.begin(trainer.step)
        lines = {"recipe": ", ".join(order.recipe_files)} if order.recipe_files else {}
        traced = trainer.replica_step.traced
        lines |= description.describe(self._plan, built.model, trainer.statistics, traced, built.notes)
        lines |= description.decay(trainer.optimizer) if order.trains else {}
        lines |= {**tpu.describe(built.runtime.host.strategy), "results": order.model_dir}
        reporter.plan(lines, again=progress.is_restarted(os.environ) or self._fit.verbose > 1)
        if order.trains:
            started = time.time() - self._stopwatch.seconds()["total"]
            reporter.begin(description.record(self._plan, order.recipe_files, lines, started))
            # What an attempt that died had logged past its last checkpoint is about to happen again.
            reporter.truncate_after(-1 if start.step is None else start.step, evaluated=not start.evaluation_due)
        if start.step is not None:
            reporter.note(f"restored step {start.step} from {order.model_dir}")
        for note in (*start.notes, *trainer.notes) if order.trains else ():
            reporter.note(note)
        self._stopwatch.end_startup()

    def _go_back(self, rewind: Rewind) -> StartingPoint:
        """Restores an earlier checkpoint, from which the run goes on as it would from a new attempt."""
        trainer, record = self._built.trainer, rewind.record
        if self._is_chief:
            self._attempt.end(trainer.step, f"step {record['step']}: {record['what']}")
            if self._store.go_back(rewind.before, rewind.checkpoints, record) is None:
                raise TrainingError(
                    f"step {record['step']}: {record['what']}, and there is no checkpoint before step {rewind.before} "
                    "to go back to: bind train.checkpoint_every, or more Checkpoints.keep"
                )
        # The others see the folder as the chief has left it.
        trainer.workers.any(False)
        trainer.left_out = trainer.left_out.with_ranges([record["left_out"]])
        start = self._restore()
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

    def _leave(self, seconds: float) -> str | None:
        """As `Controller.leave`, for all workers: the chief first, which TensorFlow may end as soon as one is gone."""
        controller = self._controller
        if controller is None:
            return None
        why = controller.leave(seconds)
        if why is not None and controller.has_trained:
            exit_barrier.await_chief(self._plan.cluster)
            summarising = threading.Thread(target=self._summarise, args=(EXIT_PREEMPTED, why, True), daemon=True)
            summarising.start()
            summarising.join(_SUMMARY_SECONDS)
        return why

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
            base.tell(self._actions, base.Event.CLOSE)
            if not self._order.trains or not is_ours or self._is_over or self._held.ask():
                # Summary and report tell of the training, which may even be going on beside an evaluation.
                self._reporter.close()
            else:
                self._summarise(exit_code, error_text, lost_devices)

    def _summarise(self, exit_code: int, error_text: str | None, lost_devices: bool) -> None:
        step, loss_scale, best, measured = 0, None, None, dict[str, Any]()
        if self._start is not None:
            trainer = self._built.trainer
            # Without devices to ask, what they said last.
            seen = trainer.last_seen or (self._start.step or 0, None)
            step, loss_scale = seen if lost_devices else (trainer.step, trainer.loss_scale)
            if self._is_chief:
                self._attempt.end(step, attempts.ended_by(exit_code, error_text))
                measured |= attempts.reckon(self._order.model_dir)
        if (controller := self._controller) is not None:
            measured |= controller.summary()
            best = controller.saver.best
        summary = make_summary(
            exit_code=exit_code,
            error=error_text,
            metrics=self._last_rows,
            step=step,
            strategy=self._plan.strategy.kind,
            num_replicas=self._plan.strategy.num_replicas,
            policy=self._plan.policy,
            loss_scale=loss_scale,
            seconds=self._stopwatch.seconds(),
            measured=measured,
        )
        self._reporter.finish(
            summary,
            best=(best.metric, best.value, best.step) if best else None,
            commands=self._order.next_commands(),
        )


def _peak_flops(plan: RunPlan) -> float | None:
    """16-bit FLOP/s of the device of one replica; None in float32, and where there is no number to go by."""
    if plan.strategy.accelerator != "gpu" or not plan.policy.startswith("mixed"):
        return None
    card = accelerators.card_of(plan.strategy.gpu_model)
    return card.tensor_flops.value if card else None

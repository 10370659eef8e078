"""The outer loop: how many steps, when to log, evaluate and save, and when to stop."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from launcher.checkpoints import HOST, Best, Saver, array_of
from launcher.errors import Preempted, TrainingError, UsageError, advice, notebook
from launcher.machine.array_parts import Part
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch
from launcher.run.actions.base import Action, Event, Row, tell
from launcher.run.actions.early_stopping import is_better
from launcher.run.actions.spikes import Rewind, SkippedSteps
from launcher.run.input_position import InputPosition
from launcher.run.loop import Loop
from launcher.run.session import Session
from launcher.run.start.starting_point import EVALUATION_DUE, LEFT_OUT, StartingPoint
from launcher.step.diagnosis import Diagnosis
from launcher.step.trainer import StepRecords
from launcher.tasks.base import Task, folded, metric_results

# A request to stop is answered between two loops on the device. Where the main thread does not come to one, another
# thread saves after so many seconds, or leaves without: a scheduler may grant no more than thirty.
_SAVE_AFTER_SECONDS, _LEAVE_AFTER_SECONDS = 8.0, 15.0


class _Stopped(Exception):
    """A worker was asked to stop; raised in all of them between the same two loops."""


@dataclasses.dataclass
class Controller:
    """Trains to the last step, or evaluates once.

    Args:
      start: what the trainer goes on from.
      evaluates: whether to evaluate while training and at the end.
      actions: what else happens at the run's events, in this order.
      stop_requested: whether this worker has been asked to stop; looked at between two loops on the device.
    """

    session: Session
    start: StartingPoint
    _: dataclasses.KW_ONLY
    saver: Saver
    reporter: Reporter
    stopwatch: Stopwatch
    evaluates: bool = True
    actions: Sequence[Action] = ()
    stop_requested: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        plan, recipe, trainer, start = self.session.plan, self.session.plan.recipe, self.session.trainer, self.start
        self._trainer, self._evaluator = trainer, self.session.evaluator
        self._input = InputPosition(trainer, plan.data, num_workers=plan.cluster.num_workers, state=start.host)
        self._recipe, self._total_steps = recipe, plan.total_steps
        self._evaluates = self.evaluates and bool(plan.data.num_eval_examples)
        self._diagnosis = Diagnosis(trainer, plan.data)
        skipped = SkippedSteps(trainer, self._diagnosis, self.reporter.note, recipe.max_consecutive_overflows)
        self._actions = (*self.actions, skipped)
        self._evaluation_due = start.evaluation_due
        self._loop = Loop(recipe.steps_per_loop)
        self._batches: Iterator = iter(())
        self._pending: list[StepRecords] = []
        self._pending_since, self._untimed = 0.0, 0  # by the stopwatch; pending loops that have compiled
        self._saved_at = time.monotonic()
        self._has_evaluated = False
        # What changes the state that a checkpoint holds is either a loop of steps, or between two of them. `leave`
        # saves from another thread where `_held` gives that state, and nothing but an evaluation goes on.
        self._lock = threading.RLock()
        self._held: Callable[[], dict[str, np.ndarray | Part]] | None = None
        self._is_answered = False
        self.has_trained = False  # whether there is something that the checkpoints do not have

    def summary(self) -> dict[str, Any]:
        """Lines of summary.json about the actions, and "ended_early" where one has ended the run."""
        said = {name: value for answer in self._tell(Event.SUMMARY) for name, value in answer.items()}
        return {**said, "ended_early": self._ended_early} if self._ended_early else said

    def _tell(self, event: Event, *arguments: Any) -> list[Any]:
        return tell(self._actions, event, *arguments)

    @property
    def _ended_early(self) -> str:
        """Why an action has ended the run before its last step, also in an earlier attempt; "" if none has."""
        return next(filter(None, self._tell(Event.WHY_ENDED)), "")

    @property
    def has_ended(self) -> bool:
        """Whether an earlier attempt has trained all there is to train."""
        return not self._evaluation_due and (self._trainer.step >= self._total_steps or bool(self._ended_early))

    @property
    def ending(self) -> str:
        """The line to say then."""
        why = f": {self._ended_early}" if self._ended_early else ""
        return f"already trained to step {self._trainer.step} of {self._total_steps}{why}"

    def prepare(self) -> None:
        """Opens the data at the trainer's step and builds the training graph; nothing is trained or written."""
        with self._phase("compile"), self.reporter.waiting(self._input):
            self._batches = self._input.open()
        with self._phase("compile"), self.reporter.waiting("tracing the training step"):
            traced = self._trainer.trace(self._batches)
            named = self._recipe.task.result_names
            names = {"loss", *(traced if named is None else named), *self._recipe.task.evaluation_metrics}
        wanted = {"train.best_metric": self._recipe.best_metric}
        if self._recipe.early_stopping is not None and self._recipe.early_stopping.metric is not None:
            wanted["EarlyStopping.metric"] = self._recipe.early_stopping.metric
        for binding, name in wanted.items():
            if name not in names:
                raise UsageError(f"{binding} = {name!r} is not a metric of this task{advice(name, names)}")

    def train(self) -> Rewind | None:
        """Trains from the trainer's step to the last one, after `prepare`; returns when the last checkpoint is whole.

        Returns:
          Where a spike has the run go back, the way; else None.

        Raises:
          TrainingError: gradients stayed non-finite at the smallest loss scale, a spike ends the run, or every step
            was skipped.
          UsageError: the task's loss() returns means instead of sums.
          Preempted: a worker was asked to stop; all have, at the same step, which is saved.
          CheckpointWriteError: a checkpoint could not be written.
        """
        try:
            try:
                self._train()
                return None
            except Rewind as rewind:
                return rewind
            except _Stopped as stopped:
                # To free an iterator waits for its batch, which may not come, and the other workers wait for this one.
                held = [stopped, self._batches]
            self._batches = iter(())
            threading.Thread(target=held.clear, name="iterators", daemon=True).start()
            step = self._trainer.step
            if self.has_trained:
                self._save(step, {})
                self._finish_saving()
            # Where a worker is gone, TensorFlow may end the chief in the middle of its write.
            self._trainer.workers.any(True)
            again = "the same command" if notebook.shell() is None else "running the cell again"
            raise Preempted(f"asked to stop: step {step} of {self._total_steps} is saved; {again} goes on from there")
        finally:
            with self._lock:
                self._is_answered = True
            self.saver.close()

    def leave(self, seconds: float) -> str | None:
        """Answers a request to stop, `seconds` after it, in the place of a `train` that does not come to it.

        For another thread to call. Returns what to say, and the process may end now; or None: not yet.
        """
        with self._lock:
            if self._is_answered:
                return None
            again = "the same command goes on from the last checkpoint"
            if not self.has_trained:
                return f"asked to stop: nothing trained yet that is to be saved; {again}"
            if self._held is None or self._trainer.state.is_written_together:
                patience = max(_LEAVE_AFTER_SECONDS, 2 * self._loop.seconds)
                if seconds < patience:
                    return None
                self.saver.close()
                return f"asked to stop: busy for {patience:.0f} s with what cannot be saved in the middle; {again}"
            if seconds < _SAVE_AFTER_SECONDS:
                return None
            step = self._trainer.step
            self._save(step, {})
            self._finish_saving()
            return f"asked to stop in an evaluation: step {step} is saved; the same command goes on from there"

    def _train(self) -> None:
        trainer = self._trainer
        step = trainer.step
        if self._evaluation_due:
            self._tell(Event.GOES_ON)
            self._evaluate_and_save(step, again=True)
            self._evaluation_due = False
            self._finish_saving()
            if step >= self._total_steps:
                return
        if self.has_ended:
            self.reporter.note(self.ending)
            self._check_trained()
            if self._evaluates:
                self.evaluate()
            return
        if not step and any(action.goes_back for action in self._actions):
            self._save(step, {})
        with self.reporter.waiting("compiling the training step"):
            self._take(1, phase="compile")
        self._pending_since, self._untimed = self.stopwatch.trained(), 1
        self.has_trained = True
        self._diagnosis.check_weight(float(self._pending[-1].weight[-1]))
        self._tell(Event.AFTER_FIRST_STEP)
        self._act(step + 1)
        while (step := trainer.step) < self._total_steps:
            self._loop.choose(self._agree(self._loop.seconds))
            self._take(self._steps_until_next_event(step), phase="train")
            self.reporter.progress(trainer.step)
            self._act(trainer.step)
        self._finish_saving()
        self._check_trained()

    def _check_trained(self) -> None:
        if self._trainer.skipped_steps >= self._trainer.step:
            raise TrainingError(
                f"all {self._trainer.step} steps were skipped, as the notes above say, so nothing was trained: the "
                "weights are those that the run began with. Check the data for values that are not finite and for "
                "weights of 0, lower the learning rate, or train in float32"
            )

    def _agree(self, seconds: float) -> float:
        """The mean of what the last loop took on each worker; raises `_Stopped` where one of them was asked to stop."""
        stops, mean = self._trainer.workers.mean([self.stop_requested(), seconds])
        if stops:
            with self._lock:
                self._is_answered = True
            raise _Stopped
        return float(mean)

    def evaluate(self, last: bool = True) -> Row:
        """Evaluates the current weights and reports them; `last` as in `Evaluator.evaluate`."""
        acts = any(action.acts_before_evaluation for action in self._actions)
        at_home = acts or self._evaluator.needs_variables(last)
        held = self._state_to_hold(at_home and (acts or self._recipe.evaluate_ema))
        if at_home:
            self._trainer.runtime.state.bring_home()
        else:
            self._trainer.runtime.state.take()
        # The first evaluation is traced and compiled, which takes as long as it takes.
        self._begin("evaluate" if self._has_evaluated else "compile")
        averaged = self._trainer.state.averaged() if self._recipe.evaluate_ema else contextlib.nullcontext()
        with self.stopwatch.phase("evaluate"), averaged, self.reporter.waiting("evaluating"):
            self._hold(held)
            self._tell(Event.BEFORE_EVALUATION, self._trainer.step)
            told = [action for action in self._actions if action.every_evaluation_batch]
            row = {"step": self._trainer.step, **self._evaluator.evaluate(last, self._agree, told)}
            self.reporter.samples(self._trainer.step, self._evaluator.samples)
            self._hold(None)
        self.reporter.evaluation(row)
        for note in self._evaluator.notes:
            self.reporter.note(note)
        self._has_evaluated = True
        self._tell(Event.ON_EVALUATION, row)
        return row

    def _state_to_hold(self, changes: bool) -> Callable[[], dict[str, np.ndarray | Part]]:
        """A source of the state from which the evaluation that is about to change it is made again."""
        host, state = {**self._of_host(), f"{HOST}{EVALUATION_DUE}": np.ones(1, np.uint8)}, self._trainer.state
        together = state.snapshots_together and not state.is_written_together
        if not self.has_trained or not (together or changes):
            return lambda: {**state.to_write(), **host}
        weights = state.to_write()  # in the middle of the evaluation they could not be had
        return lambda: {**weights, **host}

    def _hold(self, state: Callable[[], dict[str, np.ndarray | Part]] | None) -> None:
        with self._lock:
            self._held = state

    def _begin(self, phase: str) -> None:
        self._tell(Event.BEGINS, phase, self._trainer.step)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._begin(name)
        with self.stopwatch.phase(name):
            yield

    def _take(self, num_steps: int, *, phase: str) -> None:
        if not self._pending:
            self._pending_since = self.stopwatch.trained()
        with self._phase(phase):
            self._tell(Event.BEFORE_STEPS)
            with self._loop.timed(num_steps) if phase == "train" else contextlib.nullcontext():
                records = self._trainer.train(self._batches, num_steps)
        self.stopwatch.move(float(records.input_wait_seconds.sum()), source=phase, to="input_wait")
        self._pending.append(records)
        self._tell(Event.TOOK, records)

    def _steps_until_next_event(self, step: int) -> int:
        recipe = self._recipe
        cadences = (recipe.log_every, recipe.evaluate_every if self._evaluates else 0, recipe.checkpoint_every)
        until_event = [every - step % every for every in cadences if every]
        until_event += [due for due in self._tell(Event.STEPS_UNTIL_DUE, step) if due is not None]
        return min(*until_event, self._loop.steps, self._total_steps - step)

    def _act(self, step: int) -> None:
        """Does what is due after `step` steps."""
        recipe, last = self._recipe, step >= self._total_steps
        self.saver.check()
        error = next(filter(None, self._tell(Event.ERROR, step)), None)
        left = self._total_steps - step  # steps that would be too few for a log event of their own
        if last or error or (_due(step, recipe.log_every) and left >= recipe.log_every / 2):
            self._log(step)
        if error is not None:
            raise error
        self._tell(Event.AFTER_STEPS, step, self._phase)
        if any(self._tell(Event.ENDS_AFTER, step)):
            self._total_steps = step
        self._evaluate_and_save(step)

    def _evaluate_and_save(self, step: int, again: bool = False) -> None:
        """Evaluates and saves after steps, where that is due, or `again`: the checkpoint is from the middle of it."""
        recipe, last = self._recipe, step >= self._total_steps
        row: Row = {}
        wanted = _due(step, recipe.evaluate_every) and all(self._tell(Event.WANTS_EVALUATION, step))
        if self._evaluates and (last or again or wanted):
            row = self.evaluate(last)
        if any(self._tell(Event.BEFORE_SAVING, step)):
            self._total_steps, last = step, True
        best = self._new_best(row) if row else None
        minutes = (time.monotonic() - self._saved_at) / 60
        by_clock = 0 < recipe.checkpoints.every_minutes <= minutes
        saves = best is not None or last or again or by_clock or _due(step, recipe.checkpoint_every)
        # By their own clocks workers would not save at the same step.
        if self._trainer.workers.any(saves) if self._trainer.state.snapshots_together else saves:
            self._save(step, row if best else {}, best)

    def _new_best(self, row: Row) -> Best | None:
        """The best so far, if this evaluation makes it so."""
        name, best = self._recipe.best_metric, self.saver.best
        value = float(row[name])
        if best is not None and best.metric == name and not is_better(name, value, best.value):
            return None
        return Best(step=row["step"], metric=name, value=value) if math.isfinite(value) else None

    def _save(self, step: int, metrics: Row, best: Best | None = None) -> None:
        with self._lock, self._phase("checkpoint"):
            self.reporter.flush()
            snapshot, mine = self._held or self._snapshot, self._trainer.state
            if mine.snapshots_together and not mine.is_written_together:  # also where the saver would not call it
                state = snapshot()
                snapshot = lambda: state  # noqa: E731
            self.saver.save(step, snapshot, metrics=metrics, best=best)
        self._saved_at = time.monotonic()

    def _snapshot(self) -> dict[str, np.ndarray | Part]:
        return {**self._trainer.state.to_write(), **self._of_host()}

    def _of_host(self) -> dict[str, np.ndarray]:
        state = {f"{HOST}{name}": value for held in self._tell(Event.STATE) for name, value in held.items()}
        state |= {f"{HOST}{name}": value for name, value in self._input.state().items()}
        if ranges := self._trainer.left_out.ranges:
            state[f"{HOST}{LEFT_OUT}"] = array_of(ranges)
        return state

    def _finish_saving(self) -> None:
        with self._lock, self._phase("checkpoint"):
            self.saver.finish()

    def _log(self, step: int) -> None:
        seconds, timed = self.stopwatch.trained() - self._pending_since, self._pending[self._untimed :]
        row = summarise(self._pending, self._recipe.task)
        row.update(step=step, loss_scale=self._trainer.loss_scale, skipped_steps=self._trainer.skipped_steps)
        if timed and seconds > 0:  # else it is of a first step alone, which has compiled
            examples = sum(len(records.loss) for records in timed) * self._trainer.config.global_batch_size
            waited = sum(float(records.input_wait_seconds.sum()) for records in timed)
            row.update(examples_per_second=examples / seconds, input_wait_fraction=min(1.0, waited / seconds))
        self._untimed = 0
        self._pending.clear()
        self._tell(Event.BEFORE_LOG, row)
        self.reporter.train(row)
        self._tell(Event.ON_LOG, row)


def summarise(parts: list[StepRecords], task: Task) -> Row:
    """One log event of consecutive steps: means over the examples of the steps whose loss is finite.

    Returns:
      loss and metrics (NaN when there is no such step); learning rate and gradient norm of the last step.
    """

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    finite = np.isfinite(column("loss"))
    weight = float(column("weight")[finite].sum())
    sums = {
        name: folded(name, np.concatenate([part.metrics[name] for part in parts])[finite]) for name in parts[0].metrics
    }
    loss = float(column("loss")[finite].sum())
    return {
        "loss": loss / weight if weight else math.nan,
        **metric_results(task, sums, weight),
        "learning_rate": float(column("learning_rate")[-1]),
        "gradient_norm": float(column("gradient_norm")[-1]),
    }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

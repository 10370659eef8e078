"""The outer loop: how many steps, when to log, evaluate and save, and when to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from launcher.checkpoints import Best, Saver
from launcher.data.pipeline import Data
from launcher.errors import Preempted, TrainingError, UsageError, advice
from launcher.reporting.reporter import Reporter
from launcher.reporting.summary import Stopwatch
from launcher.run.evaluator import Evaluator
from launcher.run.recipe import LOW_IS_BEST, Recipe
from launcher.step import overflow
from launcher.step.trainer import StepRecords, Trainer
from launcher.supervised import drill
from launcher.supervised.progress import Progress
from launcher.watch.precision_watch import Watch

Event = dict[str, Any]

_MOST_LOOKS = 3  # at the batches of skipped steps
_MADE_BY_THE_MODEL = (
    "its batch holds no such number, so the model or loss() made it: by an overflow, by a logarithm or root of 0 or, "
    "on a GPU and with train.jit_compile, from a label that the model has no output for"
)


@dataclasses.dataclass
class Outcome:
    """What a run has to show so far: its last log events."""

    train: Event = dataclasses.field(default_factory=dict)
    evaluation: Event = dataclasses.field(default_factory=dict)


class Controller:
    """Trains to the last step, or evaluates once.

    Args:
      trainer, evaluator: the inner loops.
      data: the task's data.
      saver: where checkpoints go.
      reporter: where events go.
      stopwatch: splits the wall time into phases.
      recipe: the cadence.
      total_steps: length of the run.
      evaluate: whether to evaluate while training and at the end.
      progress: tells a supervisor, if there is one, how far this worker is.
      watch: samples gradients while training, or None.
      stop_requested: whether this worker has been asked to stop; looked at between steps.
      after_first_step: called once, when everything has been traced and used.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        evaluator: Evaluator,
        data: Data,
        saver: Saver,
        reporter: Reporter,
        stopwatch: Stopwatch,
        recipe: Recipe,
        total_steps: int,
        evaluate: bool = True,
        progress: Progress,
        watch: Watch | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
        after_first_step: Callable[[], None] = lambda: None,
    ):
        self._trainer = trainer
        self._evaluator = evaluator
        self._data = data
        self._saver = saver
        self._reporter = reporter
        self._stopwatch = stopwatch
        self._recipe = recipe
        self._total_steps = total_steps
        self._evaluates = evaluate and bool(data.num_eval_examples)
        self._progress = progress
        self._watch = watch
        self._stop_requested = stop_requested
        self._after_first_step = after_first_step
        self._batches: Iterator = iter(())
        self._pending: list[StepRecords] = []
        self._pending_since = 0.0
        self._saved_at = time.monotonic()
        self._sampled = False
        self._looks_left = _MOST_LOOKS
        self._bad_data: str | None = None
        self.outcome = Outcome()

    def prepare(self) -> None:
        """Opens the data at the trainer's step and builds the training graph; nothing is trained or written.

        Raises:
          UsageError: the task's loss() or the recipe's best_metric is wrong.
        """
        self._progress.report(phase="compile", step=self._trainer.step)
        with self._stopwatch.phase("compile"):
            self._batches = self._trainer.batches(self._data)
            names = {"loss", *self._trainer.trace(self._batches), *self._evaluator.extra_metrics}
        if self._recipe.best_metric not in names:
            raise UsageError(
                f"train.best_metric = {self._recipe.best_metric!r} is not a metric of this task"
                f"{advice(self._recipe.best_metric, names)}"
            )

    def train(self) -> None:
        """Trains from the trainer's step to the last one, after `prepare`; returns when the last checkpoint is whole.

        Raises:
          TrainingError: gradients stayed non-finite at the smallest loss scale.
          UsageError: the task's loss() returns means instead of sums.
          Preempted: a worker was asked to stop; all have, at the same step, which is saved.
          CheckpointWriteError: a checkpoint could not be written.
        """
        try:
            self._train()
        finally:
            self._saver.close()

    def _train(self) -> None:
        trainer, total = self._trainer, self._total_steps
        step = trainer.step
        if step >= total:
            self._reporter.note(f"already trained to step {step} of {total}")
            if self._evaluates:
                self.evaluate()
            return
        self._take(1, phase="compile")
        self._trainer.check_weight(self._data, float(self._pending[-1].weight[-1]))
        self._after_first_step()
        self._act(step + 1)
        while (step := trainer.step) < total:
            if trainer.any_worker(self._stop_requested()):
                self._save(step, {})
                self._finish_saving(step)
                raise Preempted(f"asked to stop: step {step} of {total} is saved; the same command goes on from there")
            self._take(self._steps_until_next_event(step), phase="train")
            self._act(trainer.step)
        self._finish_saving(total)

    def evaluate(self, last: bool = True) -> Event:
        """Evaluates the current weights and reports them; `last` as in `Evaluator.evaluate`."""
        # The first evaluation is traced and compiled, which takes as long as it takes.
        self._progress.report(phase="evaluate" if self.outcome.evaluation else "compile", step=self._trainer.step)
        averaged = (
            self._trainer.ema.in_place_of_weights(self._trainer.strategy)
            if self._recipe.evaluate_ema
            else contextlib.nullcontext()
        )
        with self._stopwatch.phase("evaluate"), averaged:
            event = {"step": self._trainer.step, **self._evaluator.evaluate(last)}
        self._reporter.evaluation(event)
        for note in self._evaluator.notes if last else ():
            self._reporter.note(note)
        self.outcome.evaluation = event
        return event

    def _take(self, num_steps: int, *, phase: str) -> None:
        if not self._pending:
            self._pending_since = time.monotonic()
        self._progress.report(phase=phase, step=self._trainer.step)
        drill.between_steps()
        with self._stopwatch.phase(phase):
            records = self._trainer.train(self._batches, num_steps)
        self._stopwatch.move(float(records.input_wait_seconds.sum()), source=phase, to="input_wait")
        self._pending.append(records)
        self._note_skips(records)

    def _steps_until_next_event(self, step: int) -> int:
        recipe = self._recipe
        cadences = [recipe.log_every]
        if self._evaluates and recipe.evaluate_every:
            cadences.append(recipe.evaluate_every)
        if recipe.checkpoint_every:
            cadences.append(recipe.checkpoint_every)
        until_event = min(every - step % every for every in cadences)
        if self._watch is not None:
            until_event = min(until_event, self._watch.steps_until_due(step))
        return min(until_event, recipe.steps_per_loop, self._total_steps - step)

    def _act(self, step: int) -> None:
        """Does what is due after `step` steps."""
        recipe, last = self._recipe, step >= self._total_steps
        self._saver.check()
        stuck = self._trainer.skips_at_floor >= recipe.max_skips_at_floor
        if last or stuck or _due(step, recipe.log_every):
            self._log(step)
        if stuck:
            raise TrainingError(
                f"gradients were not finite for {self._trainer.skips_at_floor} consecutive steps (to step {step}) at "
                f"loss scale {self._trainer.loss_scale:g}, which cannot fall further: first in "
                f"{self._trainer.name_non_finite(self._data)}. "
                + (f"{self._bad_data}. " if self._bad_data else "")
                + "The weights are those of the last finite step. Lower the learning rate, check the data for "
                "non-finite values, or train in float32"
            )
        if self._watch is not None and self._watch.is_due(step):
            self._sample(self._watch, step)
        if self._evaluates and (last or _due(step, recipe.evaluate_every)):
            event = self.evaluate(last)
            if best := self._new_best(event):
                self._save(step, event, best)
                return
        minutes = (time.monotonic() - self._saved_at) / 60
        by_clock = recipe.checkpoint_every_minutes and minutes >= recipe.checkpoint_every_minutes
        if last or by_clock or _due(step, recipe.checkpoint_every):
            self._save(step, {})

    def _sample(self, watch: Watch, step: int) -> None:
        # The first sample is traced and compiled, which takes as long as it takes.
        self._progress.report(phase="compile" if not self._sampled else "train", step=step)
        started = time.monotonic()
        with self._stopwatch.phase("train" if self._sampled else "compile"):
            sample = watch.sample()
        self._sampled = True
        self._reporter.precision({"step": step, **sample.event}, sample.exponents)
        if self._pending:
            # What a log event calls its speed is that of the steps.
            self._pending_since += time.monotonic() - started

    def _new_best(self, event: Event) -> Best | None:
        """The best so far, if this evaluation makes it so."""
        name = self._recipe.best_metric
        found, best = Best(step=event["step"], metric=name, value=float(event[name])), self._saver.best
        if not math.isfinite(found.value):
            return None
        if best is None or best.metric != name:
            return found
        better = found.value < best.value if name in LOW_IS_BEST else found.value > best.value
        return found if better else None

    def _save(self, step: int, metrics: Event, best: Best | None = None) -> None:
        self._progress.report(phase="checkpoint", step=step)
        with self._stopwatch.phase("checkpoint"):
            self._reporter.flush()
            self._saver.save(step, self._trainer.snapshot, metrics=metrics, best=best)
        self._saved_at = time.monotonic()

    def _finish_saving(self, step: int) -> None:
        self._progress.report(phase="checkpoint", step=step)
        with self._stopwatch.phase("checkpoint"):
            self._saver.finish()

    def _log(self, step: int) -> None:
        seconds = max(time.monotonic() - self._pending_since, 1e-9)
        event = summarise(self._pending)
        examples = event.pop("steps") * self._trainer.config.global_batch_size
        waited = event.pop("input_wait_seconds")
        event.update(
            step=step,
            loss_scale=self._trainer.loss_scale,
            skipped_steps=self._trainer.skipped_steps,
            examples_per_second=examples / seconds,
            input_wait_fraction=min(1.0, waited / seconds),
        )
        self._pending.clear()
        self._reporter.train(event)
        self.outcome.train = event

    def _note_skips(self, records: StepRecords) -> None:
        paths = [variable.path for variable in self._trainer.model.trainable_variables]
        for offset in np.flatnonzero(records.finite == 0):
            step, before = records.first_step + int(offset), records.loss_scale[offset]
            last = offset + 1 == len(records.finite)
            after = self._trainer.loss_scale if last else records.loss_scale[offset + 1]
            if records.weight[offset] == 0:
                self._reporter.note(
                    f"step {step} skipped: all weights of its batch are 0, so there is nothing to learn from; the loss "
                    "scale stays as it is"
                )
                continue
            moved = [f"loss scale {before:g} -> {after:g}"] if before != after else []
            if math.isfinite(records.loss[offset]):
                what = "gradients were not finite"
                # Where the scale falls, gradients overflow now and then on good data.
                why = [] if moved else self._look_for_cause(step)
                why.append(f"not finite: {overflow.describe(paths, records.non_finite[offset])}")
            else:
                what, why = "the loss was not finite", self._look_for_cause(step, otherwise=_MADE_BY_THE_MODEL)
            self._reporter.note("; ".join([f"step {step} skipped: {what}", *moved, *why]))

    def _look_for_cause(self, step: int, otherwise: str = "") -> list[str]:
        """What is not finite in the batch of a step; only a few times a run, as that batch has to be made once more."""
        if not self._looks_left:
            return []
        self._looks_left -= 1
        found = self._trainer.non_finite_in_batch(self._data, step)
        self._bad_data = self._bad_data or found
        return [why] if (why := found or otherwise) else []


def summarise(parts: list[StepRecords]) -> Event:
    """One log event of consecutive steps: means over the examples of the steps that were not skipped.

    Returns:
      loss and metrics (NaN when every step was skipped); learning rate and gradient norm of the last step;
      `steps` and `input_wait_seconds` in total.
    """

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    finite = column("finite") > 0
    weight = column("weight")[finite].sum()

    def mean(sums: np.ndarray) -> float:
        return float(sums[finite].sum() / weight) if weight else float("nan")

    event: Event = {"loss": mean(column("loss"))}
    for name in parts[0].metrics:
        event[name] = mean(np.concatenate([part.metrics[name] for part in parts]))
    event["learning_rate"] = float(column("learning_rate")[-1])
    event["gradient_norm"] = float(column("gradient_norm")[-1])
    event["steps"] = len(finite)
    event["input_wait_seconds"] = float(column("input_wait_seconds").sum())
    return event


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

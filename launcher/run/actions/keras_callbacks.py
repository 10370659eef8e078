"""Keras callbacks in a run, told what Keras's fit would tell them, with the names and numbers that it would give.

What only writes is called on the chief, all others on every worker, where they decide the same by the same numbers.
Their state is part of a checkpoint (see `callback_state`), so that an `EarlyStopping` goes on counting after a restart.
An epoch's metrics are those of all its steps, wherever the run was interrupted.
"""

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from launcher.data.pipeline import steps_per_epoch
from launcher.errors import UsageError, user_code
from launcher.optimizers import own_settings
from launcher.reporting.reporter import Reporter
from launcher.run.actions import callback_state
from launcher.run.actions.base import Action, Phase, Row
from launcher.run.session import Session
from launcher.run.start.starting_point import StartingPoint
from launcher.run.start.value_text import text_of
from launcher.step.trainer import StepRecords
from launcher.tasks.base import folded, metric_results
from launcher.tasks.keras_callbacks import BACKUPS, TESTED, TRAINED, WRITERS, answers, fit_of, works_by_batches

OF_CALLBACK = "raised by a callback"
"""An attribute of exceptions that are the program's to handle."""
_STATE, _KIND, _FILE_BYTES = "callbacks", "kind of callback", "bytes of the file"
# What Keras's callbacks raise for wrong arguments, such as a file name with a metric that there is not.
_MISTAKES = (
    *(KeyError, ValueError, TypeError, AttributeError, ImportError),
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
)


def are_wanted(session: Session) -> bool:
    """Whether a session's task has callbacks, or its optimizer what only Keras's own loop would call."""
    optimizer = _optimizer(session.model)
    own = optimizer is not None and (optimizer.use_ema or own_settings.overridden(optimizer))
    return bool(session.plan.recipe.task.callbacks() or own)


class KerasCallbacks(Action):
    """Calls the callbacks of a session's task at a run's events; they may read and set its model and optimizer."""

    def __init__(self, session: Session, reporter: Reporter, *, is_chief: bool):
        plan = session.plan
        an_epoch = steps_per_epoch(plan.data, plan.recipe.global_batch_size)
        if an_epoch is None:
            raise UsageError("callbacks need data whose epochs are whole numbers of steps, and these have none")
        self._trainer, self._task = session.trainer, plan.recipe.task
        self._callbacks = callbacks = self._task.callbacks()
        self._here = [
            callback
            for callback in callbacks
            if is_chief or not (isinstance(callback, WRITERS) or getattr(callback, "chief_only", False))
        ]
        self._an_epoch, self._total, fit = an_epoch, plan.total_steps, fit_of(self._task)
        self._first_epoch, self._validation_freq = fit.initial_epoch, fit.validation_freq
        # A loop on the device ends where one of them has to be told, on all workers alike.
        self._every_step = any(
            works_by_batches(callback, TRAINED) and type(callback) is not keras.callbacks.ProgbarLogger
            for callback in callbacks
        )
        self._by_batches = [callback for callback in self._here if works_by_batches(callback, TRAINED)]
        self._told_every = getattr(self._trainer.model, "steps_per_execution", None) or 1
        self.every_evaluation_batch = any(works_by_batches(callback, TESTED) for callback in callbacks)
        deciding = [callback for callback in callbacks if not isinstance(callback, WRITERS)]
        self.acts_before_evaluation = any(answers(callback, "on_test_begin") for callback in deciding)
        # Without signs: an EarlyStopping turns that of its min_delta.
        self._texts = [text_of(callback).replace("=-", "=") for callback in callbacks]
        self._first = [callback_state.digests(callback) for callback in callbacks]
        self._goes_back, self._made = plan.recipe.spikes is not None, list[dict[str, Any]]()
        epochs = self._first_epoch - (-self._total // an_epoch)
        self._params = {"epochs": epochs, "steps": an_epoch, "verbose": fit.verbose}
        self._reporter, reporter.of_epoch = reporter, self.logs

    def start_from(self, start: StartingPoint) -> None:
        """Gives the callbacks the state that they had at a run's starting point, whatever they have done since."""
        for callback, made in zip(self._callbacks, self._made, strict=False):
            vars(callback).clear()
            vars(callback).update(made)
        if self._goes_back:
            self._made = [callback_state.copied(callback) for callback in self._callbacks]
        self._changed: list[set[str]] = [set() for _ in self._callbacks]
        self._begun = self._stops = self._has_ended = self._listens = self._is_not_finite = False
        self._sums: dict[str, Any] = {}
        self._evaluation: dict[str, float] = {}
        self._last_logs: dict[str, float] | None = None
        self._ender = ""
        self._restored = start.host.get(_STATE)
        for callback in self._callbacks:
            if not isinstance(callback, WRITERS):  # which may write at once
                self._present(callback)
        self._trainer.model.stop_training = False
        self._restore()

    def goes_on(self) -> None:
        self._begin(within_epoch=True)

    def before_steps(self) -> None:
        step = self._trainer.step
        self._begin(within_epoch=step % self._an_epoch > 0)
        if step % self._an_epoch == 0:
            self._sums = {}
            self._call("on_epoch_begin", self._epoch_after(step + 1), {})
        if step % self._an_epoch % self._told_every == 0:
            self._call("on_train_batch_begin", step % self._an_epoch, among=self._by_batches, logs={})

    def steps_until_due(self, step: int) -> int | None:
        within = step % self._an_epoch
        until_told = self._told_every - within % self._told_every if self._every_step else self._an_epoch
        return min(until_told, self._an_epoch - within)

    def took(self, records: StepRecords) -> None:
        finite = np.isfinite(records.loss)  # those of steps that are skipped for the loss scale, too, as in Keras
        self._is_not_finite = not finite[-1]
        parts = {" loss": records.loss, " weight": records.weight, **{f"/{k}": v for k, v in records.metrics.items()}}
        for name, values in parts.items():
            earlier = np.asarray(self._sums[name])[None] if name in self._sums else values[:0]
            self._sums[name] = folded(name[1:], np.concatenate([earlier, values[finite]]))

    def after_steps(self, step: int, phase: Phase) -> None:
        within = (step - 1) % self._an_epoch + 1
        if self._by_batches and (within % self._told_every == 0 or within == self._an_epoch):
            logs = {**self.logs(), **({"loss": float("nan")} if self._is_not_finite else {})}
            number = -(-within // self._told_every) * self._told_every - 1  # of a short execution, too, as in Keras
            self._call("on_train_batch_end", number, among=self._by_batches, logs=logs)

    def ends_after(self, step: int) -> bool:
        # Of those called after each step one may end the epoch there, as in Keras.
        if self._every_step and step % self._an_epoch:
            self._stops = self._trainer.workers.any(bool(self._trainer.model.stop_training))
        return self._stops

    def wants_evaluation(self, step: int) -> bool:
        """By validation_freq; evaluations within an epoch, and the run's last one, are another's wish."""
        frequency = self._validation_freq
        if step % self._an_epoch and not self._stops:
            return True
        number = self._epoch_after(step) + 1
        return number % frequency == 0 if isinstance(frequency, int) else number in frequency

    def before_evaluation(self, step: int) -> None:
        self._listens = self._begun and self.wants_evaluation(step)
        if self._listens:
            self._call("on_test_begin", {})

    def before_evaluation_batch(self, index: int) -> None:
        if self._listens:
            self._call("on_test_batch_begin", index, logs={})

    def after_evaluation_batch(self, index: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        if self._listens:
            self._call("on_test_batch_end", index, logs=dict(metrics()))

    def on_evaluation(self, row: Row) -> None:
        if self._listens:
            logs = {name: value for name, value in row.items() if name not in ("step", "examples")}
            logs = {name: value for name, value in logs.items() if self._is_told(f"val_{name}")}
            self._evaluation = {f"val_{name}": value for name, value in logs.items()}
            self._call("on_test_end", logs)

    def before_saving(self, step: int) -> bool:
        at_end = step % self._an_epoch == 0
        if not (at_end or self._stops or step >= self._total):
            return False
        if at_end or self._stops:
            self._last_logs = {**self.logs(), **self._evaluation}
            self._evaluation = {}
            self._reporter.epoch(step, self._last_logs)
            logs = dict(self._last_logs)  # to which callbacks add
            self._call("on_epoch_end", self._epoch_after(step), logs)
        # A callback may go by the clock: what one worker says holds for all.
        self._has_ended = self._trainer.workers.any(bool(self._trainer.model.stop_training)) or self._stops
        if self._has_ended or step >= self._total:
            optimizer = _optimizer(self._trainer.model)
            if getattr(optimizer, "built", False):  # it averages, or has a method of its own
                optimizer.finalize_variable_values(self._trainer.model.trainable_variables)
            self._call("on_train_end", self._last_logs or {})
        return self._has_ended

    def why_ended(self) -> str:
        return "a callback of Keras set stop_training, and is there as it was" if self._has_ended else ""

    def state(self) -> dict[str, np.ndarray]:
        if not self._begun:  # what callbacks hold before `on_train_begin` is no state of a training
            return {} if self._restored is None else {_STATE: self._restored}
        own = {"ended": self._has_ended, "stops": self._stops, "sums": self._sums, "first_epoch": self._first_epoch}
        records: list[dict[str, Any]] = [{**own, "last_logs": self._last_logs, "ender": self._ender}]
        for callback, first, names in zip(self._callbacks, self._first, self._changed, strict=True):
            state = callback_state.changed(callback, first, names)
            records.append({_KIND: type(callback).__name__, **_of_file(callback), **state})
        return {_STATE: callback_state.packed(records)}

    def _epoch_after(self, step: int) -> int:
        """The number, from 0, of the epoch whose step this is, counted from 1."""
        return self._first_epoch + (step - 1) // self._an_epoch

    def logs(self) -> dict[str, float]:
        """Loss and metrics of the epoch so far."""
        weight = float(self._sums.get(" weight", 0.0))
        sums = {name[1:]: value for name, value in self._sums.items() if name.startswith("/")}
        loss = float(self._sums[" loss"]) / weight if weight else float("nan")
        return {**({"loss": loss} if self._is_told("loss") else {}), **metric_results(self._task, sums, weight)}

    def _is_told(self, name: str) -> bool:
        return name not in getattr(self._task, "untold", ())  # of a step of the model's own

    def _present(self, callback: keras.callbacks.Callback) -> None:
        callback.set_model(self._trainer.model)
        callback.set_params(self._params)

    def _begin(self, within_epoch: bool) -> None:
        """Tells them that the training begins, before the first step of this process.

        In a training that goes on, they are told of it anew, and of an epoch that goes on; then they get the state
        that they had, and so does what they may have set: weights and the learning rate.
        """
        if self._begun:
            return
        self._begun = True
        before = self._trainer.state.snapshot() if self._restored is not None else {}
        for callback in self._here:
            if isinstance(callback, WRITERS):
                self._present(callback)
        # After the rows of a CSVLogger that the checkpoint knows of.
        sizes: dict[int, int] = {key: of[_FILE_BYTES] for key, of in self._records_of().items() if _FILE_BYTES in of}
        loggers = [(logger, logger.append) for logger in self._here if id(logger) in sizes]
        for logger, _ in loggers:
            logger.append = True
            if os.path.isfile(logger.filename) and os.path.getsize(logger.filename) > sizes[id(logger)]:
                os.truncate(logger.filename, sizes[id(logger)])
        # A backup would be put in the place of the checkpoint from which the run goes on.
        self._call(
            "on_train_begin", {}, among=[callback for callback in self._here if not isinstance(callback, BACKUPS)]
        )
        for logger, append in loggers:
            logger.append = append
        if self._restored is not None:
            if within_epoch:
                self._call("on_epoch_begin", self._epoch_after(max(self._trainer.step, 1)), {})
            self._restore()
            self._trainer.state.restore(before)

    def _call(
        self, name: str, *arguments: Any, among: Sequence[keras.callbacks.Callback] | None = None, **named: Any
    ) -> None:
        # They may look at the model, and change it. All workers bring it home together, whoever of them calls.
        if among is None or self._every_step:
            self._trainer.runtime.state.bring_home()
        for callback in self._here if among is None else among:
            try:
                getattr(callback, name)(*arguments, **named)
                if self._trainer.model.stop_training and not self._ender:
                    self._ender = self._texts[self._callbacks.index(callback)]
            except Exception as error:
                place = user_code.raised_at(error)
                if not isinstance(error, _MISTAKES) or place is None or place.file != __file__:  # of the user's own
                    vars(error).update({OF_CALLBACK: True})
                    raise
                why = error.args[0] if isinstance(error, KeyError) else error
                raise UsageError(f"callbacks: {type(callback).__name__}.{name}: {why}") from error

    def _records_of(self) -> dict[int, dict[str, Any]]:
        """Records of the checkpoint, by the ids of callbacks, which may have come and gone between two attempts."""
        of_kind = collections.defaultdict[str, list[dict[str, Any]]](list)
        for record in callback_state.unpacked(self._restored)[:0:-1] if self._restored is not None else ():
            of_kind[record[_KIND]].append(record)
        kinds = [(id(callback), of_kind[type(callback).__name__]) for callback in self._callbacks]
        return {callback: records.pop() for callback, records in kinds if records}

    def _restore(self) -> None:
        if self._restored is None:
            return
        written_by_0_1 = {"first_epoch": self._first_epoch, "stops": False, "last_logs": None}
        own = written_by_0_1 | callback_state.unpacked(self._restored)[0]
        if own["first_epoch"] != self._first_epoch:
            raise UsageError(
                f"fit: initial_epoch = {self._first_epoch}, and the run in this model_dir began with "
                f"{own['first_epoch']}: it goes on by itself, so leave the argument as it was, or name another folder"
            )
        self._sums, ender = own["sums"], own.get("ender")
        if not ender or ender in self._texts:  # else, what ended it is gone or another now
            self._has_ended, self._stops, self._ender = own["ended"], own["stops"], ender or ""
        self._last_logs = own["last_logs"]
        records = self._records_of()
        for callback, names in zip(self._callbacks, self._changed, strict=True):
            record = records.get(id(callback), {})
            state = {name: value for name, value in record.items() if name not in (_KIND, _FILE_BYTES)}
            names |= state.keys()
            callback_state.put(callback, state)


def _optimizer(model: keras.Model) -> Any:
    """The optimizer that a model is compiled with, if it is."""
    optimizer = getattr(model, "optimizer", None)
    return getattr(optimizer, "inner_optimizer", optimizer)


def _of_file(callback: Any) -> dict[str, int]:
    """The bytes that a CSVLogger has written to a file of this host."""
    is_open = isinstance(callback, keras.callbacks.CSVLogger) and getattr(callback, "csv_file", None) is not None
    return {_FILE_BYTES: os.path.getsize(callback.filename)} if is_open and os.path.isfile(callback.filename) else {}

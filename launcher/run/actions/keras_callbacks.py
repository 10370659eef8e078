"""Keras callbacks in a run: called on every worker, at the ends of epochs, with what Keras's fit would tell them.

Their state (numbers, text, arrays and lists of them) is part of a checkpoint, so that an `EarlyStopping` goes on
counting after a restart. An epoch's metrics are those of all its steps, wherever the run was interrupted.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from launcher.data.pipeline import steps_per_epoch
from launcher.errors import UsageError
from launcher.run.actions.base import Action, Event, Phase
from launcher.run.session import Session
from launcher.run.start.starting_point import StartingPoint
from launcher.step.trainer import StepRecords
from launcher.tasks.base import folded, metric_results
from launcher.tasks.keras_model import answers

_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
_STATE, _KIND = "callbacks", "kind of callback"


class KerasCallbacks(Action):
    """Calls callbacks of Keras at a run's events; they may read and set the trainer's model and optimizer."""

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], session: Session, start: StartingPoint, *, is_chief: bool
    ):
        plan = session.plan
        an_epoch = steps_per_epoch(plan.data, plan.recipe.global_batch_size)
        if an_epoch is None:
            raise UsageError("callbacks need data whose epochs are whole numbers of steps, and these have none")
        self._callbacks = [one for one in callbacks if is_chief or not isinstance(one, keras.callbacks.CSVLogger)]
        self._trainer, self._task = session.trainer, plan.recipe.task
        self._an_epoch, self._total = an_epoch, plan.total_steps
        self._every_step = any(answers(callback, hook) for callback in callbacks for hook in _HOOKS)
        self._begun = False
        self._sums: dict[str, Any] = {}
        self._evaluation: dict[str, float] = {}
        self._earlier = start.host.get(_STATE)
        self._has_ended = False
        for callback in self._callbacks:
            callback.set_params({"epochs": -(-self._total // an_epoch), "steps": an_epoch, "verbose": 0})
            callback.set_model(self._trainer.model)
        self._trainer.model.stop_training = False
        self._restore()

    @classmethod
    def of(cls, session: Session, start: StartingPoint, *, is_chief: bool) -> KerasCallbacks | None:
        """Those of the session's task, going on from a starting point; None if it has none."""
        found = session.plan.recipe.task.callbacks()
        return cls(found, session, start, is_chief=is_chief) if found else None

    def begins(self, phase: str, step: int) -> None:
        if phase == "evaluate":
            self._call("on_test_begin")

    def goes_on(self) -> None:
        if not self._begun:
            self._begun = True
            self._call("on_train_begin")
            self._restore()

    def before_steps(self) -> None:
        step = self._trainer.step
        self.goes_on()
        if step % self._an_epoch == 0:
            self._sums = {}
            self._call("on_epoch_begin", step // self._an_epoch)
        if self._every_step:
            self._call("on_train_batch_begin", step % self._an_epoch)

    def steps_until_due(self, step: int) -> int | None:
        return 1 if self._every_step else self._an_epoch - step % self._an_epoch

    def took(self, records: StepRecords) -> None:
        finite = records.finite > 0
        parts = {" loss": records.loss, " weight": records.weight, **{f"/{k}": v for k, v in records.metrics.items()}}
        for name, values in parts.items():
            earlier = np.asarray(self._sums[name])[None] if name in self._sums else values[:0]
            self._sums[name] = folded(name[1:], np.concatenate([earlier, values[finite]]))

    def after_steps(self, step: int, phase: Phase) -> None:
        if self._every_step:
            self._call("on_train_batch_end", (step - 1) % self._an_epoch, self._logs())

    def on_evaluation(self, event: Event) -> None:
        self._evaluation = {f"val_{name}": value for name, value in event.items() if name not in ("step", "examples")}
        self._evaluation = {k: v for k, v in self._evaluation.items() if k not in self._task.untold}
        self._call("on_test_end", {name.removeprefix("val_"): value for name, value in self._evaluation.items()})

    def before_saving(self, step: int) -> bool:
        if step % self._an_epoch and step < self._total:
            return False
        if not step % self._an_epoch:
            logs = {**self._logs(), **self._evaluation}
            self._evaluation = {}
            self._call("on_epoch_end", step // self._an_epoch - 1, logs)
        # A callback may go by the clock: what one worker says holds for all.
        self._has_ended = self._trainer.workers.any(bool(self._trainer.model.stop_training))
        if self._has_ended or step >= self._total:
            self._call("on_train_end")
        return self._has_ended

    def why_ended(self) -> str:
        return "a callback of Keras set stop_training" if self._has_ended else ""

    def state(self) -> dict[str, np.ndarray]:
        if not self._begun and self._earlier is None:
            return {}  # what callbacks hold before `on_train_begin` is no state of a training
        records: list[dict[str, Any]] = [{"ended": self._has_ended, "sums": self._sums}]
        records += [{**vars(callback), _KIND: type(callback).__name__} for callback in self._callbacks]
        return {_STATE: _packed(records)}

    def _logs(self) -> dict[str, float]:
        weight = float(self._sums.get(" weight", 0.0))
        sums = {name[1:]: value for name, value in self._sums.items() if name.startswith("/")}
        loss = float(self._sums[" loss"]) / weight if weight else float("nan")
        shown = {} if "loss" in self._task.untold else {"loss": loss}
        return {**shown, **metric_results(self._task, sums, weight)}

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, name)(*arguments)

    def _restore(self) -> None:
        if self._earlier is None:
            return
        own, *states = _unpacked(self._earlier)
        self._sums, self._has_ended = own["sums"], own["ended"]
        for callback in self._callbacks:
            # Callbacks may have come and gone between two attempts.
            state = next((one for one in states if one[_KIND] == type(callback).__name__), None)
            if state is not None:
                states = [one for one in states if one is not state]
                vars(callback).update({name: value for name, value in state.items() if name != _KIND})


def _function(module: str, name: str) -> Any:
    """A function of a module that has been imported; None if there is none."""
    return getattr(sys.modules.get(module), name, None)


def _packed(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """What of the records can be kept, as the bytes of a NumPy archive: JSON text, and the arrays that it names."""
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            arrays[str(len(arrays))] = np.asarray(value)
            return {"array": str(len(arrays) - 1), "scalar": isinstance(value, np.generic)}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {"dict": {str(key): plain(item) for key, item in value.items()}}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        # Such as the comparison that goes with a sign of min_delta.
        if inspect.isfunction(value) and _function(value.__module__, value.__qualname__) is value:
            return {"function": [value.__module__, value.__qualname__]}
        raise TypeError(type(value).__name__)

    kept: list[dict[str, Any]] = []
    for record in records:
        kept.append({})
        for name, value in record.items():
            with contextlib.suppress(TypeError):  # a model, a function, an open file: of this process
                kept[-1][name] = plain(value)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, text=np.frombuffer(json.dumps(kept).encode(), np.uint8), **arrays)
    return np.frombuffer(file.getvalue(), np.uint8)


def _unpacked(packed: np.ndarray) -> list[dict[str, Any]]:
    with np.load(io.BytesIO(packed.tobytes()), allow_pickle=False) as file:

        def value_of(plain: Any) -> Any:
            if isinstance(plain, list):
                return [value_of(item) for item in plain]
            if isinstance(plain, dict):
                if "function" in plain:
                    return _function(*plain["function"])
                if "dict" in plain:
                    return {name: value_of(item) for name, item in plain["dict"].items()}
                array = file[plain["array"]]
                return array[()] if plain["scalar"] else array
            return plain

        return [
            {name: value_of(value) for name, value in record.items()} for record in json.loads(file["text"].tobytes())
        ]

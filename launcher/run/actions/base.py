"""Actions: what a run does at its events beside training, which the Controller tells, and knows no more of."""

import contextlib
import dataclasses
import enum
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.config import gin_used
from launcher.data.pipeline import Batch, Data
from launcher.reporting import run_folder, strict_json
from launcher.reporting.attempts import AttemptsFile
from launcher.step.flops import Flops
from launcher.step.trainer import Trainer

Row = dict[str, Any]
"""A log event: what a line of metrics.jsonl has of a training or an evaluation."""
Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""`with phase("compile"):` tells all actions and the stopwatch what takes the time inside."""

COUNT_AFTER_SECONDS = 10.0  # of training


class Event(enum.Enum):
    """Events that a run tells its actions of, each by the name of the method that answers it, in this order.

    | Event | It is told | It answers |
    |---|---|---|
    | `goes_on()` | this attempt evaluates before its first step: an earlier one was stopped in the middle of that | |
    | `begins(phase, step)` | "compile", "train", "evaluate" or "checkpoint" begins after `step` steps | |
    | `steps_until_due(step)` | a loop of steps is about to be chosen | steps after which it must end; None for any |
    | `before_steps()` | the next loop of steps is about to start | |
    | `took(records)` | it has ended; the `StepRecords` of what happened in each step | |
    | `after_first_step()` | the first step of this process was taken: everything is traced and used | |
    | `error(step)` | loops have ended after `step` steps, which are logged next | why the run must not go on, or None |
    | `before_log(row)` | a row of the training is about to be reported: it may be added to | |
    | `on_log(row)` | a row of the training was reported | |
    | `after_steps(step, phase)` | what was due after `step` steps was logged; `phase` is a `Phase` | |
    | `ends_after(step)` | nothing is evaluated or saved yet after `step` | whether it is the run's last one |
    | `wants_evaluation(step)` | an evaluation is due, and the run does not end | whether it is to be made |
    | `before_evaluation(step)` | an evaluation begins after `step` steps | |
    | `before_evaluation_batch(index)` | a batch of it begins; `every_evaluation_batch` only | |
    | `after_evaluation_batch(index, metrics)` | it has ended; `metrics()` gives those of the batches so far | |
    | `on_evaluation(row)` | an evaluation was reported | |
    | `before_saving(step)` | all that is due after `step` was reported, and nothing saved yet | whether the run ends |
    | `state()` | a checkpoint is about to be written | uint8 vectors by name, for it to hold |
    | `why_ended()` | somebody asks | why this action has ended the run, also in an earlier attempt; "" if not |
    | `summary()` | summary.json is about to be written | what it says of this action, by name |
    | `close()` | the run ends, whatever ends it; its summary and report are about to be written | |
    """

    GOES_ON = "goes_on"
    BEGINS = "begins"
    STEPS_UNTIL_DUE = "steps_until_due"
    BEFORE_STEPS = "before_steps"
    TOOK = "took"
    AFTER_FIRST_STEP = "after_first_step"
    ERROR = "error"
    BEFORE_LOG = "before_log"
    ON_LOG = "on_log"
    AFTER_STEPS = "after_steps"
    ENDS_AFTER = "ends_after"
    WANTS_EVALUATION = "wants_evaluation"
    BEFORE_EVALUATION = "before_evaluation"
    BEFORE_EVALUATION_BATCH = "before_evaluation_batch"
    AFTER_EVALUATION_BATCH = "after_evaluation_batch"
    ON_EVALUATION = "on_evaluation"
    BEFORE_SAVING = "before_saving"
    STATE = "state"
    WHY_ENDED = "why_ended"
    SUMMARY = "summary"
    CLOSE = "close"


class Action:
    """An answer to a run's events beside training; a subclass has a method for each `Event` that it is about.

    Whatever it raises ends the run. All workers are told of the same events after the same steps.
    """

    goes_back = False
    """Whether this action may have the run go back to an earlier checkpoint, so that its beginning is saved, too."""
    acts_before_evaluation = False
    """Whether `before_evaluation` may change the weights, which are saved as they are before it."""
    every_evaluation_batch = False
    """Whether this action is told of the batches of evaluations, each of which is then a loop of its own."""


def tell(actions: Iterable[Action], event: Event, *arguments: Any) -> list[Any]:
    """Tells actions of an event, in their order; returns what those answer that are about it."""
    methods = [getattr(action, event.value, None) for action in actions]
    return [method(*arguments) for method in methods if method is not None]


class Calls(Action):
    """An action that is made of functions, each by the name of the event that it answers."""

    def __init__(self, **functions: Callable[..., Any]):
        vars(self).update(functions)


@dataclasses.dataclass
class RecordAttempt(Action):
    """Keeps in attempts.jsonl how far this attempt is, for the reckoning of where the time of all attempts went."""

    file: AttemptsFile
    first_step: int = 0

    def begins(self, phase: str, step: int) -> None:
        if phase == "compile":
            self.first_step = step + 1
        # From here the next attempt goes on, if this one comes to no further checkpoint.
        if phase == "checkpoint":
            self.file.at(step)

    def after_first_step(self) -> None:
        self.file.at(self.first_step)

    def on_log(self, row: Row) -> None:
        self.file.at(row["step"], often=True)

    def on_evaluation(self, row: Row) -> None:
        self.file.at(row["step"])


@dataclasses.dataclass
class MeasureFlops(Action):
    """Adds to log events the FLOP/s of the matrix products of all replicas, and the MFU where a device's peak is known.

    Of what is computed again, the FLOP/s have all, the MFU nothing. `peak`: 16-bit FLOP/s of one replica's device.
    To count them, the step may have to be traced once more: they are there once training has taken a while.
    """

    trainer: Trainer
    peak: float | None
    of_step: Flops | None = None
    due: float = math.inf

    def after_first_step(self) -> None:
        self.due = time.monotonic() + COUNT_AFTER_SECONDS

    def before_log(self, row: Row) -> None:
        if time.monotonic() > self.due:
            self.of_step, self.due = self.trainer.matrix_flops(), math.inf
        if self.of_step is None or "examples_per_second" not in row:
            return
        steps_per_second = row["examples_per_second"] / self.trainer.config.global_batch_size
        replicas = self.trainer.num_replicas
        row["flops_per_second"] = self.of_step.hardware * replicas * steps_per_second
        if self.peak is not None:
            row["mfu"] = self.of_step.model * steps_per_second / self.peak


@dataclasses.dataclass
class LookAtBatches(Action):
    """Looks at a batch after every `every`-th step, look n at that of step n.

    So these are batches that training has seen, from one stream that stays open, whatever step training is at.
    """

    trainer: Trainer
    data: Data
    every: int
    look: Callable[[int, Batch], None]  # takes the step and the batch; called by all workers
    batches: Iterator | None = None

    def steps_until_due(self, step: int) -> int:
        return self.every - step % self.every

    def after_steps(self, step: int, phase: Phase) -> None:
        if step % self.every:
            return
        # The first look is traced and compiled, which takes as long as it takes.
        with phase("compile" if self.batches is None else "train"):
            if self.batches is None:
                start = max(0, step // self.every - 1)
                self.batches = self.trainer.batches(self.data, start, runtime=self.trainer.runtime.host)
            self.look(step, next(self.batches))


@dataclasses.dataclass
class SaveConfig(Action):
    """Writes config.gin, with all that was used of it, once it has been used."""

    model_dir: str
    note: Callable[[str], None]

    def after_first_step(self) -> None:
        try:
            text = f"# What this run was configured with.\n\n{gin_used.operative_config()}"
            strict_json.replace_file(Path(self.model_dir, run_folder.CONFIG), text)
        except OSError as error:
            self.note(f"Could not write config.gin: {error.strerror or error}. Training goes on without.")

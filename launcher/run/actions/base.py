"""What a run does at its events beside training: each an `Action` that the Controller tells, and knows no more of."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from launcher.config import gin_used
from launcher.machine import compile_cache
from launcher.reporting import run_folder, strict_json
from launcher.reporting.attempts import AttemptsFile
from launcher.reporting.reporter import Reporter
from launcher.step.flops import Flops
from launcher.step.trainer import StepRecords, Trainer
from launcher.watch.precision_watch import Watch
from launcher.worker import drill
from launcher.worker.progress import Progress

Event = dict[str, Any]
Phase = Callable[[str], contextlib.AbstractContextManager[None]]
"""`with phase("compile"):` tells all actions and the stopwatch what takes the time inside."""


class Action:
    """Told of a run's events, in their order; a subclass answers those that it is about.

    Whatever it raises ends the run. All workers are told of the same events after the same steps.
    """

    goes_back = False
    """Whether this action may have the run go back to an earlier checkpoint, so that its beginning is saved, too."""
    acts_before_evaluation = False
    """Whether `before_evaluation` may change the weights, which are saved as they are before it."""
    every_evaluation_batch = False
    """Whether this action is told of the batches of evaluations, each of which is then a loop of its own."""

    def begins(self, phase: str, step: int) -> None:
        """A phase, "compile", "train", "evaluate" or "checkpoint", begins after `step` steps."""

    def before_steps(self) -> None:
        """The next loop of steps is about to start."""

    def after_first_step(self) -> None:
        """The first step of this process was taken: everything has been traced and used."""

    def steps_until_due(self, step: int) -> int | None:
        """After how many more steps a loop must end for this action; None for no loop of its own."""

    def took(self, records: StepRecords) -> None:
        """A loop of steps has ended; what happened in each of them."""

    def after_steps(self, step: int, phase: Phase) -> None:
        """A loop of steps has ended and was logged, if that was due."""

    def before_log(self, event: Event) -> None:
        """A log event of the training is about to be reported, and this action may add what it has measured."""

    def on_log(self, event: Event) -> None:
        """A log event of the training was reported."""

    def ends_after(self, step: int) -> bool:
        """Whether `step`, after which nothing has been evaluated or saved, is to be the run's last one."""
        return False

    def wants_evaluation(self, step: int) -> bool:
        """Whether the evaluation that is due after `step` is to be made, where the run does not end."""
        return True

    def before_evaluation(self, step: int) -> None:
        """An evaluation begins after `step` steps."""

    def before_evaluation_batch(self, index: int) -> None:
        """A batch of the evaluation begins; `every_evaluation_batch` only."""

    def after_evaluation_batch(self, index: int, metrics: Callable[[], Mapping[str, float]]) -> None:
        """It has ended; `metrics()` gives loss and metrics of the evaluation's batches so far."""

    def goes_on(self) -> None:
        """Before its first step this attempt evaluates, as an earlier one was stopped in the middle of that."""

    def on_evaluation(self, event: Event) -> None:
        """An evaluation was reported."""

    def before_saving(self, step: int) -> bool:
        """All that is due after `step` was reported, and nothing saved yet; whether the run is to end here."""
        return False

    def error(self, step: int) -> Exception | None:
        """Why the run must not go on after `step` steps, once these are logged; None if it may."""
        return None

    def why_ended(self) -> str:
        """Why this action has ended the run, also in an earlier attempt; "" if it has not."""
        return ""

    def state(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds of this action, uint8 vectors by name."""
        return {}

    def summary(self) -> dict[str, Any]:
        """What summary.json says of this action."""
        return {}

    def close(self) -> None:
        """The run ends, whatever ends it; its summary and report are about to be written."""


@dataclasses.dataclass
class LastEvents(Action):
    """The last log events of a run, which its summary shows."""

    train: Event = dataclasses.field(default_factory=dict)
    evaluation: Event = dataclasses.field(default_factory=dict)

    def on_log(self, event: Event) -> None:
        self.train = event

    def on_evaluation(self, event: Event) -> None:
        self.evaluation = event


class SealCompileCache(Action):
    """Has the compile cache know what was compiled for the step and for the evaluation as soon as it was."""

    def __init__(self, folder: str):
        self._folder = folder

    def after_first_step(self) -> None:
        compile_cache.seal_new(self._folder)

    def on_evaluation(self, event: Event) -> None:
        compile_cache.seal_new(self._folder)


class TellSupervisor(Action):
    """Tells a supervisor, if there is one, how far this worker is."""

    def __init__(self, progress: Progress):
        self._progress = progress

    def begins(self, phase: str, step: int) -> None:
        self._progress.report(phase=phase, step=step)


class RecordAttempt(Action):
    """Keeps in attempts.jsonl how far this attempt is, for the reckoning of where the time of all attempts went."""

    def __init__(self, file: AttemptsFile):
        self._file = file
        self._first_step = 0

    def begins(self, phase: str, step: int) -> None:
        if phase == "compile":
            self._first_step = step + 1
        # From here the next attempt goes on, if this one comes to no further checkpoint.
        if phase == "checkpoint":
            self._file.at(step)

    def after_first_step(self) -> None:
        self._file.at(self._first_step)

    def on_log(self, event: Event) -> None:
        self._file.at(event["step"], often=True)

    def on_evaluation(self, event: Event) -> None:
        self._file.at(event["step"])


class DrillFault(Action):
    """Lets a drill's fault happen between steps."""

    def before_steps(self) -> None:
        drill.between_steps()


class MeasureFlops(Action):
    """Adds to log events the FLOP/s of the matrix products of all replicas, and the MFU where a device's peak is known.

    Of what is computed again, the FLOP/s have all, the MFU nothing. `peak`: 16-bit FLOP/s of one replica's device.
    """

    def __init__(self, trainer: Trainer, peak: float | None):
        self._trainer = trainer
        self._peak = peak
        self._of_step: Flops | None = None

    def after_first_step(self) -> None:
        self._of_step = self._trainer.matrix_flops()

    def before_log(self, event: Event) -> None:
        if self._of_step is None or "examples_per_second" not in event:
            return
        steps_per_second = event["examples_per_second"] / self._trainer.config.global_batch_size
        replicas = self._trainer.num_replicas
        event["flops_per_second"] = self._of_step.hardware * replicas * steps_per_second
        if self._peak is not None:
            event["mfu"] = self._of_step.model * steps_per_second / self._peak


class SampleGradients(Action):
    """Samples gradients at the watch's cadence and reports what was seen."""

    def __init__(self, watch: Watch, reporter: Reporter):
        self._watch = watch
        self._reporter = reporter
        self._sampled = False

    def steps_until_due(self, step: int) -> int | None:
        return self._watch.steps_until_due(step)

    def after_steps(self, step: int, phase: Phase) -> None:
        if not self._watch.is_due(step):
            return
        # The first sample is traced and compiled, which takes as long as it takes.
        with phase("train" if self._sampled else "compile"):
            sample = self._watch.sample()
        self._sampled = True
        self._reporter.precision({"step": step, **sample.event}, sample.exponents)


class SaveConfig(Action):
    """Writes config.gin, with all that was used of it, once it has been used."""

    def __init__(self, model_dir: str, note: Callable[[str], None]):
        self._model_dir = model_dir
        self._note = note

    def after_first_step(self) -> None:
        try:
            text = f"# What this run was configured with.\n\n{gin_used.operative_config()}"
            strict_json.replace_file(Path(self._model_dir, run_folder.CONFIG), text)
        except OSError as error:
            self._note(f"Could not write config.gin: {error.strerror or error}. Training goes on without.")

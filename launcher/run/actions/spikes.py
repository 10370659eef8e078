"""Steps that go wrong: skipped ones, and spikes of loss or gradient norm.

A skipped step is noted with its cause, and ends the run when no step can be taken any more. A spike is noted, skipped,
the end of the run, or a way back with some batches left out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import gin
import numpy as np

from launcher.checkpoints import array_of, record_of
from launcher.config.bound_types import check_least, check_value, one_of
from launcher.errors import TrainingError
from launcher.reporting.reporter import Reporter
from launcher.run.actions.base import Action, Row
from launcher.run.start.starting_point import StartingPoint
from launcher.step import overflow
from launcher.step.diagnosis import Diagnosis
from launcher.step.trainer import StepRecords, Trainer

ACTIONS = ("note", "skip", "stop", "rewind")

_STATE = "spikes"
# The limits move so many times in a window, always after the same steps, so that a run that resumes has the same ones.
_MOVES_A_WINDOW = 10
_DEVIATIONS_OF_MAD = 1.4826  # a standard deviation, of a normal distribution
_MOST_LOOKS = 3  # at the batches of skipped steps
_MADE_BY_THE_MODEL = (
    "its batch holds no such number, so the model or loss() made it: by an overflow, by a logarithm or root of 0 or, "
    "on a GPU and with train.jit_compile, from a label that the model has no output for"
)


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Spikes:
    """A rule about steps whose loss or gradient norm is far above the last ones; `train.spikes = @Spikes()`.

    A value is a spike when it is more than a factor above the median of the last `window` steps, and more than
    `deviations` robust standard deviations (1.4826 times the median absolute deviation). Both are taken of logarithms,
    or of the values themselves where a loss is not above 0. Before there have been `window` steps nothing is a spike
    but what is not finite: a loss, or gradients that a smaller loss scale would not make finite. Every finite value
    enters the window, spikes too, so that the rule gets used to a loss that stays high.

    Attributes:
      action: "note" goes on; "skip" does not apply the update of such a step; "stop" ends the run with exit code 70;
        "rewind" goes back to an earlier checkpoint and leaves out batches around the spike, as PaLM's training did
        (Chowdhery et al. 2022, arXiv 2204.02311, section 5.1).
      loss_factor, gradient_norm_factor: how far above the median a spike is; None to leave one of them alone.
      deviations: robust standard deviations that a spike is above the median as well.
      window: steps that the median is of. A tenth of it is the longest loop of steps on the device, whatever
        `train.steps_per_loop` is.
      rewind_checkpoints: how many checkpoints to go back, of those before the first batch that is left out.
      skip_batches: how many batches are left out, that of the spike in their middle: of three, the one before and the
        one after it, too; of two, the one before.
      max_rewinds: how often a run goes back; the next spike ends it with exit code 70.
    """

    action: str = "note"
    loss_factor: float | None = 2.0
    gradient_norm_factor: float | None = 10.0
    deviations: float = 8.0
    window: int = 100
    rewind_checkpoints: int = 1
    skip_batches: int = 3
    max_rewinds: int = 3

    def __post_init__(self) -> None:
        check_value("Spikes.action", self.action, self.action in ACTIONS, one_of(ACTIONS))
        for name in ("loss_factor", "gradient_norm_factor"):
            value = getattr(self, name)
            check_value(f"Spikes.{name}", value, value is None or value > 1, "more than 1, or None to leave it alone")
        check_least("Spikes", self, deviations=0, window=10, rewind_checkpoints=1, skip_batches=1, max_rewinds=1)


class Rewind(Exception):
    """The run goes back to an earlier checkpoint.

    Attributes:
      record: of the spike: "step", "loss", "gradient_norm", "what" and "left_out", a first and a last batch.
      before: the step that the checkpoint may not have reached.
      checkpoints: how many to go back, of those before that step.
    """

    def __init__(self, record: Row, *, before: int, checkpoints: int):
        super().__init__(record["what"])
        self.record = record
        self.before = before
        self.checkpoints = checkpoints


class SpikeDetector(Action):
    """Compares every step's reduced loss and gradient norm with the last ones, so that all workers decide alike.

    `start` has the rewinds of the run so far, and the state of an earlier attempt.
    """

    def __init__(self, rule: Spikes, trainer: Trainer, start: StartingPoint, reporter: Reporter):
        self._rule, self._trainer, self._rewinds = rule, trainer, list(start.rewinds)
        self._note, self._report = reporter.note, reporter.spike
        self._moves_every = rule.window // _MOVES_A_WINDOW
        self._values = [collections.deque[float](maxlen=rule.window) for _ in range(2)]
        self._limits = [math.inf, math.inf]
        self._count = 0
        self._in_spike = False
        self._error: Exception | None = None
        self.goes_back = rule.action == "rewind"
        if _STATE in start.host:
            values, self._limits, self._count, self._in_spike = record_of(start.host[_STATE])
            for mine, values_before in zip(self._values, values, strict=True):
                mine.extend(values_before)

    def before_steps(self) -> None:
        self._trainer.limit(*self._limits)

    def steps_until_due(self, step: int) -> int:
        return self._moves_every - step % self._moves_every

    def took(self, records: StepRecords) -> None:
        for offset, weight in enumerate(records.weight):
            step = records.first_step + offset
            if weight > 0 and self._error is None:
                self._compare(step, records, offset)
            if step % self._moves_every == 0:
                self._move_limits()

    def error(self, step: int) -> Exception | None:
        return self._error

    def state(self) -> dict[str, np.ndarray]:
        return {_STATE: array_of([[*map(list, self._values)], self._limits, self._count, self._in_spike])}

    def summary(self) -> dict[str, Any]:
        """For summary.json: "spikes", how many there were on the way to the last step, and all rewinds."""
        return {"spikes": {"action": self._rule.action, "count": self._count, "rewinds": self._rewinds}}

    def _compare(self, step: int, records: StepRecords, offset: int) -> None:
        # In float32, in which a step that skips compares them, too.
        loss = float(np.float32(records.loss[offset]) / np.float32(records.weight[offset]))
        norm = float(records.gradient_norm[offset])
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if math.isfinite(loss) and not is_finite:
            before = records.loss_scale[offset]
            if scale_after(records, offset, self._trainer) != before:
                return  # an overflow, after which the scale has fallen
        above = [value > limit for value, limit in zip((loss, norm), self._limits, strict=True)]
        # What the device has skipped by the same limits in float32 counts.
        skipped = self._rule.action == "skip" and not records.finite[offset]
        was_in_spike, self._in_spike = self._in_spike, not is_finite or any(above) or skipped
        if self._in_spike:
            self._count += 1
            row = {"loss": loss, "gradient_norm": norm, "what": self._what(loss, norm), "action": self._rule.action}
            self._act(step, row, is_told=not is_finite or was_in_spike)
        if is_finite:
            for past, value in zip(self._values, (loss, norm), strict=True):
                past.append(float(value))

    def _act(self, step: int, row: Row, *, is_told: bool) -> None:
        """Does what the rule says; `is_told`: of the skipped step, or that a spike goes on, there is a note already."""
        rule, what = self._rule, row["what"]
        if rule.action == "rewind" and len(self._rewinds) < rule.max_rewinds:
            first = max(1, step - rule.skip_batches // 2)
            batch_of = self._trainer.left_out.batch_of
            left_out = [batch_of(first), batch_of(first + rule.skip_batches - 1)]
            record = {"step": step, **row, "left_out": left_out}
            self._error = Rewind(record, before=first, checkpoints=rule.rewind_checkpoints)
            return
        self._report({"step": step, **row})
        if rule.action in ("note", "skip"):
            is_skipped = rule.action == "skip" and math.isfinite(row["loss"]) and math.isfinite(row["gradient_norm"])
            if is_skipped or not is_told:
                self._note(f"step {step}{' skipped' if is_skipped else ''}: {what}")
            return
        why = (
            " (Spikes.action = 'stop'). The newest checkpoint is of a step before. The same command comes to the same "
            "step: lower the learning rate, clip gradients (Clipping.global_norm), look at the examples of that step, "
            "or bind Spikes.action = 'rewind'"
        )
        if rule.action == "rewind":
            why = (
                f", after the run has gone back {len(self._rewinds)} times (Spikes.max_rewinds = {rule.max_rewinds}) "
                f"and left out the batches {[rewind['left_out'] for rewind in self._rewinds]}. Leaving batches out did "
                "not help: lower the learning rate or clip gradients (Clipping.global_norm)"
            )
        self._error = TrainingError(f"step {step}: {what}{why}")

    def _what(self, loss: float, norm: float) -> str:
        if not math.isfinite(loss):
            return "the loss is not finite"
        if not math.isfinite(norm):
            return "gradients are not finite"
        named = zip(("loss", "gradient norm"), (loss, norm), self._limits, strict=True)
        above = [f"{name} {value:.4g} is above {limit:.4g}" for name, value, limit in named if value > limit]
        return f"spike: {' and '.join(above)}, by the last {len(self._values[0])} steps"

    def _move_limits(self) -> None:
        if len(self._values[0]) < self._rule.window:
            return
        factors = self._rule.loss_factor, self._rule.gradient_norm_factor
        self._limits = [
            math.inf if factor is None else float(np.float32(limit(np.array(past), factor, self._rule.deviations)))
            for past, factor in zip(self._values, factors, strict=True)
        ]


def limit(past: np.ndarray, factor: float, deviations: float) -> float:
    """The value above which the next one is a spike; see `Spikes`."""
    is_positive = past.min() > 0
    values = np.log(past) if is_positive else past
    median = float(np.median(values))
    spread = deviations * _DEVIATIONS_OF_MAD * float(np.median(np.abs(values - median)))
    if not is_positive:
        return median + max((factor - 1) * abs(median), spread)
    highest = median + max(math.log(factor), spread)
    return math.exp(highest) if highest < math.log(np.finfo(np.float32).max) else math.inf


@dataclasses.dataclass
class SkippedSteps(Action):
    """Says why steps were skipped. All workers call its methods together.

    At a loss scale that cannot fall further, `max_consecutive_overflows` of them in a row end the run.
    """

    trainer: Trainer
    diagnosis: Diagnosis
    note: Callable[[str], None]
    max_consecutive_overflows: int
    looks_left: int = _MOST_LOOKS
    zeros_to_tell: int = 1
    bad_data: str | None = None

    def error(self, step: int) -> TrainingError | None:
        """Ends the run when the last steps were all skipped and the next one would be."""
        trainer = self.trainer
        if trainer.skips_at_floor < self.max_consecutive_overflows:
            return None
        return TrainingError(
            f"gradients were not finite for {trainer.skips_at_floor} consecutive steps (to step {step}) at "
            f"loss scale {trainer.loss_scale:g}, which cannot fall further: first in "
            f"{self.diagnosis.non_finite_gradients()}. "
            + (f"{self.bad_data}. " if self.bad_data else "")
            + "The weights are those of the last finite step. Lower the learning rate, check the data for "
            "non-finite values, or train in float32"
        )

    def took(self, records: StepRecords) -> None:
        """Notes every skipped step among those that were just taken, and the first of the run without a gradient."""
        zero = np.flatnonzero((records.gradient_norm == 0) & (records.weight > 0))
        for offset in zero[: self.zeros_to_tell]:
            self.zeros_to_tell = 0
            self.note(
                f"step {records.first_step + offset}: all gradients are exactly 0, so the loss teaches nothing: it has "
                "nothing left to learn, units are all off, or 16 bits round a sigmoid or softmax to 0 or 1"
            )
        paths = [variable.path for variable in self.trainer.model.trainable_variables]
        for offset in np.flatnonzero(records.finite == 0):
            step, before = records.first_step + int(offset), records.loss_scale[offset]
            after = scale_after(records, int(offset), self.trainer)
            if records.weight[offset] == 0:
                self.note(f"step {step} skipped: all weights of its batch are 0; the loss scale stays as it is")
                continue
            if math.isfinite(records.gradient_norm[offset]) and math.isfinite(records.loss[offset]):
                continue  # above a limit, of which `SpikeDetector` tells
            moved = [f"loss scale {before:g} -> {after:g}"] if before != after else []
            if math.isfinite(records.loss[offset]):
                what = "gradients were not finite"
                # Where the scale falls, gradients overflow now and then on good data.
                why = [] if moved else self._look_for_cause(step)
                if not self.trainer.config.selects:
                    why.append(f"not finite: {overflow.describe(paths, records.non_finite[offset])}")
                elif self.looks_left:  # the step did not look
                    self.looks_left -= 1
                    why.append(f"not finite: {self.diagnosis.non_finite_gradients(step, before)}")
            else:
                what, why = "the loss was not finite", self._look_for_cause(step, otherwise=_MADE_BY_THE_MODEL)
            self.note("; ".join([f"step {step} skipped: {what}", *moved, *why]))

    def _look_for_cause(self, step: int, otherwise: str = "") -> list[str]:
        """Values of a step's batch that are not finite.

        Only a few times a run, as that batch has to be made once more.
        """
        if not self.looks_left:
            return []
        self.looks_left -= 1
        values = self.diagnosis.non_finite_in_batch(step)
        self.bad_data = self.bad_data or values
        return [why] if (why := values or otherwise) else []


def scale_after(records: StepRecords, offset: int, trainer: Trainer) -> float:
    """The loss scale after one of the steps that a trainer took last."""
    return trainer.loss_scale if offset + 1 == len(records.finite) else float(records.loss_scale[offset + 1])

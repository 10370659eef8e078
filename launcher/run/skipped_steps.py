"""Skipped steps: noted with their cause, and the end of the run when no step can be taken any more."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from launcher.errors import TrainingError
from launcher.run.actions import Action
from launcher.step import overflow
from launcher.step.diagnosis import Diagnosis
from launcher.step.trainer import StepRecords, Trainer

_MOST_LOOKS = 3  # at the batches of skipped steps
_MADE_BY_THE_MODEL = (
    "its batch holds no such number, so the model or loss() made it: by an overflow, by a logarithm or root of 0 or, "
    "on a GPU and with train.jit_compile, from a label that the model has no output for"
)


class SkippedSteps(Action):
    """Says why steps were skipped. All workers call its methods together.

    Args:
      trainer: which skips them.
      diagnosis: of its steps.
      most_at_floor: how many in a row may be skipped at a loss scale that cannot fall further.
      note: takes one message for people.
    """

    def __init__(self, trainer: Trainer, diagnosis: Diagnosis, *, most_at_floor: int, note: Callable[[str], None]):
        self._trainer = trainer
        self._diagnosis = diagnosis
        self._most_at_floor = most_at_floor
        self._note = note
        self._looks_left = _MOST_LOOKS
        self._bad_data: str | None = None

    def error(self, step: int) -> TrainingError | None:
        """Ends the run when the last steps were all skipped and the next one would be."""
        trainer = self._trainer
        if trainer.skips_at_floor < self._most_at_floor:
            return None
        return TrainingError(
            f"gradients were not finite for {trainer.skips_at_floor} consecutive steps (to step {step}) at "
            f"loss scale {trainer.loss_scale:g}, which cannot fall further: first in "
            f"{self._diagnosis.non_finite_gradients()}. "
            + (f"{self._bad_data}. " if self._bad_data else "")
            + "The weights are those of the last finite step. Lower the learning rate, check the data for "
            "non-finite values, or train in float32"
        )

    def took(self, records: StepRecords) -> None:
        """Notes every skipped step among those that were just taken."""
        paths = [variable.path for variable in self._trainer.model.trainable_variables]
        for offset in np.flatnonzero(records.finite == 0):
            step, before = records.first_step + int(offset), records.loss_scale[offset]
            after = scale_after(records, int(offset), self._trainer)
            if records.weight[offset] == 0:
                self._note(
                    f"step {step} skipped: all weights of its batch are 0, so there is nothing to learn from; the loss "
                    "scale stays as it is"
                )
                continue
            if math.isfinite(records.gradient_norm[offset]) and math.isfinite(records.loss[offset]):
                continue  # above a limit, of which `SpikeWatch` tells
            moved = [f"loss scale {before:g} -> {after:g}"] if before != after else []
            if math.isfinite(records.loss[offset]):
                what = "gradients were not finite"
                # Where the scale falls, gradients overflow now and then on good data.
                why = [] if moved else self._look_for_cause(step)
                if not self._trainer.config.selects:
                    why.append(f"not finite: {overflow.describe(paths, records.non_finite[offset])}")
                elif self._looks_left:  # the step did not look
                    self._looks_left -= 1
                    why.append(f"not finite: {self._diagnosis.non_finite_gradients(step, before)}")
            else:
                what, why = "the loss was not finite", self._look_for_cause(step, otherwise=_MADE_BY_THE_MODEL)
            self._note("; ".join([f"step {step} skipped: {what}", *moved, *why]))

    def _look_for_cause(self, step: int, otherwise: str = "") -> list[str]:
        """What is not finite in the batch of a step; only a few times a run, as that batch has to be made once more."""
        if not self._looks_left:
            return []
        self._looks_left -= 1
        found = self._diagnosis.non_finite_in_batch(step)
        self._bad_data = self._bad_data or found
        return [why] if (why := found or otherwise) else []


def scale_after(records: StepRecords, offset: int, trainer: Trainer) -> float:
    """The loss scale after one of the steps that a trainer took last."""
    return trainer.loss_scale if offset + 1 == len(records.finite) else float(records.loss_scale[offset + 1])

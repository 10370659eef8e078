"""Early stopping: a run ends when its evaluations no longer get better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import gin
import numpy as np

from launcher.checkpoints import array_of, record_of
from launcher.config.bound_types import check_least
from launcher.reporting.run_folder import LOW_IS_BEST
from launcher.run.actions.base import Action, Row

_STATE = "early_stopping"


def is_better(metric: str, value: float, best: float, by: float = 0.0) -> bool:
    """Whether a value of an evaluation metric is better than another by more than `by`; one that is NaN never is."""
    return value < best - by if metric in LOW_IS_BEST else value > best + by


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Ends a run that no longer gets better; `train.early_stopping = @EarlyStopping()`.

    The best checkpoint is kept in any case, and `Checkpoints.save_model = 'best'` gives its weights to model.keras.

    Attributes:
      metric: evaluation metric; best low for loss, perplexity and bits_per_byte, best high for any other; None for
        `train.best_metric`.
      patience: evaluations in a row without a better value that end the run.
      min_delta: by how much a value must be better to count.
    """

    metric: str | None = None
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        check_least("EarlyStopping", self, patience=1, min_delta=0)


class StopEarly(Action):
    """Counts evaluations without a better value; they are of reduced values, so all workers stop at the same step.

    `metric` counts where the rule names none, and `state` is of an earlier attempt, as `state` gave it.
    """

    def __init__(self, rule: EarlyStopping, *, metric: str, total_steps: int, state: Mapping[str, np.ndarray]):
        self._rule, self._total = rule, total_steps
        self._metric = rule.metric or metric
        # Of the last evaluation and of the best one; and how many there have been since that.
        self._step, self._best_step, self._best, self._worse = 0, 0, math.nan, 0
        if _STATE in state:
            found = record_of(state[_STATE])
            if found.pop("metric") == self._metric:
                self._step, self._best_step, self._best, self._worse = found.values()

    def on_evaluation(self, row: Row) -> None:
        step, value = row["step"], float(row[self._metric])
        if step <= self._step:
            return  # the same one again, of a run that had ended
        self._step = step
        is_first = math.isnan(self._best) and not math.isnan(value)
        if is_first or is_better(self._metric, value, self._best, self._rule.min_delta):
            self._best_step, self._best, self._worse = step, value, 0
        else:
            self._worse += 1

    def before_saving(self, step: int) -> bool:
        return bool(self.why_ended())

    def why_ended(self) -> str:
        if self._worse < self._rule.patience or self._step >= self._total:
            return ""
        better = f"more than {self._rule.min_delta:g} better" if self._rule.min_delta else "better"
        return (
            f"early stopping: {self._metric} was not {better} than {self._best:.4g} of step {self._best_step} in the "
            f"last {self._worse} evaluation{'s' * (self._worse > 1)}"
        )

    def state(self) -> dict[str, np.ndarray]:
        seen = {"step": self._step, "best_step": self._best_step, "best": self._best, "worse": self._worse}
        return {_STATE: array_of({"metric": self._metric, **seen})}

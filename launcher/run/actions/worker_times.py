"""Seconds a step of each worker, and the one that is slower than the others nearly always.

In a synchronous step all workers last as long as the slowest, so what counts is a worker's own time: until its batch is
there, and from then until its own gradients are, before it waits for the others in the reduction.
"""

import collections
from collections.abc import Callable
from typing import Any

import numpy as np

from launcher.machine.cluster import Cluster
from launcher.run.actions.base import Action, Row
from launcher.step.trainer import StepRecords, Trainer
from launcher.worker.progress import Progress

# By chance, one worker is often the slowest for a while, so it takes nearly all of many log events.
_WINDOWS, _SLOW_WINDOWS, _WELL_WINDOWS = 20, 18, 10
_SLOW_RATIO = 1.25
_SLOW_SECONDS = 0.001  # a step
_OWN, _INPUT = range(2)


class WorkerTimes(Action):
    """Gathers the workers' times at each log event, one small collective, and names a worker that is always slow."""

    def __init__(self, trainer: Trainer, cluster: Cluster, *, note: Callable[[str], None], tell: Progress):
        self._trainer = trainer
        self._place = {"worker": cluster.index, "num_workers": cluster.num_workers}
        self._watch, self._tell = StragglerDetector(note), tell
        self._steps, self._waited = 0, 0.0
        self._own_before = 0.0
        self._all_steps, self._totals = 0, np.zeros([cluster.num_workers, 2])

    def after_first_step(self) -> None:
        # It was compiled in, which took each worker as long as it took.
        self._steps, self._waited = 0, 0.0
        self._own_before = self._trainer.own_seconds or 0.0

    def took(self, records: StepRecords) -> None:
        self._steps += len(records.loss)
        self._waited += float(records.input_wait_seconds.sum())

    def before_log(self, row: Row) -> None:
        if not self._steps:
            return
        own = self._trainer.own_seconds or 0.0
        seconds = self._trainer.workers.gather([own - self._own_before, self._waited], **self._place)
        self._all_steps += self._steps
        self._totals += seconds
        row.update(self._watch.observe(seconds / self._steps, row["step"]))
        self._tell.straggler = self._watch.slow
        self._steps, self._waited, self._own_before = 0, 0.0, own

    def summary(self) -> dict[str, Any]:
        """For summary.json: "workers", each with its mean seconds a step, and "slow_worker", the rank or None."""
        if not self._all_steps:
            return {}
        means = self._totals / self._all_steps
        workers = [
            {"worker": rank, "own_seconds": float(row[_OWN]), "input_seconds": float(row[_INPUT])}
            for rank, row in enumerate(means)
        ]
        return {"workers": workers, "slow_worker": self._watch.slow}


class StragglerDetector:
    """Names a worker that takes a quarter longer than the median of the others in 18 of 20 log events."""

    def __init__(self, note: Callable[[str], None]):
        self._note = note
        self._slowest: collections.deque[int | None] = collections.deque(maxlen=_WINDOWS)
        self._times: collections.deque[np.ndarray] = collections.deque(maxlen=_WINDOWS)
        self.slow: int | None = None  # the worker that was named last and has not recovered

    def observe(self, times: np.ndarray, step: int) -> dict[str, float]:
        """Takes the seconds a step of one log event, [workers, (own, input)]; returns fields of that event."""
        totals = times.sum(axis=1)
        rank = int(np.argmax(totals))
        others = float(np.median(np.delete(totals, rank)))
        is_slow = totals[rank] > max(_SLOW_RATIO * others, others + _SLOW_SECONDS)
        self._slowest.append(rank if is_slow else None)
        self._times.append(times)
        if self.slow is not None and self._slowest.count(self.slow) <= _WELL_WINDOWS:
            self._note(f"worker {self.slow} is no longer slower than the others, at step {step}")
            self.slow = None
        if self.slow != rank and self._slowest.count(rank) >= _SLOW_WINDOWS:
            self.slow = rank
            self._note(self._told(rank, step))
        return {"slowest_worker": rank, "slowest_worker_ratio": float(totals[rank]) / max(others, 1e-9)}

    def _told(self, rank: int, step: int) -> str:
        means = np.mean(self._times, axis=0)
        others = np.median(np.delete(means, rank, axis=0), axis=0)
        on_input = means[rank, _INPUT] - others[_INPUT] > means[rank, _OWN] - others[_OWN]
        what = "waiting for its input" if on_input else "computing"
        needed, others_needed = 1000 * means[rank].sum(), 1000 * others.sum()
        return (
            f"worker {rank} is a straggler, to step {step}: before the gradients are added up, it needs "
            f"{needed:.1f} ms a step and the others {others_needed:.1f} ms, in {self._slowest.count(rank)} of the last "
            f"{_WINDOWS} log events; it spends the difference on {what}"
        )

"""A drill: one fault rehearsed in a real job, so that a user knows before it matters that the job survives.

The supervisor runs the job as ever and tells the drill of it, which makes the fault in the first attempt when it is
time, measures what follows, and says at the end whether all was as it should be.
"""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.jobs import first_error
from launcher.jobs.drill import files
from launcher.jobs.drill.plan import CORRUPT, FREEZE, KILL, PREEMPT, DrillPlan
from launcher.jobs.drill.report import Attempt, Fault
from launcher.jobs.job import Command, Job, Worker
from launcher.jobs.output import JobConsole
from launcher.jobs.policy import Decision
from launcher.worker import drill
from launcher.worker.progress import Report

_SIGNALS = {KILL: signal.SIGKILL, CORRUPT: signal.SIGKILL, FREEZE: signal.SIGSTOP}
_WORDS = {
    KILL: "SIGKILL to worker {}",
    FREEZE: "SIGSTOP to worker {}",
    PREEMPT: "SIGTERM to the whole job, as a scheduler sends it; afterwards it is run again",
    CORRUPT: "SIGKILL to worker {}, and damage to the newest checkpoint before the restart",
    drill.EXCEPTION: "an exception in worker {}",
    drill.STUCK: "worker {} blocks for ever between two steps, which is for the stall timeout to notice",
    drill.FLIP_BIT: "worker {} computes a wrong bit, which is for train.replay_every to notice",
    drill.DISK_FULL: "the next checkpoint of worker {} finds the disk full, once",
}


class Drill:
    """Makes one fault in a job that a supervisor runs, and keeps the times; the supervisor tells it of the attempts.

    Attributes:
      attempts: what the supervisor has seen, in order.
      fault: None before it has happened.
    """

    def __init__(self, plan: DrillPlan, job: Job, console: JobConsole):
        self._plan = plan
        self._model_dir = Path(job.model_dir)
        self._console = console
        self._known_steps = set(files.all_steps(self._model_dir))
        self._new_steps: set[int] = set()
        self._looked_at: Report | None = None
        self._struck = False
        self.attempts: list[Attempt] = []
        self.fault: Fault | None = None

    def commands(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        """Before an attempt, when nothing of the one before runs any more; returns what to start.

        Damages the checkpoint now that nothing reads it; tells the worker of the first attempt what to rehearse.
        """
        if self.attempts:
            self._after_attempt(self.attempts[-1])
        self.attempts.append(Attempt())
        if len(self.attempts) > 1 or not self._plan.in_worker:
            return commands
        told = {drill.VARIABLE: self._plan.kind}
        return tuple(command.given(told if command.rank == self._plan.worker else {}) for command in commands)

    def turn(self, workers: Sequence[Worker]) -> None:
        """Some times a second: notes how far the workers are, and makes the fault when it is time."""
        for worker in workers:
            report = worker.report
            if report is None or report.step is None:
                continue
            self._note(self.attempts[-1], report, report.step)
            if len(self.attempts) > 1 or worker.command.rank != self._plan.worker:
                continue
            if self.fault is None and self._is_time(report, report.step):
                self._strike(worker, report.step)
            elif self.fault and self._plan.in_worker and not self._struck:
                # Its last report before the fault is the nearest to it that anybody has seen.
                self._struck = report.drill_struck
                self.fault.at = max(self.fault.at, report.monotonic)

    def ended(self, decision: Decision) -> None:
        """At the end of an attempt, before the rest of it is ended: keeps who was named, and when."""
        attempt = self.attempts[-1]
        attempt.ended_at = time.monotonic()
        attempt.exit_code = decision.exit_code
        if decision.cause is not None:
            attempt.cause, attempt.what = decision.cause.rank, first_error.what_happened(decision.cause)
            if decision.cause.error:
                attempt.what += f": {decision.cause.error.type}"

    def _after_attempt(self, attempt: Attempt) -> None:
        attempt.newest_checkpoint = files.newest_step(self._model_dir)
        fault = self.fault
        if self._plan.kind == CORRUPT and fault and not fault.damaged_sha256 and attempt.newest_checkpoint is not None:
            fault.damaged_step = attempt.newest_checkpoint
            fault.damaged_sha256 = files.damage(self._model_dir, fault.damaged_step)
            self._console.note(f"drill: the checkpoint of step {fault.damaged_step} is damaged now")

    def _note(self, attempt: Attempt, report: Report, step: int) -> None:
        if attempt.first_step is None:
            attempt.first_step = report.first_step
            if self.fault and self.fault.damaged_sha256:
                # Now it has been skipped. Later, when that step is done anew, its checkpoint may be written anew.
                self.fault.kept = files.is_kept(self._model_dir, self.fault.damaged_sha256)
        attempt.furthest_step = max(attempt.furthest_step, step)
        if attempt.training_at is None and attempt.first_step is not None and step > attempt.first_step:
            attempt.training_at = report.monotonic

    def _is_time(self, report: Report, step: int) -> bool:
        if report == self._looked_at:
            return False
        self._looked_at = report
        if self._plan.step is not None and (step < self._plan.step or self._plan.kind != CORRUPT):
            return step >= self._plan.step
        self._new_steps |= set(files.all_steps(self._model_dir)) - self._known_steps
        needed = 2 if self._plan.kind == CORRUPT else 1  # one to damage, and one to go on from
        return len(self._new_steps) >= needed and report.phase == "train" and step >= max(self._new_steps)

    def _strike(self, worker: Worker, step: int) -> None:
        self._console.note(f"drill: now, at step {step}: {_WORDS[self._plan.kind].format(worker.command.rank)}")
        self.fault = Fault(at=time.monotonic(), step=step)
        if self._plan.kind == PREEMPT:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            worker.send(_SIGNALS.get(self._plan.kind, signal.SIGUSR2))

"""Rehearses a fault in a real job, so that a user knows before it matters that the job survives it.

The supervisor runs the job as ever; an observer of it makes one fault in the first attempt, measures what follows from
what the supervisor sees anyway, and says at the end whether all was as it should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from launcher.jobs import first_error, guard
from launcher.jobs.drill import files
from launcher.jobs.drill import verdict as drill_verdict
from launcher.jobs.drill.plan import CORRUPT, FREEZE, KILL, PREEMPT, DrillPlan
from launcher.jobs.drill.verdict import Attempt, Fault
from launcher.jobs.job import Backend, Command, Job, Worker
from launcher.jobs.output import Console
from launcher.jobs.policy import Verdict
from launcher.jobs.supervisor import Supervisor
from launcher.model_dir.lease import Lease
from launcher.reporting import strict_json
from launcher.supervised import drill
from launcher.supervised.progress import Report

_SIGNALS = {KILL: signal.SIGKILL, CORRUPT: signal.SIGKILL, FREEZE: signal.SIGSTOP}
_WORDS = {
    KILL: "SIGKILL to worker {}",
    FREEZE: "SIGSTOP to worker {}",
    PREEMPT: "SIGTERM to the whole job, as a scheduler sends it; afterwards it is run again",
    CORRUPT: "SIGKILL to worker {}, and damage to the newest checkpoint before the restart",
    drill.EXCEPTION: "an exception in worker {}",
    drill.STUCK: "worker {} blocks for ever between two steps, which is for the stall timeout to notice",
    drill.DISK_FULL: "the next checkpoint of worker {} finds the disk full, once",
}


def run(plan: DrillPlan, *, job: Job, make_backend: Callable[[], Backend], console: Console, held: Lease) -> int:
    """Runs the job to its end, with the fault in its first attempt, and prints the verdict.

    Args:
      plan: the fault.
      job: what to run.
      make_backend: where; called once for each time that the job is run.
      console: where it says what happens.
      held: the lease of the job's folder.

    Returns:
      0 if the drill is passed; else the job's exit code, or 70 if that is 0.
    """
    console.note(f"drill: {plan.kind}, {_when(plan)}. No other setting of the job is changed")
    observer = _Observer(plan, job, console)
    exit_code = Supervisor(job=job, backend=make_backend(), console=console, observer=observer, held=held).run()
    if plan.kind == PREEMPT and observer.fault is not None and exit_code == EXIT_PREEMPTED:
        console.note("drill: the same command again, as a scheduler would")
        exit_code = Supervisor(job=job, backend=make_backend(), console=console, observer=observer, held=held).run()
    verdict = drill_verdict.conclude(
        plan,
        attempts=observer.attempts,
        fault=observer.fault,
        exit_code=exit_code,
        orphans=_count_processes(job.identity),
        model_dir=Path(job.model_dir),
    )
    with contextlib.suppress(OSError):
        content = strict_json.dumps(verdict.record(), indent=2) + "\n"
        strict_json.replace_file(Path(job.model_dir, drill_verdict.FILE_NAME), content)
    console.note(verdict.text())
    return EXIT_DONE if verdict.passed else exit_code or EXIT_FAILED


class _Observer:
    """Makes the fault and keeps the times; see `launcher.jobs.observer.Observer`."""

    def __init__(self, plan: DrillPlan, job: Job, console: Console):
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
        """Damages the checkpoint now that nothing reads it; tells the worker of the first attempt what to rehearse."""
        if self.attempts:
            self._after_attempt(self.attempts[-1])
        self.attempts.append(Attempt())
        if len(self.attempts) > 1 or not self._plan.in_worker:
            return commands
        return tuple(
            dataclasses.replace(command, environ={**command.environ, drill.VARIABLE: self._plan.kind})
            if command.rank == self._plan.worker
            else command
            for command in commands
        )

    def turn(self, workers: Sequence[Worker]) -> None:
        """Notes how far the workers are, and makes the fault when it is time."""
        attempt = self.attempts[-1]
        for worker in workers:
            self._note(attempt, worker.report)
        if self.fault is None and len(self.attempts) == 1:
            for worker in workers:
                if worker.command.rank == self._plan.worker and self._is_time(worker.report):
                    self._strike(worker)
        for worker in workers:
            if self.fault and not self._struck and worker.report is not None and worker.report.drill_struck:
                self._struck = True
                self.fault.at = max(self.fault.at, worker.report.monotonic)

    def judged(self, workers: Sequence[Worker], verdict: Verdict) -> None:
        """Keeps who was named, and when."""
        attempt = self.attempts[-1]
        attempt.ended_at = time.monotonic()
        attempt.exit_code = verdict.exit_code
        if verdict.cause is not None:
            attempt.cause, attempt.what = verdict.cause.rank, first_error.what_happened(verdict.cause)
            if verdict.cause.error:
                attempt.error_type = verdict.cause.error.type
                attempt.what += f": {verdict.cause.error.type}"
        if self.fault is not None and self._plan.in_worker and not self._struck and len(self.attempts) == 1:
            # The worker's last report before the fault is the nearest to it that anybody has seen.
            reports = [w.report for w in workers if w.command.rank == self._plan.worker and w.report is not None]
            self.fault.at = max([self.fault.at, *(report.monotonic for report in reports)])

    def _after_attempt(self, attempt: Attempt) -> None:
        attempt.newest_checkpoint = files.newest_step(self._model_dir)
        fault = self.fault
        if self._plan.kind == CORRUPT and fault and not fault.damaged_sha256 and attempt.newest_checkpoint is not None:
            fault.damaged_step = attempt.newest_checkpoint
            fault.damaged_sha256 = files.damage(self._model_dir, fault.damaged_step)
            self._console.note(f"drill: the checkpoint of step {fault.damaged_step} is damaged now")

    def _note(self, attempt: Attempt, report: Report | None) -> None:
        if report is None or report.step is None:
            return
        if attempt.first_step is None:
            attempt.first_step = report.first_step
            if self.fault and self.fault.damaged_sha256:
                # Now it has been skipped. Later, when that step is done anew, its checkpoint may be written anew.
                self.fault.kept = files.is_kept(self._model_dir, self.fault.damaged_sha256)
        attempt.furthest_step = max(attempt.furthest_step, report.step)
        if attempt.training_at is None and attempt.first_step is not None and report.step > attempt.first_step:
            attempt.training_at = report.monotonic

    def _is_time(self, report: Report | None) -> bool:
        if report is None or report.step is None or report == self._looked_at:
            return False
        self._looked_at = report
        if self._plan.step is not None and report.step < self._plan.step:
            return False
        if self._plan.step is not None and self._plan.kind != CORRUPT:
            return True
        self._new_steps |= set(files.all_steps(self._model_dir)) - self._known_steps
        needed = 2 if self._plan.kind == CORRUPT else 1  # one to damage, and one to go on from
        return len(self._new_steps) >= needed and report.phase == "train" and report.step >= max(self._new_steps)

    def _strike(self, worker: Worker) -> None:
        assert worker.report is not None and worker.report.step is not None
        rank, step = worker.command.rank, worker.report.step
        self._console.note(f"drill: now, at step {step}: {_WORDS[self._plan.kind].format(rank)}")
        self.fault = Fault(at=time.monotonic(), step=step)
        if self._plan.kind == PREEMPT:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            worker.send(_SIGNALS.get(self._plan.kind, signal.SIGUSR2))


def _when(plan: DrillPlan) -> str:
    if plan.step is not None:
        return f"when worker {plan.worker} has done step {plan.step}"
    return "after two checkpoints" if plan.kind == CORRUPT else "after a checkpoint"


def _count_processes(identity: str) -> int:
    """Processes of this host that belong to the job; Linux only, elsewhere none are found."""
    mark = f"{guard.JOB}={identity}".encode()
    return len(guard.marked(lambda variable: variable.startswith(mark)))

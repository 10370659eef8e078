"""The run of a drill: rehearses a fault in a real job, so that a user knows before it matters that the job survives.

The supervisor runs the job as ever and tells the drill of it, which makes one fault in the first attempt, measures what
follows, and says at the end whether all was as it should be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from launcher.jobs import guard
from launcher.jobs.drill import verdict as drill_verdict
from launcher.jobs.drill.fault import Drill
from launcher.jobs.drill.plan import CORRUPT, PREEMPT, DrillPlan
from launcher.jobs.job import Backend, Job
from launcher.jobs.output import JobConsole
from launcher.jobs.supervisor import Supervisor
from launcher.model_dir.lease import Lease
from launcher.reporting import report, strict_json


def run(plan: DrillPlan, *, job: Job, make_backend: Callable[[], Backend], console: JobConsole, held: Lease) -> int:
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
    if plan.step is not None:
        when = f"when worker {plan.worker} has done step {plan.step}"
    else:
        when = "after two checkpoints" if plan.kind == CORRUPT else "after a checkpoint"
    console.note(f"drill: {plan.kind}, {when}. No other setting of the job is changed")
    drill = Drill(plan, job, console)
    exit_code = Supervisor(job=job, backend=make_backend(), console=console, drill=drill, held=held).run()
    if plan.kind == PREEMPT and drill.fault is not None and exit_code == EXIT_PREEMPTED:
        console.note("drill: the same command again, as a scheduler would")
        exit_code = Supervisor(job=job, backend=make_backend(), console=console, drill=drill, held=held).run()
    verdict = drill_verdict.conclude(
        plan,
        attempts=drill.attempts,
        fault=drill.fault,
        exit_code=exit_code,
        orphans=_count_processes(job.identity),
        model_dir=Path(job.model_dir),
    )
    with contextlib.suppress(OSError):
        content = strict_json.dumps(verdict.record(), indent=2) + "\n"
        strict_json.replace_file(Path(job.model_dir, drill_verdict.FILE_NAME), content)
        report.refresh(job.model_dir)
    console.note(verdict.text())
    return EXIT_DONE if verdict.passed else exit_code or EXIT_FAILED


def _count_processes(identity: str) -> int:
    """Processes of this host that belong to the job; Linux only, elsewhere none are found."""
    mark = f"{guard.JOB}={identity}".encode()
    return len(guard.marked(lambda variable: variable.startswith(mark)))

"""The run of a drill: a job run to its end with a fault in its first attempt, and the report printed."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from launcher.jobs import guard
from launcher.jobs.drill import report
from launcher.jobs.drill.fault import Drill
from launcher.jobs.drill.plan import CORRUPT, PREEMPT, DrillPlan
from launcher.jobs.job import Backend, Job
from launcher.jobs.output import JobConsole
from launcher.jobs.supervisor import Supervisor
from launcher.model_dir.lease import Lease
from launcher.reporting import strict_json


def run(plan: DrillPlan, *, job: Job, make_backend: Callable[[], Backend], console: JobConsole, held: Lease) -> int:
    """Runs the job to its end, with the fault in its first attempt, and prints the report.

    `make_backend` is called once for each time that the job is run.

    Returns:
      0 if the drill is passed; else the job's exit code, or 70 if that is 0.
    """
    if plan.step is not None:
        when = f"when worker {plan.worker} has done step {plan.step}"
    else:
        when = "after two checkpoints" if plan.kind == CORRUPT else "after a checkpoint"
    console.note(f"drill: {plan.kind}, {when}. No other setting of the job is changed")
    rehearsed = Drill(plan, job, console)

    def supervise() -> int:
        return Supervisor(job=job, backend=make_backend(), console=console, drill=rehearsed, held=held).run()

    exit_code = supervise()
    if plan.kind == PREEMPT and rehearsed.fault is not None and exit_code == EXIT_PREEMPTED:
        console.note("drill: the same command again, as a scheduler would")
        exit_code = supervise()
    mark = f"{guard.JOB}={job.identity}".encode()
    record = report.conclude(
        plan,
        attempts=rehearsed.attempts,
        fault=rehearsed.fault,
        exit_code=exit_code,
        orphans=len(guard.marked(lambda variable: variable.startswith(mark))),
        model_dir=Path(job.model_dir),
    )
    with contextlib.suppress(OSError):
        content = strict_json.dumps(record, indent=2) + "\n"
        strict_json.replace_file(Path(job.model_dir, "drill.json"), content)
    console.note(report.text(record, Path(job.model_dir)))
    return EXIT_DONE if record["passed"] else exit_code or EXIT_FAILED

"""The report of a drill: the numbers, and whether the job survived as it should."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_PREEMPTED
from launcher.jobs.drill import files
from launcher.jobs.drill.plan import CORRUPT, PREEMPT, DrillPlan
from launcher.reporting.attempts import describe, reckon
from launcher.worker import drill


@dataclasses.dataclass
class Attempt:
    """One attempt as the supervisor saw it.

    Attributes:
      first_step: where its workers began; None before they said so.
      training_at: monotonic seconds of the first report of a step beyond the first.
      ended_at: monotonic seconds at which its end was understood.
      cause, what: who failed first and how, as it was named; None and "" when nobody did.
      newest_checkpoint: the newest complete one when nothing of the attempt ran any more.
    """

    first_step: int | None = None
    furthest_step: int = 0
    training_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    cause: int | None = None
    what: str = ""
    newest_checkpoint: int | None = None


@dataclasses.dataclass
class Fault:
    """When and where the fault happened, in monotonic seconds; `kept` is for a damaged checkpoint."""

    at: float
    step: int
    damaged_step: int | None = None
    damaged_sha256: str = ""
    kept: bool = False


def conclude(
    plan: DrillPlan, *, attempts: list[Attempt], fault: Fault | None, exit_code: int, orphans: int, model_dir: Path
) -> dict[str, Any]:
    """The report of a drill that has ended.

    Args:
      fault: None if it never came to it.
      exit_code: of the job.
      orphans: how many processes of the job are left on this host.

    Returns:
      The contents of drill.json, with None for what there is nothing to say of:
        named: the worker that was named first, and what was said of it.
        seconds_to_detection: from the fault until the supervisor knew that and whom.
        seconds_to_training: from the fault until the first new step was done.
        steps_repeated: steps that had been reported before and were done again.
        resumed_from: the step of the checkpoint that the job went on from.
        difference: from the reference; "" for equal bit for bit.
    """
    struck, healed = attempts[0] if attempts else Attempt(), attempts[1] if len(attempts) > 1 else None
    resumed_from = healed.first_step if healed else None
    difference = files.difference(model_dir, plan.reference) if plan.reference else None
    failures = [] if exit_code == EXIT_DONE else [f"the job ended with exit code {exit_code}"]
    if fault is None:
        failures.append(
            "the fault never happened: the job ended too early. Give a smaller --drill_step"
            if plan.step
            else "the fault never happened: the job wrote no checkpoint that this host could see, long enough before "
            "its end. Bind train.checkpoint_every, or give --drill_step"
        )
    else:
        failures += _failures(plan, struck, healed, fault, exit_code, model_dir)
    if orphans:
        failures.append(f"{orphans} process(es) of the job are left on this host")
    if difference:
        failures.append(f"the result is another than the reference: {difference}")
    stopped = fault is not None and (struck.cause is not None or healed is not None)
    goodput = reckon(str(model_dir))
    return {
        "passed": not failures,
        "kind": plan.kind,
        "worker": plan.worker,
        "fault_step": fault.step if fault else None,
        "named": f"worker {struck.cause} {struck.what}" if struck.cause is not None else None,
        "seconds_to_detection": _since(fault, struck.ended_at) if stopped else None,
        "seconds_to_training": _since(fault, healed.training_at) if healed else None,
        "steps_repeated": max(0, struck.furthest_step - resumed_from) if resumed_from is not None and fault else None,
        "resumed_from": resumed_from,
        "restarts": max(0, len(attempts) - 1),
        "orphans": orphans,
        "final_step": attempts[-1].furthest_step if attempts else 0,
        "difference": difference,
        "exit_code": exit_code,
        "goodput": goodput.get("goodput"),
        "failures": failures,
        "goodput_share": goodput.get("goodput_share"),
    }


def text(record: Mapping[str, Any], model_dir: Path) -> str:
    """The report of `conclude`, for the terminal."""
    kind, step, named = record["kind"], record["fault_step"], record["named"]
    noticed = _seconds(record["seconds_to_detection"])
    lines = {
        "fault": f"{kind}: never happened" if step is None else f"{kind}: worker {record['worker']}, step {step}",
        "noticed": f"{noticed}: {named}" if named else noticed,
        "training again": _seconds(record["seconds_to_training"]),
        "steps repeated": "-" if record["steps_repeated"] is None else record["steps_repeated"],
        "went on from": "-" if record["resumed_from"] is None else f"step {record['resumed_from']}",
        "restarts": record["restarts"],
        "orphans left": record["orphans"],
        "final step": record["final_step"],
    }
    if record["difference"] is not None:
        lines["reference"] = record["difference"] or "equal bit for bit"
    if goodput := describe(reckon(str(model_dir))).removeprefix("goodput "):
        lines["goodput"] = goodput
    told = [f"drill {'passed' if record['passed'] else 'NOT PASSED'}: {kind}"]
    told += [f"  {name:<15} {value}" for name, value in lines.items()]
    return "\n".join([*told, *(f"  not passed: {failure}" for failure in record["failures"])])


def _failures(
    plan: DrillPlan, struck: Attempt, healed: Attempt | None, fault: Fault, exit_code: int, model_dir: Path
) -> list[str]:
    if healed is None:
        # With a full disk, a job may also be told to go on.
        goes_on = plan.kind == drill.DISK_FULL and exit_code == EXIT_DONE
        return [] if goes_on else ["the job was not started again"]
    failures = []
    if plan.kind == PREEMPT:
        if struck.exit_code != EXIT_PREEMPTED:
            failures.append(f"SIGTERM ended the job with exit code {struck.exit_code}, not {EXIT_PREEMPTED}")
        elif healed.first_step != struck.furthest_step:
            failures.append(f"it saved step {healed.first_step}, having done {struck.furthest_step}")
    elif struck.cause != plan.worker:
        named = "nobody" if struck.cause is None else f"worker {struck.cause}"
        failures.append(f"{named} was named first, not worker {plan.worker}")
    if plan.kind == CORRUPT:
        if fault.damaged_step is None:
            failures.append("there was no checkpoint to damage")
        elif healed.first_step is None or healed.first_step >= fault.damaged_step:
            failures.append(
                f"went on from step {healed.first_step}; the checkpoint of {fault.damaged_step} was damaged"
            )
        elif not fault.kept:
            failures.append(f"the damaged checkpoint of step {fault.damaged_step} was not kept")
    elif (model_dir / "checkpoints").is_dir() and healed.first_step != (struck.newest_checkpoint or 0):
        failures.append(f"went on from step {healed.first_step}, with a checkpoint of step {struck.newest_checkpoint}")
    return failures


def _since(fault: Fault | None, at: float | None) -> float | None:
    return None if fault is None or at is None else max(0.0, at - fault.at)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"after {value:.1f} s"

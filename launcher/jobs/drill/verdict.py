"""The verdict of a drill: the numbers, and whether the job survived as it should."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from launcher.errors import EXIT_DONE, EXIT_PREEMPTED
from launcher.jobs.drill import files
from launcher.jobs.drill.plan import CORRUPT, PREEMPT, DrillPlan
from launcher.reporting import run_folder
from launcher.reporting.attempts import describe, reckon
from launcher.supervised import drill

FILE_NAME = run_folder.DRILL


@dataclasses.dataclass
class Attempt:
    """One attempt as the supervisor saw it.

    Attributes:
      first_step: where its workers began; None before they said so.
      furthest_step: the last step that any of them reported.
      training_at: monotonic seconds of the first report of a step beyond the first.
      ended_at: monotonic seconds at which its end was understood.
      exit_code: what it meant for the job.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrillVerdict:
    """A finished drill; None for what there is nothing to say of.

    Attributes:
      kind, worker: the fault that was planned.
      fault_step: step at which it happened; None if it never did.
      named: the worker that was named first, and what was said of it.
      seconds_to_detection: from the fault until the supervisor knew that and whom.
      seconds_to_training: from the fault until the first new step was done.
      steps_repeated: steps that had been reported before and were done again.
      resumed_from: the step of the checkpoint that the job went on from.
      restarts: how often it was started again.
      orphans: processes of the job that were left on this host.
      final_step: the last one.
      difference: from the reference; "" for equal bit for bit.
      exit_code: of the job.
      goodput: over all attempts, as `attempts.reckon` tells.
      failures: why the drill is not passed.
    """

    kind: str
    worker: int
    fault_step: int | None
    named: str | None
    seconds_to_detection: float | None
    seconds_to_training: float | None
    steps_repeated: int | None
    resumed_from: int | None
    restarts: int
    orphans: int
    final_step: int
    difference: str | None
    exit_code: int
    goodput: dict[str, Any]
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.failures

    def record(self) -> dict[str, Any]:
        """The contents of drill.json."""
        own = {**dataclasses.asdict(self), "failures": list(self.failures)}
        return {"passed": self.passed, **own, **{name: self.goodput.get(name) for name in ("goodput", "goodput_share")}}

    def text(self) -> str:
        """The verdict for the terminal."""
        where = f"worker {self.worker}, step {self.fault_step}" if self.fault_step is not None else "never happened"
        noticed, again = _seconds(self.seconds_to_detection), _seconds(self.seconds_to_training)
        lines = {
            "fault": f"{self.kind}: {where}",
            "noticed": f"{noticed}: {self.named}" if self.named else noticed,
            "training again": again,
            "steps repeated": "-" if self.steps_repeated is None else str(self.steps_repeated),
            "went on from": "-" if self.resumed_from is None else f"step {self.resumed_from}",
            "restarts": str(self.restarts),
            "orphans left": str(self.orphans),
            "final step": str(self.final_step),
        }
        if self.difference is not None:
            lines["reference"] = self.difference or "equal bit for bit"
        if told := describe(self.goodput).removeprefix("goodput "):
            lines["goodput"] = told
        text = [f"drill {'passed' if self.passed else 'NOT PASSED'}: {self.kind}"]
        text += [f"  {name:<15} {value}" for name, value in lines.items()]
        return "\n".join([*text, *(f"  not passed: {failure}" for failure in self.failures)])


def conclude(
    plan: DrillPlan, *, attempts: list[Attempt], fault: Fault | None, exit_code: int, orphans: int, model_dir: Path
) -> DrillVerdict:
    """Judges a drill that has ended.

    Args:
      plan: what was to happen.
      attempts: what did, in order.
      fault: None if it never came to it.
      exit_code: of the job.
      orphans: processes that are left.
      model_dir: of the job.
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
    after = healed.training_at if healed else None
    stopped = fault is not None and (struck.cause is not None or healed is not None)
    return DrillVerdict(
        kind=plan.kind,
        worker=plan.worker,
        fault_step=fault.step if fault else None,
        named=f"worker {struck.cause} {struck.what}" if struck.cause is not None else None,
        seconds_to_detection=_since(fault, struck.ended_at) if stopped else None,
        seconds_to_training=_since(fault, after),
        steps_repeated=max(0, struck.furthest_step - resumed_from) if resumed_from is not None and fault else None,
        resumed_from=resumed_from,
        restarts=max(0, len(attempts) - 1),
        orphans=orphans,
        final_step=attempts[-1].furthest_step if attempts else 0,
        difference=difference,
        exit_code=exit_code,
        goodput=reckon(str(model_dir)),
        failures=tuple(failures),
    )


def _failures(
    plan: DrillPlan, struck: Attempt, healed: Attempt | None, fault: Fault, exit_code: int, model_dir: Path
) -> list[str]:
    if healed is None:
        # With a full disk, a job may also be told to go on.
        goes_on = plan.kind == drill.DISK_FULL and exit_code == EXIT_DONE
        return [] if goes_on else ["the job was not started again"]
    found = []
    if plan.kind == PREEMPT:
        if struck.exit_code != EXIT_PREEMPTED:
            found.append(
                f"SIGTERM ended the job with exit code {struck.exit_code}, not {EXIT_PREEMPTED}: nothing saved"
            )
        elif healed.first_step != struck.furthest_step:
            found.append(f"it saved step {healed.first_step}, having done {struck.furthest_step}")
    elif struck.cause != plan.worker:
        named = "nobody" if struck.cause is None else f"worker {struck.cause}"
        found.append(f"{named} was named first, not worker {plan.worker}")
    if plan.kind == CORRUPT:
        if fault.damaged_step is None:
            found.append("there was no checkpoint to damage")
        elif healed.first_step is None or healed.first_step >= fault.damaged_step:
            found.append(f"went on from step {healed.first_step}; the checkpoint of {fault.damaged_step} was damaged")
        elif not fault.kept:
            found.append(f"the damaged checkpoint of step {fault.damaged_step} was not kept")
    elif (model_dir / "checkpoints").is_dir() and healed.first_step != (struck.newest_checkpoint or 0):
        found.append(f"went on from step {healed.first_step}, with a checkpoint of step {struck.newest_checkpoint}")
    return found


def _since(fault: Fault | None, at: float | None) -> float | None:
    return None if fault is None or at is None else max(0.0, at - fault.at)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"after {value:.1f} s"

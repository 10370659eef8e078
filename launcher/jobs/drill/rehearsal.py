"""A drill: one fault rehearsed in a real job, so that a user knows before it matters that the job survives.

The supervisor runs the job as ever and tells the drill of it, which makes the fault in the first attempt when it is
time, measures what follows, and says at the end whether all was as it should be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, UsageError
from launcher.jobs import first_error, guard
from launcher.jobs.drill import files
from launcher.jobs.job import Command, Job, Worker
from launcher.jobs.output import JobConsole
from launcher.jobs.policy import Decision, Outcome
from launcher.modes import fields_of, flag
from launcher.reporting import strict_json
from launcher.reporting.attempts import describe, reckon
from launcher.worker import drill
from launcher.worker.progress import Report

KILL, FREEZE, PREEMPT, CORRUPT = "kill", "freeze", "preempt", "corrupt_checkpoint"
_WORDS = {
    KILL: "SIGKILL to worker {}",
    FREEZE: "SIGSTOP to worker {}",
    drill.EXCEPTION: "an exception in worker {}",
    drill.STUCK: "worker {} blocks for ever between two steps, which is for the stall timeout to notice",
    PREEMPT: "SIGTERM to the whole job, as a scheduler sends it; afterwards it is run again",
    drill.DISK_FULL: "the next checkpoint of worker {} finds the disk full, once",
    CORRUPT: "SIGKILL to worker {}, and damage to the newest checkpoint before the restart",
    drill.FLIP_BIT: "worker {} computes a wrong bit, which is for train.replay_every to notice",
}
KINDS = tuple(_WORDS)
_SIGNALS = {KILL: signal.SIGKILL, CORRUPT: signal.SIGKILL, FREEZE: signal.SIGSTOP}


@dataclasses.dataclass
class DrillFlags:
    """The flags of a drill."""

    drill: str | None = flag(
        f"Rehearse one fault in this job's first attempt, and report whether the job survived it: {', '.join(KINDS)}.",
        define=flags.DEFINE_enum,
        enum_values=KINDS,
    )
    drill_worker: int | None = flag(
        "Worker that the fault happens in. Default: the last; for disk_full the first, which alone writes checkpoints."
    )
    drill_step: int | None = flag(
        "The fault happens when that worker reports this step or a later one. Default: after a checkpoint that this "
        "command has written; for corrupt_checkpoint, after two.",
        lower_bound=1,
    )
    drill_reference: str | None = flag(
        "model_dir of the same run, finished and undisturbed: the last checkpoints must be equal bit for bit."
    )


FLAGS = fields_of(DrillFlags)


@dataclasses.dataclass
class Attempt:
    """One attempt as the supervisor saw it.

    Attributes:
      first_step: where its workers began; None before they said so.
      training_at: monotonic seconds of the first report of a step beyond the first.
      ended_at: monotonic seconds at which its end was understood.
      decision: what the supervisor made of it, with who failed first, as it was named.
      newest_checkpoint: the newest complete one when nothing of the attempt ran any more.
    """

    first_step: int | None = None
    furthest_step: int = 0
    training_at: float | None = None
    ended_at: float | None = None
    decision: Decision | None = None
    newest_checkpoint: int | None = None

    @property
    def cause(self) -> Outcome | None:
        """The worker that was named first; None where nobody was."""
        return self.decision.cause if self.decision else None


@dataclasses.dataclass
class Fault:
    """When and where the fault happened, in monotonic seconds; `kept` is for a damaged checkpoint."""

    at: float
    step: int
    damaged_step: int | None = None
    damaged: tuple[int, int] | None = None
    kept: bool = False

    def until(self, at: float | None) -> float | None:
        """Seconds from the fault to `at`."""
        return None if at is None else max(0.0, at - self.at)


class Drill:
    """Makes one fault in a job that a supervisor runs, and keeps the times; the supervisor tells it of the attempts.

    Args:
      step: it happens when that worker reports this step or a later one; None for soon after a checkpoint.
      reference: model_dir of a finished run that nobody disturbed, to compare the result with; None for no comparison.

    Attributes:
      attempts: what the supervisor has seen, in order.
      fault: None before it has happened.
    """

    def __init__(
        self, kind: str, worker: int, step: int | None, reference: Path | None, *, job: Job, console: JobConsole
    ):
        self.kind, self._worker, self._step, self._reference = kind, worker, step, reference
        self._model_dir = Path(job.model_dir)
        self._console = console
        self._known_steps = set(files.all_steps(self._model_dir))
        self._new_steps: set[int] = set()
        self._looked_at: Report | None = None
        self._struck = False
        self._in_worker = kind in drill.KINDS
        self.attempts: list[Attempt] = []
        self.fault: Fault | None = None

    @property
    def when(self) -> str:
        """The moment of the fault."""
        if self._step is not None:
            return f"when worker {self._worker} has done step {self._step}"
        return "after two checkpoints" if self.kind == CORRUPT else "after a checkpoint"

    def commands(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        """Before an attempt, when nothing of the one before runs any more; returns what to start.

        Damages the checkpoint now that nothing reads it; tells the worker of the first attempt what to rehearse.
        """
        if self.attempts:
            self._after_attempt(self.attempts[-1])
        self.attempts.append(Attempt())
        if len(self.attempts) > 1 or not self._in_worker:
            return commands
        told = {drill.VARIABLE: self.kind}
        return tuple(command.given(told if command.rank == self._worker else {}) for command in commands)

    def turn(self, workers: Sequence[Worker]) -> None:
        """Some times a second: notes how far the workers are, and makes the fault when it is time."""
        for worker in workers:
            report = worker.report
            if report is None or report.step is None:
                continue
            self._note(self.attempts[-1], report, report.step)
            if len(self.attempts) > 1 or worker.command.rank != self._worker:
                continue
            if self.fault is None and self._is_time(report, report.step):
                self._strike(worker, report.step)
            elif self.fault and self._in_worker and not self._struck:
                # Its last report before the fault is the nearest to it that anybody has seen.
                self._struck = report.drill_struck
                self.fault.at = max(self.fault.at, report.monotonic)

    def ended(self, decision: Decision) -> None:
        """At the end of an attempt, before the rest of it is ended: keeps who was named, and when."""
        self.attempts[-1].ended_at, self.attempts[-1].decision = time.monotonic(), decision

    def conclude(self, *, exit_code: int, orphans: int, goodput: Mapping[str, Any]) -> dict[str, Any]:
        """The report, once the job has ended with `exit_code` and left so many processes on this host.

        Returns:
          The contents of drill.json, with None for what there is nothing to say of:
            named: the worker that was named first, and what was said of it.
            seconds_to_detection: from the fault until the supervisor knew that and whom.
            seconds_to_training: from the fault until the first new step was done.
            steps_repeated: steps that had been reported before and were done again.
            resumed_from: the step of the checkpoint that the job went on from.
            difference: from the reference; "" for equal bit for bit.
        """
        fault = self.fault
        struck = self.attempts[0] if self.attempts else Attempt()
        healed = self.attempts[1] if len(self.attempts) > 1 else None
        resumed_from, named = healed.first_step if healed else None, None
        if cause := struck.cause:
            error = f": {cause.error.type}" if cause.error else ""
            named = f"worker {cause.rank} {first_error.what_happened(cause)}{error}"
        difference = files.difference(self._model_dir, self._reference) if self._reference else None
        failures = [] if exit_code == EXIT_DONE else [f"the job ended with exit code {exit_code}"]
        if fault is None:
            failures.append(
                "the fault never happened: the job ended too early. Give a smaller --drill_step"
                if self._step
                else "the fault never happened: the job wrote no checkpoint that this host could see, long enough "
                "before its end. Bind train.checkpoint_every, or give --drill_step"
            )
        elif healed is None:
            # With a full disk, a job may also be told to go on.
            if self.kind != drill.DISK_FULL or exit_code != EXIT_DONE:
                failures.append("the job was not started again")
        else:
            failures += self._failures(struck, healed, fault)
        if orphans:
            failures.append(f"{orphans} process(es) of the job are left on this host")
        if difference:
            failures.append(f"the result is another than the reference: {difference}")
        return {
            "passed": not failures,
            "kind": self.kind,
            "worker": self._worker,
            "fault_step": fault.step if fault else None,
            "named": named,
            "seconds_to_detection": fault.until(struck.ended_at) if fault and (named or healed) else None,
            "seconds_to_training": fault.until(healed.training_at) if fault and healed else None,
            "steps_repeated": max(0, struck.furthest_step - resumed_from)
            if fault and resumed_from is not None
            else None,
            "resumed_from": resumed_from,
            "restarts": max(0, len(self.attempts) - 1),
            "orphans": orphans,
            "final_step": self.attempts[-1].furthest_step if self.attempts else 0,
            "difference": difference,
            "exit_code": exit_code,
            "goodput": goodput.get("goodput"),
            "failures": failures,
            "goodput_share": goodput.get("goodput_share"),
        }

    def _failures(self, struck: Attempt, healed: Attempt, fault: Fault) -> list[str]:
        """Failures of the attempt with the fault and of the one after it."""
        kind, first, failures = self.kind, healed.first_step, []
        if kind == PREEMPT:
            exit_code = struck.decision.exit_code if struck.decision else None
            if exit_code != EXIT_PREEMPTED:
                failures.append(f"SIGTERM ended the job with exit code {exit_code}, not {EXIT_PREEMPTED}")
            elif first != struck.furthest_step:
                failures.append(f"it saved step {first}, having done {struck.furthest_step}")
        elif struck.cause is None or struck.cause.rank != self._worker:
            named = f"worker {struck.cause.rank}" if struck.cause else "nobody"
            failures.append(f"{named} was named first, not worker {self._worker}")
        if kind == CORRUPT:
            if fault.damaged_step is None:
                failures.append("there was no checkpoint to damage")
            elif first is None or first >= fault.damaged_step:
                failures.append(f"went on from step {first}; the checkpoint of {fault.damaged_step} was damaged")
            elif not fault.kept:
                failures.append(f"the damaged checkpoint of step {fault.damaged_step} was not kept")
        elif (self._model_dir / "checkpoints").is_dir() and first != (struck.newest_checkpoint or 0):
            failures.append(f"went on from step {first}, with a checkpoint of step {struck.newest_checkpoint}")
        return failures

    def _after_attempt(self, attempt: Attempt) -> None:
        attempt.newest_checkpoint = files.newest_step(self._model_dir)
        fault = self.fault
        if self.kind == CORRUPT and fault and not fault.damaged and attempt.newest_checkpoint is not None:
            fault.damaged_step = attempt.newest_checkpoint
            fault.damaged = files.damage(self._model_dir, fault.damaged_step)
            self._console.note(f"drill: the checkpoint of step {fault.damaged_step} is damaged now")

    def _note(self, attempt: Attempt, report: Report, step: int) -> None:
        if attempt.first_step is None:
            attempt.first_step = report.first_step
            if self.fault and self.fault.damaged:
                # Now it has been skipped. Later, when that step is done anew, its checkpoint may be written anew.
                self.fault.kept = files.is_kept(self._model_dir, self.fault.damaged)
        attempt.furthest_step = max(attempt.furthest_step, step)
        if attempt.training_at is None and attempt.first_step is not None and step > attempt.first_step:
            attempt.training_at = report.monotonic

    def _is_time(self, report: Report, step: int) -> bool:
        if report == self._looked_at:
            return False
        self._looked_at = report
        if self._step is not None and (step < self._step or self.kind != CORRUPT):
            return step >= self._step
        self._new_steps |= set(files.all_steps(self._model_dir)) - self._known_steps
        needed = 2 if self.kind == CORRUPT else 1  # one to damage, and one to go on from
        return len(self._new_steps) >= needed and report.phase == "train" and step >= max(self._new_steps)

    def _strike(self, worker: Worker, step: int) -> None:
        self._console.note(f"drill: now, at step {step}: {_WORDS[self.kind].format(worker.command.rank)}")
        self.fault = Fault(at=time.monotonic(), step=step)
        if self.kind == PREEMPT:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            worker.send(_SIGNALS.get(self.kind, signal.SIGUSR2))


def make(options: flags.FlagValues, job: Job, console: JobConsole) -> Drill | None:
    """The drill that the flags describe, checked against the job; None without --drill."""
    kind, worker, step, reference = (options[name].value for name in FLAGS)
    if kind is None:
        for name in FLAGS:
            if options[name].value is not None:
                raise UsageError(f"--{name}={options[name].value}: needs --drill={'|'.join(KINDS)}")
        return None
    if worker is None:
        worker = 0 if kind == drill.DISK_FULL else job.workers - 1
    if not 0 <= worker < job.workers:
        raise UsageError(f"--drill_worker={worker}: the workers of this job are 0 to {job.workers - 1}")
    if kind == drill.DISK_FULL and worker:
        raise UsageError(f"--drill_worker={worker}: only worker 0 writes checkpoints; leave the flag out for disk_full")
    if not job.max_restarts and kind != PREEMPT:
        raise UsageError("--max_restarts=0: a drill needs one restart at least")
    if reference is not None:
        if not list(Path(reference, "checkpoints").glob("step_*")):
            raise UsageError(f"--drill_reference={reference}: no checkpoint in it; give a finished run's model_dir")
        if Path(reference).resolve() == Path(job.model_dir).resolve():
            raise UsageError(f"--drill_reference={reference}: is the job's own --model_dir; train it elsewhere")
    return Drill(kind, worker, step, Path(reference) if reference else None, job=job, console=console)


def run(drill: Drill, job: Job, supervise: Callable[[], int], console: JobConsole) -> int:
    """Runs the job to its end, with the fault in its first attempt, and prints the report.

    Returns:
      0 if the drill is passed; else the job's exit code, or 70 if that is 0.
    """
    console.note(f"drill: {drill.kind}, {drill.when}. No other setting of the job is changed")
    exit_code = supervise()
    if drill.kind == PREEMPT and drill.fault is not None and exit_code == EXIT_PREEMPTED:
        console.note("drill: the same command again, as a scheduler would")
        exit_code = supervise()
    mark = f"{guard.JOB}={job.identity}".encode()
    orphans = len(guard.marked(lambda variable: variable.startswith(mark)))
    goodput = reckon(job.model_dir)
    record = drill.conclude(exit_code=exit_code, orphans=orphans, goodput=goodput)
    with contextlib.suppress(OSError):
        strict_json.write(Path(job.model_dir, "drill.json"), record)
    console.note(_text(record, describe(goodput)))
    return EXIT_DONE if record["passed"] else exit_code or EXIT_FAILED


def _text(record: Mapping[str, Any], goodput: str) -> str:
    """The report of a drill, for the terminal."""
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
    if goodput:
        lines["goodput"] = goodput.removeprefix("goodput ")
    told = [f"drill {'passed' if record['passed'] else 'NOT PASSED'}: {kind}"]
    told += [f"  {name:<15} {value}" for name, value in lines.items()]
    return "\n".join([*told, *(f"  not passed: {failure}" for failure in record["failures"])])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"after {value:.1f} s"

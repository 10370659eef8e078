"""The flags of a drill: which fault, in which worker, when."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from absl import flags

from launcher.errors import UsageError
from launcher.jobs.job import Job
from launcher.modes import fields_of, flag
from launcher.worker import drill

KILL, FREEZE, PREEMPT, CORRUPT = "kill", "freeze", "preempt", "corrupt_checkpoint"
KINDS = (KILL, FREEZE, drill.EXCEPTION, drill.STUCK, PREEMPT, drill.DISK_FULL, CORRUPT, drill.FLIP_BIT)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrillPlan:
    """One fault of one drill, in one worker.

    Attributes:
      step: it happens when that worker reports this step or a later one; None for soon after a checkpoint.
      reference: model_dir of a finished run that nobody disturbed, to compare the result with; None for no comparison.
    """

    kind: str
    worker: int
    step: int | None = None
    reference: Path | None = None

    @property
    def in_worker(self) -> bool:
        """Whether the worker makes the fault itself, when told."""
        return self.kind in drill.KINDS


def make_plan(options: flags.FlagValues, job: Job) -> DrillPlan | None:
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
    return DrillPlan(kind=kind, worker=worker, step=step, reference=Path(reference) if reference else None)

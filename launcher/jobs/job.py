"""Job, command, worker and backend: the types that the supervisor and the backends share."""

from __future__ import annotations

import dataclasses
import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from launcher import modes
from launcher.errors import PeerError
from launcher.jobs.output import Tee
from launcher.jobs.policy import Outcome, Trouble
from launcher.machine.peers import START_TIMEOUT
from launcher.model_dir import lease
from launcher.reporting.attempts import ATTEMPT
from launcher.worker import progress

_ATTEMPT = re.compile(r"attempt_(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One training job, as the command line describes it.

    Attributes:
      identity: marks every process of the job; unlike that of any other job.
      module: the program each worker runs, by `python -m`.
      request: what it is asked for by `arguments`, its command line.
      model_dir: where the job leaves its results, also named in `arguments`.
      scratch: a local folder for what workers tell the supervisor.
      max_restarts: how often to restart without progress in between.
      stall_timeout_seconds: longest time without progress; None to derive it from the pace of the steps.
      start_timeout_seconds: longest time until a worker's first report.
      grace_period_seconds: how long workers may go on after a signal.
      member: where the others belong to supervisors of their own, with one `model_dir` for all: the rank of the only
        worker of this one. None where all workers are this supervisor's.
      checks_hosts: whether the doctor looks at every worker's place before an attempt.
      leaves_out_stragglers: whether a straggler's host is left out, where others are enough.
      on_event: the words of a command that is told of restarts and of the end; see `EventHook`.
      is_pod: whether Kubernetes replaces what ends with 42 without counting it.
    """

    identity: str
    workers: int
    module: str
    arguments: tuple[str, ...]
    model_dir: str
    scratch: Path
    request: modes.Request = dataclasses.field(default_factory=modes.Request)
    max_restarts: int = 0
    stall_timeout_seconds: float | None = None
    start_timeout_seconds: float = 0.0
    grace_period_seconds: float = 0.0
    member: int | None = None
    is_pod: bool = False
    checks_hosts: bool = False
    leaves_out_stragglers: bool = False
    on_event: tuple[str, ...] = ()

    def log(self, attempt: int, rank: int) -> Path:
        return Path(self.model_dir, "logs", f"attempt_{attempt}", f"worker_{rank}.log")

    def command(self, attempt: int, rank: int, *, python: str, environ: Mapping[str, str]) -> Command:
        """One worker of an attempt, run by the interpreter `python`, with `environ` beside what every worker gets."""
        everybodys = {
            lease.JOB: self.identity,
            ATTEMPT: self.attempt_name(attempt),
            START_TIMEOUT: f"{self.start_timeout_seconds:g}",
        }
        argv = (python, "-m", self.module, *self.arguments)
        return Command(rank=rank, argv=argv, environ={**environ, **everybodys}, log=self.log(attempt, rank))

    def attempt_name(self, number: int) -> str:
        """The name of an attempt in attempts.jsonl, unlike those of all other jobs."""
        return f"{self.identity}/{number}"

    def next_attempt(self) -> int:
        """1 in a new model_dir; earlier attempts, also of earlier commands, keep their numbers and their logs."""
        logs = Path(self.model_dir, "logs")
        if self.member is None:
            names = [path.name for path in logs.glob("attempt_*")]
        else:  # the folder of a new attempt may be there already, if a peer was faster
            names = [path.parent.name for path in logs.glob(f"attempt_*/worker_{self.member}.*")]
        return 1 + max((int(match[1]) for match in map(_ATTEMPT.fullmatch, names) if match), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """One worker of one attempt: what is run, with which variables beside the inherited ones, on which processors
    (() for all), and its files, of which those of a worker elsewhere are for its agent to choose; whether it prints to
    its log alone."""

    rank: int
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    log: Path
    progress_file: Path = Path()
    error_file: Path = Path()
    processors: tuple[int, ...] = ()
    is_quiet: bool = False

    def given(self, variables: Mapping[str, str]) -> Command:
        """This worker with more variables."""
        return dataclasses.replace(self, environ={**self.environ, **variables})

    def reporting_in(self, folder: Path) -> Command:
        """This worker with files in `folder`, one of the host it runs on, for what it tells the supervisor."""
        reports, errors = progress.files(folder, self.rank)
        told = {progress.PROGRESS_FILE: str(reports), progress.ERROR_FILE: str(errors)}
        return dataclasses.replace(self.given(told), progress_file=reports, error_file=errors)

    def __str__(self) -> str:
        """The line a shell would run."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*variables, *map(shlex.quote, self.argv)])


class NotReady(PeerError):
    """An attempt cannot begin: a host is not there, or cannot start a worker.

    Attributes:
      rank: the first worker that there would have been.
      may_pass: whether a further attempt may fare better.
      is_outage: whether it may do so in a little time, which nobody has waited yet.
    """

    def __init__(self, message: str, rank: int, *, may_pass: bool = True, is_outage: bool = False):
        super().__init__(message)
        self.rank = rank
        self.may_pass = may_pass
        self.is_outage = is_outage


@dataclasses.dataclass(eq=False)
class Worker:
    """A started worker, wherever it runs, as its backend has seen it last.

    Attributes:
      tee: what it has printed so far.
      send: sends a signal to the worker, not to the processes it started; does nothing once it has ended.
      exit_code: as `subprocess` has it, negative for a signal; None while it runs.
      is_frozen: whether somebody stopped the process, as SIGSTOP does.
      last_alive: the latest time, on this host's monotonic clock, at which it was seen running.
      report: where it is, as it last said.
      error: why it is ending, if it said so.
      trouble: why it cannot go on though it has not ended: it was not started, its host was lost, or it still runs
        after `Backend.clear`; else None.
    """

    command: Command
    tee: Tee
    send: Callable[[int], None]
    exit_code: int | None = None
    is_frozen: bool = False
    last_alive: float = dataclasses.field(default_factory=time.monotonic)
    report: progress.Report | None = None
    error: progress.ErrorRecord | None = None
    trouble: Trouble | None = None


def outcomes(workers: Iterable[Worker]) -> list[Outcome]:
    """Outcomes of workers, in their order; what is frozen has no trouble of its own yet."""
    return [
        Outcome(rank=w.command.rank, exit_code=w.exit_code, error=w.error, last_alive=w.last_alive, trouble=w.trouble)
        for w in workers
    ]


class Backend(Protocol):
    """The start of a job's workers in one kind of place."""

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Makes sure that workers can be started; returns early when `stop` says that they need not be.

        Raises:
          NotReady: they cannot, for now.
          UsageError: they cannot, and will not be until somebody has mended what the message names.
        """

    def commands(self, attempt: int) -> tuple[Command, ...]:
        """The commands of an attempt, in the order of rank."""

    def plan(self, attempt: int) -> str:
        """The commands of an attempt, as --dry_run prints them; needs no `prepare`, and does nothing."""

    def start(self, commands: tuple[Command, ...]) -> list[Worker]:
        """Starts an attempt's workers; if one cannot be started, none is left running.

        Raises:
          NotReady: one cannot be started.
        """

    def pump(self, timeout_seconds: float) -> None:
        """Passes on what workers print, and sees how they are; returns after `timeout_seconds` or a little later.

        What an ended worker has left running is ended.
        """

    def can_grow(self) -> bool:
        """Whether more workers could run than do, of those that the job has."""

    def leave_out(self, rank: int, why: str) -> str:
        """Starts no more workers on a worker's host, where others are enough; returns "" then, or that host's name."""

    def clear(self, cause: Outcome | None = None) -> None:
        """Makes sure that nothing of the attempt still runs, as far as it can be killed, and forgets it.

        `cause` is the worker that it failed by.
        """

    def close(self) -> None:
        """Releases whatever the backend holds; nothing runs any more."""

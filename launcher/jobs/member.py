"""One worker of a cluster that somebody else starts: a task of Slurm, a pod of Kubernetes, the program on a TPU VM.

The environment says who the peers are, and the worker reads it for itself; each of them has a supervisor like this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from launcher.jobs.job import Command, Job, Worker, describe
from launcher.jobs.local import LocalBackend, make_command
from launcher.jobs.output import Console
from launcher.machine import cluster


class MemberBackend:
    """Starts the worker whose place among its peers `environ` tells.

    Args:
      job: what is run; `member` is this worker's rank.
      console: where its output goes.
      environ: what it inherits, all of it.
    """

    def __init__(self, job: Job, console: Console, environ: Mapping[str, str]):
        self._job = job
        self._processes = LocalBackend(job, console, environ)

    def prepare(self, stop: Callable[[], bool]) -> None:
        """This host is always there."""

    def plan(self, attempt: int) -> str:
        """What an attempt would run, for a person to read."""
        return describe(self.commands(attempt))

    def commands(self, attempt: int) -> tuple[Command, ...]:
        """What an attempt would run: one worker."""
        assert self._job.member is not None
        return (make_command(self._job, attempt, self._job.member, {}),)

    def start(self, commands: tuple[Command, ...]) -> list[Worker]:
        """Starts the worker."""
        return self._processes.start(commands)

    def pump(self, timeout_seconds: float) -> None:
        """Passes on what it prints; returns after `timeout_seconds` at the latest."""
        self._processes.pump(timeout_seconds)

    def clear(self) -> None:
        """Kills what still runs of it."""
        self._processes.clear()

    def close(self) -> None:
        """Kills what still runs of it and lets go of what the attempts needed."""
        self._processes.close()


def rank(environ: Mapping[str, str]) -> int:
    """This member's place among its peers; 0 without any.

    Raises:
      UsageError: the environment contradicts itself.
    """
    return cluster.resolve(environ).index

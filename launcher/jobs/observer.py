"""What a supervisor lets somebody see and change of a job under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from launcher.jobs.job import Command, Worker
from launcher.jobs.policy import Verdict


class Observer(Protocol):
    """Is told of a job's attempts while they happen; what it raises ends the job."""

    def commands(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        """Before an attempt, when nothing of the one before runs any more; returns what to start."""

    def turn(self, workers: Sequence[Worker]) -> None:
        """Some times a second, after the workers have been brought up to date."""

    def judged(self, workers: Sequence[Worker], verdict: Verdict) -> None:
        """At the end of an attempt, when its cause is known and before the rest is ended."""


class NoObserver:
    """Sees and changes nothing."""

    def commands(self, commands: tuple[Command, ...]) -> tuple[Command, ...]:
        return commands

    def turn(self, workers: Sequence[Worker]) -> None:
        pass

    def judged(self, workers: Sequence[Worker], verdict: Verdict) -> None:
        pass

"""The report of an attempt's first error: which worker failed first, why, and that the others are victims."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.jobs.policy import Outcome, WorkerState
from launcher.machine.child_process import signal_name

FILE_NAME = "error.json"

_SAME = "had the same error"
_LAST_LINES = 40
_TRACEBACK_LINES = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstError:
    """The failure that ended an attempt: its cause, the log and what that worker printed last, and how all stood."""

    attempt: int
    cause: Outcome
    outcomes: Sequence[Outcome]
    log: Path
    printed: Sequence[str] = ()
    time: float = dataclasses.field(default_factory=time.time)

    @property
    def headline(self) -> str:
        """One line: the worker, and what became of it."""
        error = self.cause.error
        said = f": {error.type}: {next(iter(error.message.strip().splitlines()), '')}" if error else ""
        return f"worker {self.cause.rank} {what_happened(self.cause)}{said}"

    @property
    def ended_by(self) -> str:
        """The end of the attempt, in one line, as attempts.jsonl has it."""
        if self.cause.state in (WorkerState.FROZEN, WorkerState.STUCK):
            return f"stalled: {self.headline}"
        return f"failed: {self.headline}" if self.cause.error else self.headline.partition(" (")[0]

    def record(self, *, exit_code: int | None) -> dict[str, Any]:
        """The contents of error.json; `exit_code` is the job's, None when it goes on."""
        error = self.cause.error
        return {
            "attempt": self.attempt,
            "worker": self.cause.rank,
            "what": what_happened(self.cause),
            "exit_code": self.cause.code,
            "error": dataclasses.asdict(error) if error else None,
            "last_lines": self.last_lines,
            "log": str(self.log),
            "victims": [{"worker": rank, "what": what} for rank, what in self._victims.items()],
            "job_exit_code": exit_code,
            "time": self.time,
        }

    def text(self) -> str:
        """The report for the terminal."""
        lines = [f"First error (attempt {self.attempt}): {self.headline}"]
        error = self.cause.error
        if error and not error.traceback:
            lines += [f"  {line}" for line in error.message.strip().splitlines()[1:]]
        elif error:
            trace = error.traceback.rstrip().splitlines()
            lines += ["  traceback:"] + [f"  | {line}" for line in trace[-_TRACEBACK_LINES:]]
        else:
            lines += [f"  last lines of {self.log}:" if self.last_lines else f"  it printed nothing to {self.log}"]
            lines += [f"  | {line}" for line in self.last_lines]
        same = [f"worker {rank}" for rank, what in self._victims.items() if what == _SAME]
        others = [f"worker {rank} {what}" for rank, what in self._victims.items() if what != _SAME]
        lines += [f"  The same error in: {', '.join(same)}"] if same else []
        lines += [f"  Victims of it, not causes: {'; '.join(others)}"] if others else []
        return "\n".join(lines)

    @property
    def last_lines(self) -> list[str]:
        """The end of the log, without the empty lines after it."""
        return "\n".join(self.printed).rstrip().splitlines()[-_LAST_LINES:]

    @property
    def _victims(self) -> dict[int, str]:
        return {
            outcome.rank: _beside(outcome, self.cause) for outcome in self.outcomes if outcome.rank != self.cause.rank
        }


def what_happened(outcome: Outcome) -> str:
    """The end of a sentence that begins with "worker 3"."""
    if outcome.trouble:
        return outcome.trouble.what
    if outcome.code is None:
        return "was running"
    if outcome.code >= 0:
        return f"ended with exit code {outcome.code}"
    name = signal_name(-outcome.code)
    hint = " (the kernel's, when memory ran out? see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _beside(outcome: Outcome, cause: Outcome) -> str:
    if outcome.trouble and outcome.trouble == cause.trouble:
        return _SAME  # on one host, say, which was lost
    mine, first = outcome.error, cause.error
    is_same = mine and first and (mine.type, mine.message) == (first.type, first.message)
    return _SAME if is_same else what_happened(outcome)

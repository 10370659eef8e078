"""The restart policy: worker states, who failed first, and what the job does about it. Decides, does nothing."""

import dataclasses
import enum
import random
from collections.abc import Sequence

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_RETRY, EXIT_USAGE
from launcher.worker.progress import ErrorRecord

# What TensorFlow raises in the survivors when another worker has gone. Its coordination service ends those that do not
# get that far with a bare exit(1).
_PEER_ERRORS = {"UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "PeerError"}
_BARE_EXIT = 1

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 60.0
# What a machine, a network or a server needs to come back: as long as hosts are tried by default (--connect_timeout).
_OUTAGE_SECONDS = 60.0


class WorkerState(enum.Enum):
    """The state of one worker, as torchelastic's `WorkerState` (torch.distributed.elastic.agent.server.api) has it."""

    HEALTHY = "runs, and nothing speaks against it"
    SUCCEEDED = "ended with exit code 0"
    PREEMPTED = "saved when it was asked to stop, and ended with 42"
    FATAL = "ended with 64 or 70: a retry will not help"
    FAILED = "ended in any other way: a retry may help"
    VICTIM = "ended as workers do when another one has failed, so it may not be the cause"
    # These have not ended, and no attempt can go on with them.
    NOT_STARTED = "could not be started, or has never reported"
    LOST = "is on a host that is not heard of any more"
    FROZEN = "was stopped by a signal"
    STUCK = "makes no progress and holds the others up"
    UNKILLABLE = "runs though it was killed"


_STATES_OF_GOOD_ENDS = {EXIT_DONE: WorkerState.SUCCEEDED, EXIT_PREEMPTED: WorkerState.PREEMPTED}
_NOT_FAILED = (WorkerState.HEALTHY, *_STATES_OF_GOOD_ENDS.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trouble:
    """The supervisor's complaint about a worker that has not ended.

    Attributes:
      what: the end of a sentence that begins with "worker 3": "is stuck: …", "was lost: …".
      is_outage: whether it showed at once, and waiting a little may be all that it needs.
    """

    state: WorkerState
    what: str
    is_outage: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The standing of one worker when its attempt ended.

    Attributes:
      exit_code: negative for a signal; None when it was still running and did not say that it failed.
      error: its own record of why it failed.
      last_alive: monotonic seconds; without an error record, it failed after this.
      trouble: what the supervisor holds against it though it has not ended.
    """

    rank: int
    exit_code: int | None = None
    error: ErrorRecord | None = None
    last_alive: float = 0.0
    trouble: Trouble | None = None

    @property
    def code(self) -> int | None:
        """The exit code, announced or real."""
        return self.error.exit_code if self.error else self.exit_code

    @property
    def state(self) -> WorkerState:
        """The state by the exit code, announced or real, and the error; the trouble's, if there is any."""
        if self.trouble:
            return self.trouble.state
        if self.code is None:
            return WorkerState.HEALTHY
        if self.code in _STATES_OF_GOOD_ENDS:
            return _STATES_OF_GOOD_ENDS[self.code]
        if self.error.type in _PEER_ERRORS if self.error else self.code in (_BARE_EXIT, EXIT_RETRY):
            return WorkerState.VICTIM
        return WorkerState.FATAL if self.code in (EXIT_USAGE, EXIT_FAILED) else WorkerState.FAILED

    @property
    def is_outage(self) -> bool:
        """Whether something outside of the worker failed that may come back: a disk, a network, a server of data."""
        return self.trouble.is_outage if self.trouble else self.error is not None and self.code == EXIT_RETRY

    @property
    def failed_at(self) -> float:
        """When it failed, at the earliest; what was in trouble without ending was so before anybody else noticed."""
        if self.trouble:
            return float("-inf")
        # A worker that dies without a word is seen dead some time after; its peers' complaints may be written sooner.
        return self.error.monotonic if self.error else self.last_alive


def find_cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The worker that failed first: the earliest failure that is not the echo of another; None when none failed."""
    failed = [outcome for outcome in outcomes if outcome.state not in _NOT_FAILED]

    def order(outcome: Outcome) -> tuple[bool, float, int]:
        return outcome.state is WorkerState.VICTIM, outcome.failed_at, outcome.rank

    return min(failed, key=order, default=None)


class Action(enum.Enum):
    """The kinds of decision about a job."""

    DONE = "done"
    STOP = "stopped"
    GIVE_UP = "given up"
    RESTART = "restarted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision after an attempt: what becomes of the job, with which exit code, and because of whom."""

    action: Action
    exit_code: int
    cause: Outcome | None = None


def decide(outcomes: Sequence[Outcome]) -> Decision:
    """The decision by the exit codes, once all are done or one worker has failed or was preempted.

    Returns:
      RESTART where a retry can help; whether it is allowed is for `Restarts` to say.
    """
    cause = find_cause(outcomes)
    if cause and cause.code and cause.state is WorkerState.FATAL:
        return Decision(action=Action.GIVE_UP, exit_code=cause.code, cause=cause)
    if any(outcome.state is WorkerState.PREEMPTED for outcome in outcomes):
        return Decision(action=Action.STOP, exit_code=EXIT_PREEMPTED, cause=cause)
    if cause is None:
        return Decision(action=Action.DONE, exit_code=EXIT_DONE)
    return Decision(action=Action.RESTART, exit_code=EXIT_RETRY, cause=cause)


class Restarts:
    """Counts restarts since the job last made progress; what never started is counted by itself.

    Attributes:
      best_step: the last step that an attempt has reached, -1 for none.
      not_started: attempts in a row, up to now, that did not start.
      total: restarts so far.
    """

    def __init__(self, allowed: int, step: int):
        self._allowed = allowed
        self.best_step = step
        self.not_started = self._without_progress = self._tries = 0
        self._outage_since: float | None = None
        self.total = 0

    def may_restart(self, step: int, cause: Outcome, now: float) -> bool:
        """Whether one more restart is allowed after an attempt that got to `step`; counts it. `now` is monotonic.

        Progress is a step that no attempt had reached: one that fails at the same step each time makes none. An outage
        is waited for although the allowed restarts are used up: they may be so within seconds.
        """
        if step > self.best_step:
            self.best_step = step
            self.not_started = self._without_progress = self._tries = 0
            self._outage_since = None
        self._tries += 1
        if cause.state is WorkerState.NOT_STARTED:
            self.not_started += 1
        else:
            self.not_started = 0
            self._without_progress += 1
        waits = False
        if cause.is_outage and self._allowed:
            self._outage_since = now if self._outage_since is None else self._outage_since
            waits = now - self._outage_since < _OUTAGE_SECONDS
        if (self.not_started or self._without_progress) > self._allowed and not waits:
            return False
        self.total += 1
        return True

    def describe(self) -> str:
        """The number of the allowed restarts that are used."""
        if self.not_started:
            return f"try {self.not_started}: what does not start is not counted"
        if self._without_progress > self._allowed:
            return f"restart {self._without_progress} without progress: an outage has {_OUTAGE_SECONDS:g} s to pass"
        return f"restart {self._without_progress} of at most {self._allowed} without progress"

    def delay_seconds(self) -> float:
        """Seconds to wait before the restart: not at all the first time, which a machine that is gone explains.

        Then doubled each time, bounded, and jittered so that jobs do not march.
        """
        if self._tries <= 1:
            return 0.0
        bound = min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2 ** (self._tries - 1))
        return bound * random.uniform(0.5, 1.0)

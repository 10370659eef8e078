"""Who failed first and what follows, as far as no process is needed to tell."""

from __future__ import annotations

import pytest

from launcher.jobs.policy import Action, Outcome, Restarts, Trouble, WorkerState, decide, find_cause
from launcher.worker.progress import ErrorRecord

FROZEN = Trouble(state=WorkerState.FROZEN, what="is frozen")
STUCK = Trouble(state=WorkerState.STUCK, what="is stuck")


def raised(rank, kind, code, at):
    error = ErrorRecord(type=kind, message="", traceback="", exit_code=code, time=0.0, monotonic=at)
    return Outcome(rank=rank, exit_code=None, error=error, last_alive=at + 5)


def ended(rank, code, at=0.0):
    return Outcome(rank=rank, exit_code=code, last_alive=at)


@pytest.mark.parametrize(
    ("outcomes", "rank"),
    [
        ([ended(0, 1, at=1.0), ended(1, -9, at=2.0)], 1),  # a survivor's exit 1 is never the cause
        ([raised(0, "UnavailableError", 75, at=1.0), raised(1, "ValueError", 70, at=2.0)], 1),
        ([raised(0, "CheckpointWriteError", 75, at=1.0), raised(1, "InternalError", 70, at=2.0)], 0),
        ([raised(0, "InternalError", 70, at=2.01), ended(1, -9, at=2.0)], 1),  # seen dead later than it was mourned
        ([raised(0, "ValueError", 70, at=1.0), ended(1, -9, at=2.0)], 0),
        ([ended(0, 1, at=1.0), ended(1, None, at=9.0), ended(2, 1, at=2.0)], 0),
        ([ended(0, -9, at=1.0), Outcome(rank=1, last_alive=9.0, trouble=FROZEN)], 1),
        ([ended(0, 0), ended(1, 42)], None),
    ],
)
def test_the_cause_is_the_earliest_failure_that_echoes_no_other(outcomes, rank):
    cause = find_cause(outcomes)
    assert (cause.rank if cause else None) == rank


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (ended(0, None), WorkerState.HEALTHY),
        (ended(0, 0), WorkerState.SUCCEEDED),
        (ended(0, 42), WorkerState.PREEMPTED),
        (ended(0, 64), WorkerState.FATAL),
        (raised(0, "ValueError", 70, at=1.0), WorkerState.FATAL),
        (ended(0, -9), WorkerState.FAILED),
        (raised(0, "CheckpointWriteError", 75, at=1.0), WorkerState.FAILED),
        (ended(0, 1), WorkerState.VICTIM),
        (ended(0, 75), WorkerState.VICTIM),
        (raised(0, "CancelledError", 70, at=1.0), WorkerState.VICTIM),
        (Outcome(rank=0, exit_code=0, trouble=FROZEN), WorkerState.FROZEN),
    ],
)
def test_the_state_of_a_worker_follows_from_its_end_or_from_what_is_held_against_it(outcome, state):
    assert outcome.state is state


@pytest.mark.parametrize(
    ("outcomes", "action", "exit_code"),
    [
        ([ended(0, 0), ended(1, 0)], Action.DONE, 0),
        ([ended(0, 64), ended(1, 1)], Action.GIVE_UP, 64),
        ([raised(0, "ValueError", 70, at=1.0), ended(1, 1)], Action.GIVE_UP, 70),
        ([raised(0, "InternalError", 70, at=2.0), ended(1, -9, at=1.0)], Action.RESTART, 75),  # 70 in a victim
        ([raised(0, "CancelledError", 70, at=1.0), ended(1, 1)], Action.RESTART, 75),
        ([ended(0, 42), ended(1, 42)], Action.STOP, 42),
        ([ended(0, 42), ended(1, 1)], Action.STOP, 42),
        ([ended(0, 42), ended(1, None)], Action.STOP, 42),
        ([ended(0, 42, at=2.0), ended(1, 70, at=1.0)], Action.GIVE_UP, 70),
        ([ended(0, 1), ended(1, 1)], Action.RESTART, 75),
        ([ended(0, 75), ended(1, 0)], Action.RESTART, 75),
        ([ended(0, 137), ended(1, 0)], Action.RESTART, 75),
        ([Outcome(rank=0, trouble=STUCK), ended(1, None)], Action.RESTART, 75),
    ],
)
def test_exit_codes_decide_between_retry_and_giving_up(outcomes, action, exit_code):
    verdict = decide(outcomes)
    assert (verdict.action, verdict.exit_code) == (action, exit_code)


def test_restarts_are_counted_since_the_last_new_step():
    restarts = Restarts(2, step=10)
    found = [restarts.may_restart(step, ended(0, -9), now=0.0) for step in (10, 11, 11, 12, 12, 12)]
    assert found == [True, True, True, True, True, False]
    assert restarts.total == 5


OUTAGE = raised(0, "ConnectionError", 75, at=1.0)
NOT_STARTED = Outcome(rank=0, trouble=Trouble(state=WorkerState.NOT_STARTED, what="did not start", is_outage=True))


@pytest.mark.parametrize("cause", [OUTAGE, NOT_STARTED])
def test_an_outage_has_a_minute_and_no_more_than_the_first_of_them_since_progress(cause):
    restarts = Restarts(1, step=0)
    assert restarts.may_restart(0, ended(0, -9), now=0.0)
    assert all(restarts.may_restart(0, cause, now=now) for now in (3000.0, 3001.0, 3059.0))
    assert not restarts.may_restart(0, cause, now=3061.0)
    assert restarts.may_restart(1, cause, now=5000.0) and restarts.may_restart(1, cause, now=5030.0)
    assert not Restarts(0, step=0).may_restart(1, cause, now=0.0)


def test_what_did_not_start_uses_up_no_restart():
    restarts = Restarts(2, step=0)
    causes = [ended(0, -9), *[NOT_STARTED] * 9, ended(0, -9), ended(0, -9)]
    assert [restarts.may_restart(0, cause, now=0.0) for cause in causes] == [*[True] * 11, False]


def test_hosts_that_were_tried_for_long_are_tried_as_often_as_there_are_restarts():
    away = Outcome(rank=0, trouble=Trouble(state=WorkerState.NOT_STARTED, what="did not start"))
    restarts = Restarts(2, step=0)
    assert [restarts.may_restart(0, away, now=0.0) for _ in range(3)] == [True, True, False]


def test_waiting_grows_up_to_a_bound_and_starts_over_with_progress():
    restarts = Restarts(100, step=0)
    longest = []
    for _ in range(12):
        restarts.may_restart(0, ended(0, -9), now=0.0)
        longest.append(max(restarts.delay_seconds() for _ in range(50)))
    assert longest[0] == 0 < longest[1]
    assert longest == sorted(longest[:7]) + longest[7:] and all(30 < delay <= 60 for delay in longest[7:])
    restarts.may_restart(1, ended(0, -9), now=0.0)
    assert restarts.delay_seconds() == 0

"""The supervisor of a job: starts its workers, watches them, and decides with `policy` what their end means."""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, EXIT_RETRY, EXIT_USAGE
from launcher.jobs import first_error, host_checks
from launcher.jobs.drill.rehearsal import Drill
from launcher.jobs.event_hook import EventHook
from launcher.jobs.first_error import FirstError
from launcher.jobs.job import Backend, Command, Job, NotReady, Worker
from launcher.jobs.job import outcomes as outcomes_of
from launcher.jobs.job_folder import JobFolder
from launcher.jobs.output import JobConsole
from launcher.jobs.policy import Action, Decision, Outcome, Restarts, Trouble, WorkerState, decide, find_cause
from launcher.jobs.stalls import AwakeClock, Stall, StallDetector, find_stuck, parse_stacks
from launcher.machine.child_process import signal_name
from launcher.model_dir.lease import Lease, LeaseLostError
from launcher.reporting.attempts import PREEMPTED, Beginning
from launcher.worker import preemption, progress
from launcher.worker.preemption import REPEAT_SECONDS

_TURN_SECONDS = 0.05
_SAVED_SECONDS = 5.0  # between looks for a new checkpoint, when hosts have come back
# How long the others may take to show their part after the first failure, before they are killed: an error that was
# raised may be the echo of a death that is only seen a moment later.
_SETTLE_SECONDS = 1.0
_SETTLE_SYMPTOM_SECONDS = 3.0
_DUMP_SECONDS = 5.0
_REST_SECONDS = 0.5  # for the rest of a dump that has begun
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one job, of whose folder it holds the lease; rehearses a fault where there is a drill."""

    def __init__(self, *, job: Job, backend: Backend, console: JobConsole, held: Lease, drill: Drill | None = None):
        self._job = job
        self._backend = backend
        self._console = console
        self._held = held
        self._drill = drill
        self._signals: list[int] = []
        self._attempts = 0
        self._step = self._first_step = -1
        self._more_since: int | None = None  # the newest step that was saved when more workers could run
        self._straggler: int | None = None  # the worker of this attempt that was called so last
        self._asked_for_step = 0.0
        self._first_error: FirstError | None = None
        self._folder = JobFolder(job, console, self._pump)
        self._hook = EventHook(() if job.member else job.on_event, console.note)  # one for all members
        self._began = Beginning()
        self._why_no_more = ""
        self._mistake = ""

    def run(self) -> int:
        """Runs attempts until the job is done or a further one is pointless; returns the job's exit code.

        Nothing that it started is still running afterwards.
        """
        with listening(self._signals):
            try:
                number = self._folder.next_attempt()
                self._first_step = self._folder.newest_step()
                restarts = Restarts(self._job.max_restarts, self._first_step)
                self._folder.forget_error(before=number)
                while True:
                    decision = self._attempt(number)
                    self._note_end(number, decision)
                    decision = self._settle_restart(decision, restarts)
                    if decision.action is not Action.RESTART:
                        break
                    self._tell(decision, restarts)
                    number += 1
            finally:
                self._backend.close()
        self._conclude(decision, restarts, self._job.log(number, 0).parent)
        return decision.exit_code

    # -------------------------------------------------------------------------------------------------- one attempt

    def _attempt(self, number: int) -> Decision:
        self._attempts += 1
        self._began = Beginning()
        self._first_error = None
        try:
            if number > 1:
                self._folder.check_writable()
            while True:
                self._backend.prepare(lambda: bool(self._signals))
                if self._signals:
                    return self._stopped_between()
                commands = self._backend.commands(number)
                if not self._job.checks_hosts or self._check(number, commands):
                    break
            if self._signals:
                return self._stopped_between()
            if self._attempts > 1:
                commands = tuple(command.given({progress.RESTARTED: "1"}) for command in commands)
            told = f"attempt {number}: starting {len(commands)} worker(s), logs in {commands[0].log.parent}"
            self._console.note(told)
            workers = self._backend.start(self._drill.commands(commands) if self._drill else commands)
        except NotReady as error:
            if self._attempts == 1:
                raise
            return self._not_started(number, error)
        cause = None
        try:
            decision, outcomes = self._watch(workers)
            cause = decision.cause
            if self._drill:
                self._drill.ended(decision)
        finally:
            self._backend.clear(cause)
        decision = self._account_for_the_living(workers, decision)
        if decision.cause is not None:
            (said,) = (worker.tee.tail(100) for worker in workers if worker.command.rank == decision.cause.rank)
            self._keep_error(number, decision.cause, outcomes, said)
        return decision

    def _check(self, number: int, commands: Sequence[Command]) -> bool:
        self._console.note(f"attempt {number}: checking the places of {len(commands)} worker(s)")

        def ended(workers: Sequence[Worker], seconds: float) -> bool:
            self._turn_until(lambda: bool(self._signals) or _have_ended(workers), workers, seconds)
            return not self._signals

        return host_checks.check(self._backend, commands, ended)

    def _keep_error(self, number: int, cause: Outcome, outcomes: Sequence[Outcome], said: Sequence[str] = ()) -> None:
        log = self._job.log(number, cause.rank)
        self._first_error = FirstError(attempt=number, cause=cause, outcomes=outcomes, log=log, printed=said)

    def _note_end(self, number: int, decision: Decision) -> None:
        """Adds to attempts.jsonl what the chief cannot know: what ended it, or that it never began."""
        if decision.exit_code in (EXIT_DONE, EXIT_USAGE) or self._held.is_lost or self._job.member:
            return  # the chief has told of it, and where flags are wrong, there was nothing
        if self._first_error is not None:
            ended_by = self._first_error.ended_by
        elif decision.exit_code == EXIT_PREEMPTED:
            ended_by = PREEMPTED
        else:
            ended_by = f"stopped by {signal_name(self._signals[0])}"
        self._folder.end_attempt(number, since=self._began, ended_by=ended_by)

    def _not_started(self, number: int, error: NotReady) -> Decision:
        cause = Outcome(rank=error.rank, trouble=_not_started(str(error), is_outage=error.is_outage))
        self._keep_error(number, cause, [cause])
        if error.may_pass:
            return decide([cause])
        self._mistake = str(error)
        return Decision(action=Action.GIVE_UP, exit_code=EXIT_RETRY, cause=cause)

    def _account_for_the_living(self, workers: Sequence[Worker], decision: Decision) -> Decision:
        """Gives up where a worker of the attempt still runs: the next one would share its devices and its files."""
        living = [outcome for outcome in outcomes_of(workers) if outcome.state is WorkerState.UNKILLABLE]
        for outcome in living:
            self._console.note(f"worker {outcome.rank} {first_error.what_happened(outcome)}")
        if not living or decision.action in (Action.DONE, Action.GIVE_UP):
            return decision
        self._why_no_more = f"the next attempt would share what worker {living[0].rank} still holds"
        return Decision(action=Action.GIVE_UP, exit_code=EXIT_RETRY, cause=living[0])

    def _watch(self, workers: Sequence[Worker]) -> tuple[Decision, list[Outcome]]:
        """Turns until the attempt is over, one way or the other."""
        clock = AwakeClock(time.monotonic())
        watch = StallDetector(
            timeout_seconds=self._job.stall_timeout_seconds, start_timeout_seconds=self._job.start_timeout_seconds
        )
        are_asked = grows = False
        self._more_since = self._straggler = None
        while True:
            self._turn(workers)
            outcomes = outcomes_of(workers)
            if self._signals:
                return self._stop(workers)
            # Those who wait for a worker that stops cannot hear it from it.
            is_stopping = any(worker.report and worker.report.stopping for worker in workers)
            why = "" if are_asked or is_stopping else self._why_other_hosts(workers)
            if why:
                self._console.note(f"{why}: all workers are asked to save and end, to go on with other hosts")
            if why or (is_stopping and not are_asked):
                are_asked, grows = True, bool(why)
                for worker in workers:
                    worker.send(signal.SIGTERM)
            try:
                self._held.check()
            except LeaseLostError as error:
                self._console.error(str(error))
                return Decision(action=Action.STOP, exit_code=error.exit_code), outcomes
            states = {outcome.state for outcome in outcomes}
            if states == {WorkerState.SUCCEEDED}:
                break
            if WorkerState.PREEMPTED in states:
                self._wait_for_all(workers, self._job.grace_period_seconds)
                outcomes = outcomes_of(workers)
                break
            if find_cause(outcomes):
                outcomes = self._settle(workers)
                break
            now = clock.advance(time.monotonic())
            if watch.has_frozen(now, [worker.command.rank for worker in workers if worker.is_frozen]):
                outcomes = _with_frozen(workers)
                if find_cause(outcomes):  # and nobody has let it go on in this moment
                    break
            if stall := watch.observe(now, _reports_of_running(workers)):
                outcomes = self._blame(workers, stall)
                break
        decision = decide(outcomes)
        if grows and decision.action is Action.STOP and decision.cause is None:
            decision = Decision(action=Action.RESTART, exit_code=EXIT_PREEMPTED)
        return decision, outcomes

    def _why_other_hosts(self, workers: Sequence[Worker]) -> str:
        """A straggler's host has been left out, or more workers could run and a step has been saved since; else ""."""
        ranks = (worker.report.straggler for worker in workers if worker.report and self._job.leaves_out_stragglers)
        rank = next((rank for rank in ranks if rank not in (None, self._straggler)), None)
        if rank is not None:
            self._straggler = rank
            host = self._backend.leave_out(rank, f"worker {rank} is a straggler")
            if not host:
                return f"worker {rank} is a straggler"
            self._console.note(f"worker {rank} is a straggler, and {host} cannot be spared")
        if not self._backend.can_grow():
            self._more_since = None
            return ""
        now = time.monotonic()
        if self._more_since is not None and now < self._asked_for_step + _SAVED_SECONDS:
            return ""
        self._asked_for_step, step = now, self._folder.newest_step()
        self._more_since = step if self._more_since is None else self._more_since
        return "more hosts are there" if step > self._more_since else ""

    def _pump(self, seconds: float = 0.0) -> None:
        self._backend.pump(seconds)
        self._console.turn()

    def _turn(self, workers: Sequence[Worker]) -> None:
        self._pump(_TURN_SECONDS)
        for worker in workers:
            if worker.report is not None and worker.report.step is not None:
                self._step = max(self._step, worker.report.step)
        if self._drill:
            self._drill.turn(workers)

    def _turn_until(self, is_over: Callable[[], bool], workers: Sequence[Worker], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_over() and time.monotonic() < deadline:
            self._turn(workers)

    def _settle(self, workers: Sequence[Worker]) -> list[Outcome]:
        """Waits a moment for the failure behind the first one seen."""
        began = time.monotonic()
        while True:
            outcomes = _with_frozen(workers)
            cause = find_cause(outcomes)
            assert cause is not None
            waited = time.monotonic() - began
            # Nothing explains a signal but the signal; a worker that was stopped explains all the rest.
            explained = cause.trouble is not None or (cause.code or 0) < 0
            patience = _SETTLE_SYMPTOM_SECONDS if cause.state is WorkerState.VICTIM else _SETTLE_SECONDS
            if explained or waited > patience or self._signals or all(w.exit_code is not None for w in workers):
                return outcomes
            self._turn(workers)

    def _stop(self, workers: Sequence[Worker]) -> tuple[Decision, list[Outcome]]:
        """Passes a signal on, and ends the attempt within the grace period, or at once on a second signal."""
        number = self._signals[0]
        grace = self._job.grace_period_seconds
        self._console.note(
            f"{preemption.name(number)}: passed on to the workers, which have {grace:g} s to save and end; "
            f"a second signal, {REPEAT_SECONDS:g} s later or more, ends them at once"
        )
        for worker in workers:
            # All others ask for the same as SIGTERM does, and only that is known to save first.
            worker.send(number if number == signal.SIGINT else signal.SIGTERM)
        self._wait_for_all(workers, grace)
        outcomes = outcomes_of(workers)
        decision = decide(outcomes)
        have_ended = all(outcome.exit_code is not None for outcome in outcomes)
        if have_ended and decision.action in (Action.DONE, Action.STOP):
            return decision, outcomes
        told = decision.cause if decision.cause and decision.cause.error else None
        is_preempted = WorkerState.PREEMPTED in {outcome.state for outcome in outcomes}
        exit_code = EXIT_PREEMPTED if is_preempted or any(map(_was_starting, workers)) else 128 + number
        return Decision(action=Action.STOP, exit_code=exit_code, cause=told), outcomes

    def _wait_for_all(self, workers: Sequence[Worker], seconds: float) -> None:
        """Until they have ended, the time is over, or a second signal says that somebody will not wait.

        Where one has gone while it was starting, the attempt has not trained: the others have nothing to save.
        """
        self._turn_until(
            lambda: _have_ended(workers) or len(self._signals) > 1 or any(map(_was_starting, workers)), workers, seconds
        )

    # ------------------------------------------------------------------------------------------------------- stalls

    def _blame(self, workers: Sequence[Worker], stall: Stall) -> list[Outcome]:
        """Asks every worker for its stacks and names the one that holds the job up."""
        troubles: dict[int, Trouble] = {}
        if stall.silent:
            troubles = dict.fromkeys(stall.silent, _not_started(f"no report within {stall.seconds:.0f} s"))
            names = ", ".join(f"worker {rank}" for rank in stall.silent)
            self._console.note(f"no report from {names} within --start_timeout")
            self._dump_stacks(workers)
        else:
            self._console.note(f"no progress for {stall.seconds:.0f} s; the stacks of all workers follow")
            stacks = self._dump_stacks(workers)
            if running := _reports_of_running(workers):
                rank, reasons = find_stuck(running, stacks)
                what = f"is stuck: no progress for {stall.seconds:.0f} s, {reasons}"
                troubles = {rank: Trouble(state=WorkerState.STUCK, what=what)}
        outcomes = _with_frozen(workers)
        if any(outcome.trouble for outcome in outcomes):
            return outcomes  # Whoever is frozen is the one that holds up the others.
        return [dataclasses.replace(outcome, trouble=troubles.get(outcome.rank)) for outcome in outcomes]

    def _dump_stacks(self, workers: Sequence[Worker]) -> dict[int, list[list[str]]]:
        """The Python stacks of all who listen, by rank; they are in the logs too."""
        asked = [worker for worker in workers if worker.exit_code is None and worker.report is not None]
        before = {worker.command.rank: worker.tee.num_lines for worker in asked}
        for worker in asked:
            worker.send(signal.SIGUSR1)

        def stacks() -> dict[int, list[list[str]]]:
            return {w.command.rank: parse_stacks(w.tee.since(before[w.command.rank])) for w in asked}

        self._turn_until(lambda: all(stacks().values()), workers, _DUMP_SECONDS)
        self._turn_until(lambda: False, workers, _REST_SECONDS)
        return {rank: threads for rank, threads in stacks().items() if threads}

    # ---------------------------------------------------------------------------------------------- between attempts

    def _settle_restart(self, decision: Decision, restarts: Restarts) -> Decision:
        """Turns a restart into giving up where no more are allowed; otherwise waits until it is time."""
        if decision.action is not Action.RESTART or decision.cause is None:
            return decision  # without a cause, nothing has failed
        error = self._first_error
        assert error is not None
        # The folder may know of a step that no worker could tell of; where one has told of progress, it is not asked.
        step = self._step if self._step > restarts.best_step else max(self._step, self._folder.newest_step())
        if not restarts.may_restart(step, error.cause, time.monotonic()):
            no_progress = f"--max_restarts={self._job.max_restarts} is used up without progress past step"
            never = f"{restarts.not_started} attempt(s) in a row did not start"
            self._why_no_more = never if restarts.not_started else f"{no_progress} {max(0, self._step)}"
            exit_code = EXIT_RETRY
            if self._job.is_pod and self._folder.newest_step() > self._first_step:
                exit_code = EXIT_PREEMPTED
                self._console.note("there is a new checkpoint: ends with 42, for a new pod that is not counted")
            return Decision(action=Action.GIVE_UP, exit_code=exit_code, cause=decision.cause)
        beside = self._folder.write_error(error, exit_code=None)
        delay = restarts.delay_seconds()
        self._console.note("\n".join(filter(None, [error.text(), beside])))
        when = f"in {delay:.1f} s" if delay else "now"
        self._console.note(f"restarting all workers {when} ({restarts.describe()})")
        self._turn_until(lambda: bool(self._signals), (), delay)
        return self._stopped_between(decision) if self._signals else decision

    def _tell(self, decision: Decision, restarts: Restarts) -> None:
        """Tells the command of --on_event what becomes of the job; "text" is what chats show."""
        error = self._first_error.headline if self._first_error and decision.cause else None
        what = f"{decision.action.value} at step {max(0, self._step)}"
        self._hook.tell(
            event="restart" if decision.action is Action.RESTART else "end",
            text=f"{self._job.model_dir}: {what}" + (f": {error}" if error else ""),
            model_dir=self._job.model_dir,
            attempts=self._attempts,
            restarts=restarts.total,
            step=max(0, self._step),
            exit_code=decision.exit_code,
            error=error,
            time=time.time(),
        )

    def _stopped_between(self, decision: Decision | None = None) -> Decision:
        """The decision on a signal while no worker runs: the last state is saved, so SIGTERM is a preemption as any."""
        number = self._signals[0]
        exit_code = 128 + number if number == signal.SIGINT else EXIT_PREEMPTED
        return Decision(action=Action.STOP, exit_code=exit_code, cause=decision.cause if decision else None)

    def _conclude(self, decision: Decision, restarts: Restarts, logs: Path) -> None:
        error, beside = self._first_error, ""
        if self._held.ask():
            pass  # the folder is another run's now
        elif decision.action is Action.DONE:
            self._folder.forget_error()
        elif error is not None and decision.exit_code == EXIT_USAGE and self._attempts == 1:
            self._console.finish_logs()
            self._folder.remove_logs(logs)
        elif error is not None:
            beside = self._folder.write_error(error, exit_code=decision.exit_code)
        may_summarise = not self._job.member and not self._held.is_lost
        if decision.exit_code in (EXIT_FAILED, EXIT_RETRY) and error is not None and may_summarise:
            self._folder.ensure_summary(
                since=self._began, exit_code=decision.exit_code, error=error.headline, step=self._step
            )
        self._console.finish_logs()
        self._tell(decision, restarts)
        attempts, code = f"{self._attempts} attempt(s), {restarts.total} restart(s)", decision.exit_code
        self._console.note(f"job {decision.action.value}: {attempts}, exit code {code}")
        if self._mistake:
            self._console.error(f"error: {self._mistake}")
        elif decision.action is not Action.DONE and error is not None:
            self._console.error("\n".join(filter(None, [error.text(), beside])))
            if decision.action is Action.GIVE_UP and decision.exit_code == EXIT_RETRY:
                again = "The same command goes on from the last checkpoint."
                self._console.error(f"Gave up: {self._why_no_more}. {again}")
        self._hook.close()


def _have_ended(workers: Sequence[Worker]) -> bool:
    return all(worker.exit_code is not None or worker.trouble for worker in workers)


def _was_starting(worker: Worker) -> bool:
    """Whether SIGTERM ended it before it could answer, and before it had anything to save."""
    return worker.exit_code == -signal.SIGTERM and (worker.report is None or worker.report.step is None)


def _not_started(why: str, *, is_outage: bool = False) -> Trouble:
    return Trouble(state=WorkerState.NOT_STARTED, what=f"did not start: {why}", is_outage=is_outage)


def _reports_of_running(workers: Sequence[Worker]) -> dict[int, progress.Report | None]:
    return {worker.command.rank: worker.report for worker in workers if worker.exit_code is None}


def _with_frozen(workers: Sequence[Worker]) -> list[Outcome]:
    trouble = Trouble(state=WorkerState.FROZEN, what="is frozen: a signal such as SIGSTOP has stopped it")
    return [
        dataclasses.replace(outcome, trouble=trouble) if worker.is_frozen else outcome
        for worker, outcome in zip(workers, outcomes_of(workers), strict=True)
    ]


@contextlib.contextmanager
def listening(signals: list[int]) -> Iterator[None]:
    """Appends the signals that arrive to `signals`, instead of being ended by them; repeats are one signal."""
    noted_at = float("-inf")  # a process group, a scheduler's step and a script may each pass on the same signal

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal noted_at
        if signals and {number, signals[-1]} & preemption.notices:
            signals[-1] = number  # who warns is not impatient
        elif time.monotonic() - noted_at >= REPEAT_SECONDS:
            noted_at = time.monotonic()
            signals.append(number)

    # What is ignored stays so: nohup and a shell's & ask for that.
    heard = [number for number in {*_SIGNALS, *preemption.notices} if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in heard}
    try:
        yield
    finally:
        # Repeats of a signal that has been heard must not end this process with another exit code than the job's.
        if not signals:
            for number, handler in before.items():
                signal.signal(number, handler)

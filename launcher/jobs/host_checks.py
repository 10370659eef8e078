"""The gate before an attempt (--check_hosts): the doctor in every worker's place, on each host first, then on all."""

import dataclasses
from collections.abc import Callable, Sequence

from launcher.jobs.job import Backend, Command, NotReady, Worker, outcomes
from launcher.jobs.policy import Trouble, WorkerState, find_cause

# In the first, a host fails by itself, and so can be named; the second ends only where all are fit.
_CHECKS = ("driver,tensorflow,devices,gpus,peers,agreement", "collective")
_SECONDS = 300.0


def check(backend: Backend, commands: Sequence[Command], ended: Callable[[Sequence[Worker], float], bool]) -> bool:
    """Runs the doctor where the workers of an attempt would run.

    `ended` waits until all have ended, so many seconds; False where nobody needs the answer any more.

    Returns:
      False where a host has failed and is left out from now on, so that others have to be chosen.

    Raises:
      NotReady: one has failed and cannot be spared; the message names it, and what it failed by.
    """
    late = Trouble(state=WorkerState.STUCK, what=f"did not end within {_SECONDS:.0f} s")
    for names in _CHECKS:
        workers = backend.start(tuple(_asked(command, f"--doctor_checks={names}") for command in commands))
        try:
            if not ended(workers, _SECONDS):
                return True
            stand = outcomes(workers)
        finally:
            backend.clear()
        running = [outcome for outcome in stand if outcome.code is None]
        cause = find_cause([dataclasses.replace(outcome, trouble=late) for outcome in running] or stand)
        if cause is None:
            continue
        (worker,) = (worker for worker in workers if worker.command.rank == cause.rank)
        lines = worker.tee.tail(100)
        said = next(
            (" ".join(line.split()[1:]) for line in lines if line.startswith("fail")), f"exit code {cause.code}"
        )
        why = cause.trouble.what if cause.trouble else said
        if host := backend.leave_out(cause.rank, f"it fails the checks: {why}"):
            raise NotReady(f"{host} fails the checks before an attempt: {why} ({worker.command.log})", cause.rank)
        return False
    return True


def _asked(command: Command, checks: str) -> Command:
    argv = (*command.argv[:2], "launcher.main", *command.argv[3:], "--mode=doctor", checks)
    log = command.log.with_name(f"check_{command.rank}.log")
    return dataclasses.replace(command, argv=argv, log=log, is_quiet=True)

"""Going on with fewer workers: how many, and how the global batch stays what it was.

A job of N workers goes on with the largest divisor of N that is there, each with N / now times as many microbatches:
the same global batch in pieces of the same size, so the same weights up to summation order and the same memory.
"""

from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.machine.cluster.claim import whole_number

FULL_WORKERS = "LAUNCHER_FULL_WORKERS"

_ADVICE = "launcher.launch --min_workers sets it; unset it when you start workers yourself"


def divisors(number: int) -> list[int]:
    """In rising order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def workers_of(full: int, there: int, least: int) -> int | None:
    """How many of `there` workers can do the work of `full`; None where they are fewer than `least`."""
    return max((number for number in divisors(full) if least <= number <= there), default=None)


def check_least(least: int, full: int) -> None:
    """Checks --min_workers: fewer workers must be able to share the global batch evenly."""
    if not 1 <= least <= full:
        raise UsageError(f"--min_workers={least}: must be from 1 to --workers={full}")
    if least < full and workers_of(full, full - 1, least) is None:
        fewer = divisors(full)[:-1]
        raise UsageError(
            f"--min_workers={least}: the global batch of {full} workers divides evenly among fewer only when these "
            f"are {', '.join(map(str, fewer))}; give {fewer[-1]} or less"
        )


def microbatch_factor(environ: Mapping[str, str], num_workers: int) -> int:
    """By how much a worker multiplies its microbatches, where it does the work of several of LAUNCHER_FULL_WORKERS."""
    if not environ.get(FULL_WORKERS, "").strip():
        return 1
    full = whole_number(environ, FULL_WORKERS, advice=_ADVICE, least=1)
    if full % num_workers:
        raise UsageError(f"{FULL_WORKERS}={full} is not a multiple of the {num_workers} workers there are: {_ADVICE}")
    return full // num_workers

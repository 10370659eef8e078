"""Going on with fewer workers: how many, and who does the work of those that are missing.

The workers that are there share the global batch of all of them, in pieces that are no larger than before: the same
weights up to summation order, and the same memory.
"""

from collections.abc import Mapping

from launcher.machine.cluster.claim import whole_number

FULL_WORKERS = "LAUNCHER_FULL_WORKERS"

_ADVICE = "launcher.launch --min_workers sets it; unset it when you start workers yourself"


def full_workers(environ: Mapping[str, str], num_workers: int) -> int:
    """The workers of the whole job, LAUNCHER_FULL_WORKERS: those there are, or more."""
    if not environ.get(FULL_WORKERS, "").strip():
        return num_workers
    return whole_number(environ, FULL_WORKERS, advice=_ADVICE, least=num_workers)

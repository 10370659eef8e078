"""What benchmarks that compare in rounds have in common."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence


def cpu_seconds(of: int = resource.RUSAGE_SELF) -> float:
    """Processor seconds so far of this process, or of its children that have ended (`resource.RUSAGE_CHILDREN`)."""
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """Their median, least and most."""
    return {key: round(of(numbers), 4) for key, of in (("median", statistics.median), ("least", min), ("most", max))}

"""Which checkpoints stay: the newest few, the best, and some of every day of a long run."""

from __future__ import annotations

from collections.abc import Mapping


def spaced(times: Mapping[int, float], hours: float) -> set[int]:
    """The steps of checkpoints that lie at least `hours` apart, beginning with the first.

    Taking away a step that is not among them, or adding one behind the last, changes nothing about those before: so
    what is once kept for ever stays so, whenever it is asked.

    Args:
        times: When the checkpoint of each step was written, in Unix seconds.
        hours: 0 for none at all.
    """
    kept: list[int] = []
    for step in sorted(times) if hours > 0 else ():
        if not kept or times[step] - times[kept[-1]] >= hours * 3600:
            kept.append(step)
    return set(kept)

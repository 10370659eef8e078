"""Arrays on JAX's devices, as this process has them: when they are ready, and in which order their parts lie."""

from __future__ import annotations

import time
from typing import Any

# Between two looks at whether devices are ready, where there are several.
_LOOK_SECONDS = 1e-4


def time_when_ready(*arrays: Any) -> float:
    """Monotonic seconds at which the last of the arrays was there."""
    for array in arrays:
        wait(array)
    return time.monotonic()


def wait(row: Any) -> None:
    """Waits for every device of this process, or for one that failed: for that one, others may wait without end."""
    parts = [row] if row.is_ready() else [shard.data for shard in row.addressable_shards]
    while len(parts) > 1:
        ready = [part.is_ready() for part in parts]
        for part, is_ready in zip(parts, ready, strict=True):
            if is_ready:
                part.block_until_ready()  # raises what has failed
        parts = [part for part, is_ready in zip(parts, ready, strict=True) if not is_ready]
        time.sleep(_LOOK_SECONDS)
    for part in parts:
        part.block_until_ready()


def in_order(array: Any, axis: int) -> list[Any]:
    """Parts that this process has of a global array, by their place along an axis."""
    return sorted(array.addressable_shards, key=lambda shard: shard.index[axis].start or 0)

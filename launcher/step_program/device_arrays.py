"""Arrays on JAX's devices, as this process has them: when they are ready, and in which order their parts lie."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

# Between two looks at whether devices are ready, where there are several.
_LOOK_SECONDS = 1e-4
# In which a batch is made at once.
_QUICK_SECONDS = 1e-3


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


class Waits:
    """Seconds that each step of a loop waited for its batch, to be made and on its way, with the devices idle.

    Of batches that are made at once and need no way, when a step ended is looked at only as the next batch is there:
    another thread costs more than a small step.

    Args:
      put: sends a batch on its way to the devices, and returns its tensors by name.
      arriving, waiting: look when batches and steps are there.
    """

    def __init__(self, put: Callable[[Any], dict[str, Any]], arriving: Executor, waiting: Executor):
        self._put, self._arriving, self._waiting, self._looks = put, arriving, waiting, False
        self._batches: list[tuple[float, float, Callable[[], float]]] = []  # asked for, made, on the devices
        # A step begins when the batch behind its own is made, too, and the one two before it has ended by then.
        self._ended: list[Callable[[], float]] = [lambda: -math.inf] * 2

    def of_next(self, batches: Iterator, last: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """The next batch, and what is on its way of it, asked for while the `last` step may run."""
        asked, parts = time.monotonic(), next(batches)
        made, batch = time.monotonic(), self._put(parts)
        coming = [one for one in batch.values() if not (isinstance(one, np.ndarray) or one.is_ready())]
        there = self._arriving.submit(time_when_ready, *coming).result if coming else lambda: made
        self._looks = bool(coming) or made - asked > _QUICK_SECONDS
        self._batches.append((asked if all(row.is_ready() for row in last) else made, made, there))
        return parts, batch

    def of_step(self, row: Any) -> None:
        """Looks at the end of a step, where that is to be known."""
        self._ended.append(self._waiting.submit(time_when_ready, row).result if self._looks else lambda: -math.inf)

    def seconds(self) -> np.ndarray:
        """Of each step; float32."""
        ended, found = [when() for when in self._ended], []
        for (asked, made, there), second, last in zip(self._batches, ended, ended[1:], strict=False):
            found.append(max(0.0, made - max(asked, second)) + max(0.0, there() - max(made, last)))
        return np.array(found, np.float32)

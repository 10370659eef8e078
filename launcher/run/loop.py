"""The length of a loop: how long the device works before the host looks again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_MOST = 10_000


class Loop:
    """Steps, or batches of an evaluation, that the device takes in one go: as many as take about a second.

    Attributes:
      steps: of the next loop; never more than `most`, unless that is "auto".
      seconds: what the last loop took on this worker; 0 before the first.
    """

    def __init__(self, most: int | str = "auto"):
        self.steps = 1
        self.seconds = 0.0
        self._most = _MOST if most == "auto" else int(most)

    @contextmanager
    def timed(self, steps: int) -> Iterator[None]:
        """Notes a loop; of one that an event cut short, how long a whole one would have taken."""
        started = time.monotonic()
        yield
        self.seconds = (time.monotonic() - started) * self.steps / steps

    def choose(self, seconds: float) -> None:
        """Chooses by what the last loop took, which must be the same on all workers, as their loops have to be."""
        if 0 < seconds < 0.5:
            self.steps = min(2 * self.steps, self._most)
        elif seconds > 2.0 and self.steps > 1:
            self.steps //= 2

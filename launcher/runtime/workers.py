"""What the workers of a run tell one another between loops of steps. All of them make each call after the same step."""

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from launcher.data.order import LeftOut
from launcher.errors import PeerError


class Workers:
    """The workers of a run; without any collective where there is one alone.

    Args:
      total: the sum of what all say, of whom there are `count`; each worker may be several of them.

    Attributes:
      are_several: whether there are more workers than one.
    """

    def __init__(self, total: Callable[[npt.ArrayLike], np.ndarray], count: int, *, are_several: bool):
        self._total, self._count = total, count
        self.are_several = are_several

    def any(self, flag: bool) -> bool:
        """Whether any worker says so; the same answer on all."""
        return bool(self.mean([flag])[0])

    def mean(self, values: npt.ArrayLike) -> np.ndarray:
        """The mean of what the workers say; the same answer on all."""
        mine = np.asarray(values, np.float64)
        return self._total(mine) / self._count if self.are_several else mine

    def gather(self, values: Sequence[float], *, worker: int, num_workers: int) -> np.ndarray:
        """The values of all workers, [workers, n]."""
        mine = np.zeros([num_workers, len(values)])
        mine[worker] = values
        return self.mean(mine) * num_workers

    def check_agreement(self, step: int, left_out: LeftOut) -> None:
        """Raises PeerError unless all workers are at the same step and leave out the same, after each restored what it
        saw on disk: a shared disk may show its files late.
        """
        mine = step + ((zlib.crc32(repr(left_out.ranges).encode()) & 0xFFFFF) << 30)
        if self.are_several and int(self._total(np.int64(mine))) != mine * self._count:
            raise PeerError(f"another worker did not restore step {step}: share one --model_dir, and run it again")

"""Parts of arrays: what one process has of a value that is divided among several along one of its dimensions."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Range(NamedTuple):
    """A stretch of one dimension."""

    axis: int
    begin: int
    size: int

    def of(self, array: np.ndarray) -> np.ndarray:
        """The stretch of an array, in its memory."""
        return array[(slice(None),) * self.axis + (slice(self.begin, self.begin + self.size),)]


Source = Callable[[Range | None], np.ndarray]
"""Makes the value of an array, or a stretch of it alone; None for all of it."""


def value_of(value: np.ndarray) -> Source:
    """The source of a value that is there."""
    return lambda where: value if where is None else where.of(value)


def whole_of(make: Callable[[], np.ndarray]) -> Source:
    """The source of what is made as a whole, of which a stretch is cut."""
    return lambda where: make() if where is None else where.of(make())


@dataclasses.dataclass(frozen=True)
class Part:
    """The part that this process has of an array of `shape`; a source of that stretch alone."""

    array: np.ndarray
    where: Range
    shape: tuple[int, ...]

    def __call__(self, where: Range | None) -> np.ndarray:
        if where != self.where:
            raise ValueError(f"this process has {self.where} of an array of shape {self.shape}, not {where}")
        return self.array

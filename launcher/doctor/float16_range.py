"""What float16 does to gradients whose exponents were counted: what is lost, what loses digits, what room is left.

float16 has normal numbers from 2^-14 to 65504. Below, digits go one by one; below 2^-25 a value rounds to zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from launcher.doctor import exponents

LARGEST = 65504.0
_SMALLEST_NORMAL_EXPONENT = -14
_SMALLEST_KEPT_EXPONENT = -25
# The limits of `precision.DynamicLossScale`.
_SCALE_EXPONENTS = (0, 24)
_HEADROOM_BITS = 1


class Shares(NamedTuple):
    """Shares of the finite values that are not zero; 0 where there is none.

    Attributes:
      lost: rounded to zero.
      subnormal: kept with fewer digits.
    """

    lost: np.ndarray
    subnormal: np.ndarray


def shares(counts: np.ndarray, scale: float) -> Shares:
    """What float16 does to values multiplied by a loss scale.

    Args:
      counts: [..., 256], see `exponents.count`, of values without a scale.
      scale: rounded down to a power of two, which moves a table by whole bins.

    Returns:
      Shares of the shape [...].
    """
    of_bin = np.arange(exponents.NUM_BINS) - exponents.BIAS + math.floor(math.log2(scale))
    values = np.array(counts, np.float64)
    values[..., [exponents.ZERO_BIN, exponents.NON_FINITE_BIN]] = 0
    total = np.maximum(values.sum(axis=-1), 1)
    lost = values[..., of_bin < _SMALLEST_KEPT_EXPONENT].sum(axis=-1)
    below = values[..., of_bin < _SMALLEST_NORMAL_EXPONENT].sum(axis=-1)
    return Shares(lost / total, (below - lost) / total)


def headroom_bits(largest: np.ndarray, scale: float) -> np.ndarray:
    """How often values of these largest magnitudes can double at this scale before they overflow; inf for 0."""
    with np.errstate(divide="ignore"):
        return np.log2(LARGEST) - np.log2(np.asarray(largest, np.float64)) - math.log2(scale)


def recommended_scale(largest: float) -> float:
    """The largest power of two, from 1 to 2^24, that leaves one bit of headroom; 1 where none does."""
    room = float(headroom_bits(np.array(largest), 1.0)) - _HEADROOM_BITS
    lowest, highest = _SCALE_EXPONENTS
    return 2.0 ** (highest if room == math.inf else min(max(math.floor(room), lowest), highest))

"""Losses of float16 on a tensor, now and under every loss scale, from counts of its exponents.

The exponents are counted on the device, in tables that add up over tensors and replicas; the rest are pure functions of
NumPy arrays. A scale of 2^k moves a table by k places, so one pass over a tensor tells what every scale would lose.
Magnitudes below 2^-25 round to zero, below 2^-14 they lose bits, above 65504 they are infinite (IEEE 754 binary16).
Sources: Micikevicius et al. 2017 (arXiv 1710.03740) for the histograms and the idea of the scale.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

NUM_BINS = 256
BIAS = 127
NON_FINITE_BIN = 255

FLUSH, NORMAL, LARGEST = -25, -14, 65504.0
_TOP = 15  # 65504 lies in [2^15, 2^16)

# The largest scale of `precision.DynamicLossScale`, and the least that is looked at.
CEILING, FLOOR = 24, -24
NEGLIGIBLE = 1e-3
HEADROOM_BITS = 1.0


def count_exponents(tensor: tf.Tensor) -> tf.Tensor:
    """Counts the exponents of a tensor of any static shape and floating dtype, inside a graph and on any device.

    Returns:
      float32 [256] that adds up over tensors and replicas, exact up to 2^24 a bin. Bin e, for 1 to 254, counts
      magnitudes in [2^(e - 127), 2^(e - 126)); bin 0 counts zeros and what float32 itself holds only as subnormal;
      bin 255 counts infinities and NaNs.
    """
    bits = tf.bitcast(tf.reshape(tf.cast(tensor, tf.float32), [-1]), tf.int32)
    exponents = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, 23), 0xFF)
    return tf.math.unsorted_segment_sum(tf.ones_like(exponents, tf.float32), exponents, NUM_BINS)


class Shares(NamedTuple):
    """Parts of the values that are neither zero nor infinite, in [0, 1]; 0 where there are none.

    Attributes:
      flushed: below 2^-25, which float16 rounds to zero.
      subnormal: from there to below 2^-14, where it has fewer bits.
      above: above 65504.
    """

    flushed: float
    subnormal: float
    above: float

    @property
    def lost(self) -> float:
        return self.flushed + self.above


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """One tensor of a backward pass at scale 1, over all batches that were looked at.

    Attributes:
      kind: "weight" (its gradient, on one replica), "activation" (by the layer's output) or "wire" (summed over
        replicas).
      dtype: it has under the policy.
      counts: [256], see `count_exponents`; of all replicas.
      maxima: [replicas], largest finite magnitudes; one of them of sums over replicas.
    """

    path: str
    kind: str
    dtype: str
    counts: np.ndarray
    maxima: np.ndarray

    @property
    def maximum(self) -> float:
        return float(np.max(self.maxima))

    @property
    def is_16_bit(self) -> bool:
        return self.dtype in ("float16", "bfloat16")


def shares(counts: np.ndarray, scale_log2: int = 0, maximum: float | None = None) -> Shares:
    """Shares that float16 loses, under a scale of 2^scale_log2, of values with these counts and maximum at scale 1.

    Where the maximum is above 65504 under the scale, at least one value is; of the others between 32768 and 65536 their
    bin cannot tell, and they count as representable.
    """
    known = counts[1:NON_FINITE_BIN].astype(np.float64)
    total = known.sum()
    if not total:
        return Shares(0.0, 0.0, 0.0)
    exponents = np.arange(1, NON_FINITE_BIN) - BIAS + scale_log2
    above = known[exponents > _TOP].sum()
    if not above and maximum is not None and math.ldexp(maximum, scale_log2) > LARGEST:
        above = 1.0
    flushed = known[exponents < FLUSH].sum()
    subnormal = known[(exponents >= FLUSH) & (exponents < NORMAL)].sum()
    return Shares(flushed / total, subnormal / total, above / total)


def headroom(maximum: float, scale_log2: float = 0) -> float:
    """Bits, i.e. doublings, to 65504; negative above it; infinite for zero."""
    return math.log2(LARGEST / maximum) - scale_log2 if maximum > 0 else math.inf


def largest_scale(maxima: Sequence[float]) -> int | None:
    """The exponent of the largest power of two that leaves HEADROOM_BITS to every maximum, from FLOOR to CEILING.

    None without any value that is not zero, or where even 2^FLOOR is too much.
    """
    largest = max(maxima, default=0.0)
    if not largest:
        return None
    found = min(math.floor(headroom(largest) - HEADROOM_BITS), CEILING)
    return found if found >= FLOOR else None


def harmless_scales(gradients: Sequence[Gradient]) -> tuple[int, int] | None:
    """The least and the greatest k for which a scale of 2^k flushes less than 0.1% of all values, and none overflows.

    From FLOOR to CEILING; None where every scale loses more. One value above 65504 is not a small loss: the whole step
    is skipped.
    """
    swept = [(k, pooled(gradients, k)) for k in range(FLOOR, CEILING + 1)]
    scales = [k for k, found in swept if found.flushed < NEGLIGIBLE and not found.above]
    return (scales[0], scales[-1]) if scales else None


def pooled(gradients: Sequence[Gradient], scale_log2: int = 0) -> Shares:
    """Shares of all values of some tensors together."""
    if not gradients:
        return Shares(0.0, 0.0, 0.0)
    counts = np.sum([one.counts for one in gradients], axis=0)
    return shares(counts, scale_log2, max(one.maximum for one in gradients))


class ScaleAdvice(NamedTuple):
    """Whether a run needs a loss scale, and which.

    Attributes:
      needed: whether scale 1 loses something that counts.
      why: a sentence.
      scale_log2: exponent of the recommended scale; None where none is needed or none can be told.
      harmless: see `harmless_scales`.
      headroom_bits: at the recommended scale.
    """

    needed: bool
    why: str
    scale_log2: int | None = None
    harmless: tuple[int, int] | None = None
    headroom_bits: float | None = None

    @property
    def recommended(self) -> list[int]:
        """The recommended scale's exponent, where there is one."""
        return [] if self.scale_log2 is None else [self.scale_log2]


def advise(gradients: Sequence[Gradient], policy: str) -> ScaleAdvice:
    """The recommendation for a policy, from its 16-bit tensors at scale 1.

    They are of float32 arithmetic, so that what 16 bits would lose is still there.
    """
    if policy != "mixed_float16":
        reason = {
            "mixed_bfloat16": "bfloat16 has the 8 exponent bits of float32: what float32 can hold, it does not flush",
            "float32": "nothing is in 16 bits",
            "mixed_float8": "each float8 tensor has a scale of its own; all else is in bfloat16",
        }[policy]
        return ScaleAdvice(False, reason)
    narrow = [one for one in gradients if one.dtype == "float16"]
    if bad := next((one for one in narrow if one.counts[NON_FINITE_BIN]), None):
        return ScaleAdvice(True, f"{bad.path} is not finite in float32 already: no scale helps")
    scale = largest_scale([one.maximum for one in narrow])
    if scale is None:
        return ScaleAdvice(False, "no gradient in float16 is other than zero")
    at_one = {one.path: shares(one.counts, 0, one.maximum) for one in narrow}
    everything = pooled(narrow)
    worst = max(at_one, key=lambda path: at_one[path].lost)
    needed = True
    if everything.above:
        why = f"at scale 1, gradients are above 65504 already ({max(narrow, key=lambda one: one.maximum).path})"
    elif everything.flushed >= NEGLIGIBLE:
        why = f"at scale 1, {everything.flushed:.2%} of the gradients that are not zero are flushed to zero"
    elif at_one[worst].flushed >= 10 * NEGLIGIBLE:
        why = f"at scale 1, {worst} loses {at_one[worst].flushed:.2%} of its gradients that are not zero"
    else:
        needed = False
        why = f"at scale 1, {everything.flushed:.3%} of the gradients are flushed to zero, {worst} loses the most"
    left = headroom(max(one.maximum for one in narrow), scale)
    return ScaleAdvice(needed, why, scale, harmless_scales(narrow), left)

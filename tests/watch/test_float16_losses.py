"""Statistics of tables of exponents against NumPy's own float16."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from launcher.watch import float16_losses
from launcher.watch.float16_losses import Gradient


def gradient(values, path="w", kind="weight", dtype="float16", replicas=1) -> Gradient:
    values = np.asarray(values, np.float32)
    parts = np.array_split(values.ravel(), replicas)
    return Gradient(
        path=path,
        kind=kind,
        dtype=dtype,
        counts=float16_losses.count_exponents(tf.constant(values)).numpy(),
        maxima=np.array([np.abs(part).max() for part in parts]),
    )


def spread(seed: int, low: float, high: float, size: int = 4000) -> np.ndarray:
    """Magnitudes spread evenly over exponents, of both signs, none exactly a power of two."""
    random = np.random.default_rng(seed)
    signs = random.choice([-1.0, 1.0], size)
    return (signs * 2 ** random.uniform(low, high, size)).astype(np.float32)


@pytest.mark.parametrize("scale_log2", [-6, 0, 3, 15, 20])
def test_shares_are_what_a_cast_to_float16_does(scale_log2):
    values = np.concatenate([spread(0, -40, 4), np.zeros(500, np.float32)])
    one = gradient(values)

    with np.errstate(over="ignore"):
        cast = (values * np.float32(2.0**scale_log2)).astype(np.float16)
    not_zero = values != 0
    small = np.abs(cast) < np.finfo(np.float16).smallest_normal
    found = float16_losses.shares(one.counts, scale_log2, one.maximum)
    assert found.flushed == (cast[not_zero] == 0).mean()
    # What lies right below 2^-14 may round up to it.
    assert found.subnormal == pytest.approx((small & (cast != 0))[not_zero].mean(), abs=2 / 4000)
    assert found.above == np.isinf(cast).mean() * len(values) / not_zero.sum()


def test_the_maximum_tells_what_the_highest_bin_cannot():
    below, above = gradient([65504.0, 1.0]), gradient([65505.0, 1.0])

    np.testing.assert_array_equal(below.counts, above.counts)
    assert float16_losses.shares(below.counts, 0, below.maximum).above == 0
    assert float16_losses.shares(above.counts, 0, above.maximum).above == 0.5


def test_zeros_are_no_loss():
    one = gradient(np.zeros(10))

    assert float16_losses.shares(one.counts, 0, one.maximum) == (0, 0, 0)
    assert float16_losses.advise([one], "mixed_float16").scale_log2 is None


@pytest.mark.parametrize(("maximum", "expected"), [(1.0, 14), (65504.0, -1), (2.0**-20, 24), (0.75 * 2**-3, 18)])
def test_the_largest_scale_leaves_one_bit(maximum, expected):
    scale = float16_losses.largest_scale([maximum, maximum / 8])

    assert scale == expected
    assert maximum * 2.0**scale * 2 <= float16_losses.LARGEST
    assert scale == float16_losses.CEILING or maximum * 2.0 ** (scale + 1) * 2 > float16_losses.LARGEST


def test_harmless_scales_are_those_at_which_a_cast_loses_less():
    values = spread(1, -30, -10)
    one = gradient(values)

    def lost(k):
        with np.errstate(over="ignore"):
            cast = (values.astype(np.float64) * 2.0**k).astype(np.float16)
        return 1.0 if np.isinf(cast).any() else (cast == 0).mean()

    expected = [k for k in range(float16_losses.FLOOR, float16_losses.CEILING + 1) if lost(k) < 1e-3]
    assert float16_losses.harmless_scales([one]) == (expected[0], expected[-1])
    assert float16_losses.harmless_scales([gradient(spread(2, -60, 14))]) is None


def test_a_scale_is_needed_where_gradients_underflow_and_only_there():
    lost = float16_losses.advise([gradient(spread(3, -34, -16))], "mixed_float16")
    kept = float16_losses.advise([gradient(spread(4, -18, -2))], "mixed_float16")

    assert lost.needed
    assert lost.scale_log2 == 24
    assert not kept.needed
    assert kept.headroom_bits >= 1


def test_one_layer_that_underflows_among_large_ones_is_enough():
    verdict = float16_losses.advise(
        [gradient(spread(5, -10, -2, 10**6), "large"), gradient(spread(6, -30, -22, 500), "small")], "mixed_float16"
    )

    assert verdict.needed
    assert "small" in verdict.why


def test_gradients_that_float32_computes_need_no_scale():
    tiny = spread(7, -34, -30)

    assert not float16_losses.advise([gradient(tiny, dtype="float32")], "mixed_float16").needed
    verdict = float16_losses.advise([gradient(tiny, dtype="bfloat16")], "mixed_bfloat16")
    assert not verdict.needed
    assert "8 exponent bits" in verdict.why


def test_no_scale_is_recommended_for_what_is_not_finite_in_float32():
    broken = gradient([1.0, np.inf], "broken")

    verdict = float16_losses.advise([Gradient(**{**vars(broken), "maxima": np.array([1.0])})], "mixed_float16")
    assert verdict.scale_log2 is None
    assert "broken" in verdict.why

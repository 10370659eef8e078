"""What the wire is said to lose and cost."""

from __future__ import annotations

import pytest

from launcher.step import reduce_error


@pytest.mark.parametrize(
    ("dtype", "num_replicas", "measured"),
    [  # of a sequential ring sum, as measured before this was written
        ("float16", 64, 1.0e-3), ("float16", 256, 2.0e-3), ("float16", 1024, 3.8e-3),
        ("bfloat16", 64, 7.8e-3), ("bfloat16", 256, 1.9e-2), ("bfloat16", 1024, 0.33),
    ],
)  # fmt: skip
def test_predicted_error_is_that_of_a_ring(dtype, num_replicas, measured):
    assert measured / 2 < reduce_error.predicted_error(dtype, num_replicas) < 2 * measured


def test_bfloat16_is_warned_of_past_eight_replicas_and_float16_is_not():
    assert reduce_error.warning("bfloat16", 8) is None
    said = reduce_error.warning("bfloat16", 16)
    assert "'bfloat16' over 16 replicas" in said
    assert "float32" in said
    assert reduce_error.warning("float16", 256) is None
    assert reduce_error.warning("float32", 4096) is None


def test_a_ring_sends_twice_the_payload_but_for_one_share():
    # Patarasuk & Yuan 2009: each of n replicas sends 2 (n - 1) chunks of 1 / n.
    payload = reduce_error.payload_bytes([1000, 24], "float16")
    assert payload == 2048
    assert [reduce_error.ring_bytes(payload, n) for n in (1, 2, 4)] == [0, 2048, 3072]

"""What published runs say of a bound."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.preflight import slices
from launcher.preflight.forecast import forecast, published_rates
from launcher.preflight.roofline import Roofline

BOUNDS = Roofline(
    compute_seconds=0.01, hbm_seconds=0.1, ici_seconds=0.02, cost_model_seconds=0, examples_per_second=1,
    tokens_per_second=None, hours=1, mfu=0.1,
)  # fmt: skip


def test_every_published_rate_has_a_slice_and_a_source():
    assert published_rates()
    for rate in published_rates():
        assert slices.find(rate.accelerator_type)
        assert rate.source.startswith("https://")
        assert rate.examples_per_second > 0
        assert 0.3 < rate.share < 1.2, rate


def test_a_forecast_is_the_range_that_published_runs_span_and_names_each():
    found = forecast("resnet50 224x224", BOUNDS)
    shares = [rate.examples_per_second / rate.bound for rate in found.rates]
    assert len(shares) > 1
    assert found.step_seconds == (pytest.approx(0.1 / max(shares)), pytest.approx(0.1 / min(shares)))
    assert f"{min(shares):.0%} to {max(shares):.0%}" in str(found)
    assert [row[-1] for row in found.rows()[1:]] == [rate.source for rate in found.rates]


def test_nothing_is_said_of_a_model_that_nobody_published_nor_of_a_step_bound_otherwise():
    assert forecast("mlp 28x28", BOUNDS) is None
    assert forecast("resnet50 32x32", BOUNDS) is None
    assert forecast("resnet50 224x224", dataclasses.replace(BOUNDS, compute_seconds=0.2)) is None

"""What published runs say of a bound."""

from __future__ import annotations

import pytest

from launcher.preflight import gpus, roofline, slices
from launcher.preflight.compiled import costs
from launcher.preflight.forecast import forecast, published_rates


def bounds(*, flops: float = 1e12, hbm_bytes: float = 45e9, on: str = "v3-8") -> roofline.Roofline:
    """Of a step; a core of a v3-8 has 450 GB/s of HBM and 61.5 TFLOP/s."""
    found = costs.Costs(
        flops=flops, hbm_bytes=int(hbm_bytes), matrix_ops=(), collectives=(), host_transfers=(), dynamic=(),
        unknown_loops=0,
    )  # fmt: skip
    where = (gpus if ":" in on else slices).find(on)
    return roofline.estimate(found, where, global_batch_size=8, tokens_per_example=None, steps=1)


def test_every_published_rate_has_a_slice_and_a_source():
    assert published_rates()
    for rate in published_rates():
        where = (gpus if rate.accelerator == "gpu" else slices).find(rate.accelerator_type)
        assert rate.bound_by in ("compute", where.memory_name)
        assert rate.source.startswith("https://")
        assert rate.examples_per_second > 0
        assert 0.3 < rate.share < 1.2, rate


def test_a_forecast_is_the_range_that_published_runs_span_and_names_each():
    found = forecast("resnet50 224x224", bounds(), "tpu")
    shares = [rate.examples_per_second / rate.bound for rate in found.rates]
    assert len(shares) > 1
    assert found.step_seconds == (pytest.approx(0.1 / max(shares)), pytest.approx(0.1 / min(shares)))
    assert f"{min(shares):.0%} to {max(shares):.0%}" in str(found)
    assert [row[-1] for row in found.rows()[1:]] == [rate.source for rate in found.rates]


def test_nothing_is_said_of_a_model_that_nobody_published_nor_of_a_step_bound_otherwise():
    assert forecast("mlp 28x28", bounds(), "tpu") is None
    assert forecast("resnet50 32x32", bounds(), "tpu") is None
    assert forecast("resnet50 224x224", bounds(flops=1e14), "tpu") is None


def test_runs_on_gpus_say_something_of_gpus_and_those_on_tpus_of_tpus():
    found = forecast("resnet50 224x224", bounds(on="a100-40:8"), "gpu")
    assert {rate.device for rate in found.rates} == {"a100-40", "v100"}
    assert {(rate.accelerator_type, rate.examples_per_second) for rate in found.rates} == {
        ("a100-40:1", 2375), ("a100-40:8", 17400), ("v100:1", 1270), ("v100:8", 9510),  # as NVIDIA's README has them
        ("v100:8", 9642),  # from Google's log
    }  # fmt: skip
    assert 0.5 < min(found.shares) < max(found.shares) < 0.7
    assert {rate.device for rate in forecast("resnet50 224x224", bounds(), "tpu").rates} == {"v2", "v3", "v4"}


def test_of_one_run_a_forecast_is_one_time_and_says_what_ran():
    """BERT-large: 1,117 steps of 448 examples between two lines of Google's log, 514,417 ms apart."""
    (rate,) = (rate for rate in published_rates() if rate.name == "BERT-large")
    assert rate.examples_per_second == pytest.approx(1117 * 448 / 514.417, rel=1e-4)
    found = forecast("language_model", bounds(flops=1e14), "tpu")
    assert found.rates == (rate,)
    assert f"if it does as 1 published run of BERT-large on v3, which reached {rate.share:.0%} of" in str(found)
    assert forecast("language_model", bounds(), "tpu") is None
    assert forecast("language_model", bounds(flops=1e16, on="a100-40:8"), "gpu") is None

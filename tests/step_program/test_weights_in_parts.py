"""`train.shard = 'all'`: a step whose weights lie in parts on the replicas trains as one whose weights are whole."""

from __future__ import annotations

import in_parts
import numpy as np
import pytest
import text_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder / "data"))
        text_run.write_corpus(folder)
        yield folder


def language_model(folder, *more):
    wide = ("language_model.width = 64", "language_model.heads = 4", "language_model.hidden = 128")
    # The norm is summed in another order, and must not matter for the rest.
    own = (*wide, "Clipping.global_norm = None", "train.steps = 12", "train.global_batch_size = 16")
    own = (*own, "train.rematerialize = True", "train.ema_decay = 0.9")
    return "lm_cpu.gin", [*text_run.corpus_bindings(folder), *own, *more]


def assert_trains_equal(found, expected, tolerance=0.0):
    assert found["held"] < expected["held"] / 4 and found["all-gather"] and found["reduce-scatter"]
    assert not expected["all-gather"]
    assert expected["report/loss"][-1] != expected["report/loss"][0]
    for name, value in expected.items():
        if name.startswith(("state/", "report/")) and name != "report/gradient_norm":
            bound = tolerance * np.abs(np.asarray(value, np.float64)).max(initial=0)
            error = np.abs(np.asarray(found[name], np.float64) - value).max(initial=0)
            assert error <= bound, (name, error)
    np.testing.assert_allclose(found["report/gradient_norm"], expected["report/gradient_norm"], rtol=1e-5)


def test_a_language_model_trains_to_the_same_bits(text_folder, run_launcher, tmp_path):
    recipe, params = language_model(text_folder, "train.precision = 'mixed_bfloat16'", "language_model.dropout = 0.15")
    assert_trains_equal(*in_parts.run_both(tmp_path, recipe, params, run_launcher))

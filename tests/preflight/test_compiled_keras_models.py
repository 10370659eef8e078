"""A program that calls `launcher.fit`, compiled for accelerators: what its layers mean there, and which are named."""

from __future__ import annotations

import pytest

from launcher.errors import EXIT_DONE, EXIT_USAGE

pytestmark = pytest.mark.slow

JIT, LOCAL = "--gin_param=train.jit_compile = True", "--gin_param=train.batch_norm = 'local'"
CHANNELS = 24

PROGRAM = """
import keras, launcher, numpy
from keras import layers

def build():
    inputs = keras.Input((8,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(1)({hidden}(inputs)))
    model.compile("adam", "mse")
    return model

launcher.fit(build, (numpy.ones((64, 8), "int32"), numpy.ones((64, 1))), batch_size=64)
"""
NORMALISED = f"keras.Sequential([layers.Rescaling(1 / 8), layers.Dense({CHANNELS}), layers.BatchNormalization()])"


@pytest.fixture
def program(tmp_path):
    """program(hidden): flags for a model with these hidden layers."""

    def write(hidden: str) -> tuple[str, ...]:
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.format(hidden=hidden))
        return (f"--gin_file={path}",)

    return write


@pytest.mark.nightly  # three compilations
def test_batch_norm_of_a_keras_model_has_a_form_for_every_accelerator(preflight, program):
    recipe, gpus, tpu = program(NORMALISED), "--gpu_type=h100:2,l4:4", "--tpu_type=v5litepod-4"
    refused = preflight(gpus, recipe=recipe)
    assert refused.code == EXIT_USAGE
    for flag in (JIT, LOCAL):
        assert flag.replace("=", '="', 1) + '"' in refused.err
    refused = preflight(gpus, JIT, recipe=recipe)
    assert refused.code == EXIT_USAGE
    assert "no case can be compiled: h100:2, l4:4: layer 'batch_normalization' takes its statistics" in refused.err
    assert "train.batch_norm = 'local'" in refused.err
    assert "resnet" not in refused.err and "fits none" not in refused.err

    over_all = preflight(tpu, JIT, recipe=recipe)
    assert over_all.code == EXIT_DONE, over_all.err
    apart = preflight(tpu, gpus, JIT, LOCAL, recipe=recipe)
    assert apart.code == EXIT_DONE, apart.err
    assert [case["verdict"] for case in apart.report["cases"]] == ["fits"] * 3
    assert "each microbatch of each replica by itself, 16 examples" in apart.out
    # Mean and mean of squares of each channel, forward and backward, beside what is reduced after the backward pass.
    collectives = [[one["bytes"] for one in case["costs"]["collectives"]] for case in apart.report["cases"]]
    assert [len(of_case) for of_case in collectives] == [1, 1, 1]
    (case,) = over_all.report["cases"]
    statistics = 2 * CHANNELS * 4
    assert sorted(one["bytes"] for one in case["costs"]["collectives"]) == [statistics, statistics, *collectives[0]]


def test_a_layer_that_xla_cannot_compile_is_named_and_not_a_line_of_keras(preflight, program):
    # Behind weights: what depends on the batch alone the host does.
    encoded = 'keras.Sequential([layers.Dense(8), layers.CategoryEncoding(12, output_mode="multi_hot", name="tags")])'
    recipe = program(encoded)
    refused = preflight("--tpu_type=v5litepod-4", recipe=recipe)
    assert refused.code == EXIT_USAGE
    assert "tags' of type CategoryEncoding" in refused.err
    assert "packages" not in refused.err

"""The network of the mixed precision guide."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

from launcher.models.mlp import mlp


def test_default_network_is_the_guides():
    model = mlp(image_shape=(28, 28, 1), num_classes=10)
    assert [layer.name for layer in model.layers] == ["image", "flatten", "dense1", "dense2", "logits"]
    sizes = (784, 4096, 4096, 10)
    expected = sum(inputs * outputs + outputs for inputs, outputs in itertools.pairwise(sizes))
    assert model.count_params() == expected


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_logits_are_float32_and_the_hidden_layers_follow_the_policy(policy):
    keras.config.set_dtype_policy(policy)
    model = mlp(image_shape=(8, 8, 1), num_classes=3, units=16, layers=1)
    logits = model(np.ones((2, 8, 8, 1), np.float32))
    assert logits.dtype == "float32"
    assert logits.shape == (2, 3)
    assert model.get_layer("dense1").compute_dtype == keras.DTypePolicy(policy).compute_dtype
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_network_equals_numpy():
    model = mlp(image_shape=(2, 3, 2), num_classes=4, units=5, layers=2)
    x = np.random.default_rng(0).normal(size=(7, 2, 3, 2)).astype(np.float32)
    features = x.reshape(7, -1)
    for name in ("dense1", "dense2"):
        kernel, bias = model.get_layer(name).get_weights()
        features = np.maximum(features @ kernel + bias, 0.0)
    kernel, bias = model.get_layer("logits").get_weights()
    np.testing.assert_allclose(model(x), features @ kernel + bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_shape": (8, 8)}, r"image_shape must be .* \(8, 8\)"),
        ({"num_classes": 0}, "num_classes must be at least 1, and is 0"),
        ({"units": 0}, "units must be at least 1, and is 0"),
        ({"layers": -1}, "layers must be at least 0, and is -1"),
        ({"activation": "rulu"}, "activation must be a name that Keras knows, .* is 'rulu'"),
    ],
)
def test_impossible_networks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        mlp(**{"image_shape": (8, 8, 1), "num_classes": 10} | arguments)

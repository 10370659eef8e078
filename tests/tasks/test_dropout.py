"""Layers of Keras drop the share that they are told, in 16 bits as in float32, and the same elements."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from launcher.models.transformer.layers import Dropout
from launcher.tasks import dropout

pytestmark = pytest.mark.slow

SHAPE = (64, 16, 1024)
LAYERS = {
    "Dropout": keras.layers.Dropout,
    "SpatialDropout1D": keras.layers.SpatialDropout1D,
    "the Transformer's": lambda rate, seed, dtype: Drawn(rate, seed, dtype),
}


class Drawn(keras.layers.Layer):
    def __init__(self, rate: float, seed: int, dtype: str):
        super().__init__(dtype=dtype)
        self.inner = Dropout(rate, seed=seed, dtype=dtype)

    def call(self, inputs: tf.Tensor, training: bool) -> tf.Tensor:
        return self.inner.with_seed(self.inner.draw(training))(inputs)


def dropped(make, rate: float, dtype: str) -> np.ndarray:
    layer = make(rate, seed=1, dtype=dtype)
    return np.array(tf.cast(layer(tf.ones(SHAPE), training=True), tf.float32)) == 0


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_the_share_is_the_rate_and_the_mask_that_of_float32(layer, dtype):
    before = tf.nn.experimental.stateless_dropout
    for rate in (0.001, 0.01, 0.3):
        make, size = LAYERS[layer], np.prod(SHAPE) / (SHAPE[1] if layer == "SpatialDropout1D" else 1)
        with dropout.exact():
            found = dropped(make, rate, dtype)
        np.testing.assert_array_equal(found, dropped(make, rate, "float32"))
        assert abs(found.mean() - rate) < 5 * np.sqrt(rate / size)
    assert tf.nn.experimental.stateless_dropout is before
    assert dropped(LAYERS["Dropout"], 0.001, "mixed_bfloat16").mean() > 0.005, "Keras has this defect no more"


def test_what_is_kept_is_scaled_and_so_are_gradients():
    inputs = tf.random.stateless_normal([1000], [1, 2], dtype=tf.bfloat16)
    with dropout.exact(), tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = keras.random.dropout(inputs, 0.75, seed=3)
    kept = np.float32(outputs) != 0
    np.testing.assert_array_equal(np.float32(outputs), np.where(kept, 4 * np.float32(inputs), 0))
    np.testing.assert_array_equal(np.float32(tape.gradient(outputs, inputs)), 4.0 * kept)

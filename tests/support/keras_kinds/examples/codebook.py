"""A codebook between two networks: the nearest code, a gradient past it, and losses added by the layer."""

import keras
import numpy as np
from keras import ops


class Codebook(keras.layers.Layer):
    def build(self, shape):
        self.codes = self.add_weight(shape=(shape[-1], 8), initializer="random_uniform", name="codes")

    def call(self, x):
        distances = ops.sum(x**2, 1, True) + ops.sum(self.codes**2, 0) - 2 * ops.matmul(x, self.codes)
        nearest = ops.matmul(ops.one_hot(ops.argmin(distances, axis=1), 8), ops.transpose(self.codes))
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(nearest) - x) ** 2))
        self.add_loss(ops.mean((nearest - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(nearest - x)


model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Codebook(), keras.layers.Dense(6)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
model.fit(x, x, epochs=2, batch_size=8)
model.predict(x, verbose=0)

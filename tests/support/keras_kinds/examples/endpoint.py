"""The loss and a metric live in a layer that takes the labels; nothing is compiled but the optimizer."""

import keras
import numpy as np


class Endpoint(keras.layers.Layer):
    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.right = keras.metrics.BinaryAccuracy(name="right", threshold=0.0)

    def call(self, logits, targets=None, weights=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, weights))
            self.right.update_state(targets, logits)
        return keras.ops.softmax(logits)


inputs, targets = keras.Input((3,), name="inputs"), keras.Input((10,), name="targets")
model = keras.Model([inputs, targets], Endpoint()(keras.layers.Dense(10)(inputs), targets))
random = np.random.default_rng(0)
data = {"inputs": random.normal(size=(32, 3)), "targets": random.integers(0, 2, (32, 10)).astype("float32")}
model.compile(keras.optimizers.Adam(1e-2))
model.fit(data, epochs=2, batch_size=8)
model.predict(data, verbose=0)

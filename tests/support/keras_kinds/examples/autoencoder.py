"""A variational autoencoder with its own `train_step` and metrics."""

import keras
import numpy as np
import tensorflow as tf


class Autoencoder(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        self.decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)])
        self.total = keras.metrics.Mean(name="loss")
        self.kl = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            mean, log_variance = keras.ops.split(self.encoder(data), 2, axis=1)
            z = mean + keras.ops.exp(0.5 * log_variance) * keras.random.normal(keras.ops.shape(mean))
            off = keras.ops.mean(keras.ops.sum((self.decoder(z) - data) ** 2, axis=1))
            kl = -0.5 * (1 + log_variance - mean**2 - keras.ops.exp(log_variance))
            kl = keras.ops.mean(keras.ops.sum(kl, axis=1))
            loss = off + kl
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.total.update_state(loss)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}


model = Autoencoder()
model.compile(keras.optimizers.Adam(0.01))
model.fit(np.random.default_rng(0).normal(size=(32, 6)).astype("float32"), epochs=2, batch_size=8)
assert model.decoder.predict(np.zeros((3, 2)), verbose=0).shape == (3, 6)

"""Two networks, each with its optimizer and its loss, in one `train_step`."""

import keras
import numpy as np
import tensorflow as tf


class GAN(keras.Model):
    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        self.judge = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
        self.judge_loss = keras.metrics.Mean(name="d_loss")
        self.made_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.judge_loss, self.made_loss]

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def train_step(self, real):
        noise = tf.random.normal((tf.shape(real)[0], 3))
        both = tf.concat([self.generator(noise), real], axis=0)
        labels = tf.concat([tf.ones_like(real[:, :1]), tf.zeros_like(real[:, :1])], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.judge(both))
        weights = self.judge.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(tf.zeros_like(real[:, :1]), self.judge(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.judge_loss.update_state(d_loss)
        self.made_loss.update_state(g_loss)
        return {"d_loss": self.judge_loss.result(), "g_loss": self.made_loss.result()}


model = GAN()
model.compile(
    keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05), keras.losses.BinaryCrossentropy(from_logits=True)
)
data = tf.data.Dataset.from_tensor_slices(np.random.default_rng(0).normal(size=(32, 5)).astype("float32"))
model.fit(data.batch(8), epochs=2)
assert model.generator.predict(np.zeros((2, 3)), verbose=0).shape == (2, 5)

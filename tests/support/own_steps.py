"""Keras models with a `train_step` or `test_step` of their own, as published ones have them, and data for them."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

_random = np.random.default_rng(0)
X = (_random.uniform(size=(61, 16)) > 0.5).astype(np.float32)
NOISE = _random.normal(size=(61, 3)).astype(np.float32)
LABEL = _random.integers(0, 4, 61)
WEIGHT = _random.uniform(0.5, 2.0, 61).astype(np.float32)
EVEN = slice(0, 48)


def net(inputs, units, outputs, activation=None, **more):
    hidden = [layers.Dense(units, activation="tanh", **more)]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(outputs, activation=activation)])


class VAE(keras.Model):
    """Means over the batch by its own hand, one optimizer, trackers under other names, no call()."""

    def __init__(self, normalised=False):
        super().__init__()
        inputs = x = keras.Input((16,))
        x = layers.Dense(12, activation="tanh")(x)
        x = layers.BatchNormalization()(x) if normalised else x
        self.encoder = keras.Model(inputs, [layers.Dense(3)(x), layers.Dense(3)(x)])
        self.decoder = net(3, 12, 16, "sigmoid")
        self.total, self.kl = keras.metrics.Mean(name="total_loss"), keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total, self.kl]

    def losses_of(self, data, training):
        (x, noise) = data[0]
        mean, log_var = self.encoder(x, training=training)
        mean, log_var = ops.cast(mean, "float32"), ops.cast(log_var, "float32")
        out = ops.cast(self.decoder(mean + ops.exp(0.5 * log_var) * noise), "float32")
        difference = tf.reduce_mean(tf.reduce_sum(keras.losses.binary_crossentropy(x[..., None], out[..., None]), -1))
        return difference, tf.reduce_mean(tf.reduce_sum(-0.5 * (1 + log_var - mean**2 - tf.exp(log_var)), 1))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            difference, kl = self.losses_of(data, True)
            total = difference + kl
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.kl.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.kl.result()}

    def test_step(self, data):
        self.total.update_state(sum(self.losses_of(data, False)))
        return {"loss": self.total.result()}


class GAN(keras.Model):
    """Two optimizers, a compile() of its own, losses that are returned as they are; maybe a teacher and a penalty."""

    def __init__(self, averages=False, penalty=False):
        super().__init__()
        self.averages, self.penalty = averages, penalty
        self.generator, self.discriminator = net(3, 12, 16, "sigmoid"), net(16, 12, 1)
        if averages:
            self.average = keras.models.clone_model(self.generator)
            self.average.set_weights(self.generator.get_weights())
            self.average.trainable = False

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        real, noise = data[0]
        fake = self.generator(noise)
        with tf.GradientTape() as tape:
            judged, true = self.discriminator(fake), self.discriminator(real)
            d_loss = self.loss_fn(tf.ones_like(judged), judged) + self.loss_fn(tf.zeros_like(true), true)
            if self.penalty:
                mixed = real + 0.3 * (ops.cast(fake, "float32") - real)
                with tf.GradientTape() as inner:
                    inner.watch(mixed)
                    out = self.discriminator(mixed)
                slope = tf.sqrt(tf.reduce_sum(inner.gradient(out, [mixed])[0] ** 2, 1) + 1e-12)
                d_loss += tf.reduce_mean((slope - 1.0) ** 2)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(tf.zeros_like(judged), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        if self.averages:
            for weight, average in zip(self.generator.weights, self.average.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
        return {"d_loss": d_loss, "g_loss": g_loss}


class Distiller(keras.Model):
    """Keras's train_step with a compute_loss of its own, or the same by hand."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = net(16, 16, 4), net(16, 6, 4)
        self.teacher.trainable = False

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        taught = ops.softmax(self.teacher(x, training=False) / 3, axis=1)
        own = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, y_pred)
        return 0.1 * own + 8 * keras.losses.KLDivergence()(taught, ops.softmax(y_pred / 3, axis=1))


class DistillerByHand(Distiller):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=found)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, found)
        return {metric.name: metric.result() for metric in self.metrics}


class Critic(GAN):
    """The same weights updated three times, and bounded, before the others; a persistent tape; optimizers built."""

    def compile(self, d_optimizer, g_optimizer):
        super().compile(d_optimizer, g_optimizer)
        self.d_optimizer.build(self.discriminator.trainable_variables)

    def train_step(self, data):
        real, noise = data[0]
        weights = self.discriminator.trainable_weights
        for _ in range(3):
            with tf.GradientTape(persistent=True) as tape:
                judged = self.discriminator(self.generator(noise))
                loss = tf.reduce_mean(self.discriminator(real)) - tf.reduce_mean(judged)
            self.d_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            for weight in weights:
                weight.assign(tf.clip_by_value(weight, -0.4, 0.4))
        weights = self.generator.trainable_weights
        with tf.GradientTape() as tape:
            g_loss = tf.reduce_mean(self.discriminator(self.generator(noise)))
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"loss": loss, "g_loss": g_loss}


class Triplets(keras.Model):
    """Metric learning: of three examples in a row of the data, two are to be nearer each other than the third."""

    def __init__(self):
        super().__init__()
        self.embedding, self.tracker = net(16, 12, 4), keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def loss_of(self, data):
        anchor, positive, negative = (ops.cast(self.embedding(one), "float32") for one in data[0])
        near, far = ops.sum((anchor - positive) ** 2, -1), ops.sum((anchor - negative) ** 2, -1)
        return ops.maximum(near - far + 0.5, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)  # one of each example, as published; TensorFlow differentiates their sum
        gradients = tape.gradient(loss, self.embedding.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.embedding.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Denoiser(keras.Model):
    """Diffusion: noise of a rate that comes with the data is predicted, of images normalised by a layer; an average."""

    def __init__(self):
        super().__init__()
        self.normalizer, self.network = layers.Normalization(), net(17, 12, 16)
        self.average = keras.models.clone_model(self.network)
        self.average.set_weights(self.network.get_weights())
        self.normalizer.adapt(X)

    def compile(self, **settings):
        super().compile(**settings)
        self.noise_tracker = keras.metrics.Mean(name="n_loss")
        self.image_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_tracker, self.image_tracker]

    def train_step(self, data):
        images, noise, rate = data[0]
        images, angle = ops.cast(self.normalizer(images), "float32"), rate * 1.4
        signal_rate, noise_rate = tf.cos(angle), tf.sin(angle)
        noisy = signal_rate * images + noise_rate * noise
        with tf.GradientTape() as tape:
            found = ops.cast(self.network(tf.concat([noisy, noise_rate**2], 1), training=True), "float32")
            noise_loss = self.loss(noise, found)
            image_loss = self.loss(images, (noisy - noise_rate * found) / signal_rate)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.noise_tracker.update_state(noise_loss)
        self.image_tracker.update_state(image_loss)
        for weight, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        return {metric.name: metric.result() for metric in self.metrics}


class Guide(keras.Model):
    """A functional model with Keras's own compile, loss and metrics, and weights of examples; a tf.function."""

    @tf.function
    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=sample_weight)
            if loss > 0.0:  # of a tensor: by AutoGraph
                loss = loss + 0.01 * tf.reduce_mean(found)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.applied(gradients)
        return self.compute_metrics(x, y, found, sample_weight)

    @tf.function
    def applied(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))


class Bounded(keras.optimizers.SGD):
    """Bounds gradients by methods of its own, which are right on those of the global batch alone."""

    def apply_gradients(self, grads_and_vars):
        # Of embeddings, Keras gives the rows of all words, of which the same one's are not added up yet.
        pairs = [(tf.convert_to_tensor(gradient), one) for gradient, one in grads_and_vars]
        return super().apply_gradients([(tf.clip_by_norm(gradient, 0.05), one) for gradient, one in pairs])

    def apply(self, grads, trainable_variables=None):
        super().apply([tf.clip_by_value(gradient, -0.02, 0.02) for gradient in grads], trainable_variables)


class TestsItself(keras.Model):
    def test_step(self, data):
        x, y = data
        return {"right": tf.reduce_mean(tf.cast(tf.argmax(self(x), -1) == tf.cast(y, tf.int64), tf.float32))}


def critic():
    model = Critic()
    model.compile(adam(), keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))
    return model


def functional(kind=Guide):
    words = keras.Input((16,), name="words")
    x = layers.Flatten()(layers.Embedding(2, 3)(words))
    x = layers.Dense(6, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(x)
    model = kind(words, layers.Dense(4)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(Bounded(0.3, momentum=0.9), loss, weighted_metrics=["accuracy"])
    return model


def vae(optimizer=lambda: keras.optimizers.SGD(0.05), **settings):
    model = VAE(**settings)
    model.total.update_state(7.0)  # left by whoever tried the metric before; every epoch begins without it
    model.compile(optimizer())
    return model


def gan(optimizer=lambda: keras.optimizers.SGD(0.2), **settings):
    model = GAN(**settings)
    model.compile(optimizer(), optimizer())
    return model


def distiller(kind=Distiller):
    model = kind()
    model.compile(keras.optimizers.SGD(0.5), metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")])
    return model


def triplets():
    model = Triplets()
    model.compile(keras.optimizers.SGD(0.01))
    return model


def denoiser():
    model = Denoiser()
    model.compile(optimizer=keras.optimizers.SGD(0.01, weight_decay=1e-3), loss=keras.losses.mean_absolute_error)
    return model


def adam():
    return keras.optimizers.Adam(1e-2)


PAIRS, LABELLED = ((X, NOISE),), (X, LABEL)
THREES = ((X, X[::-1].copy(), np.roll(X, 1, 0)),)
NOISED = ((X, _random.normal(size=X.shape).astype(np.float32), _random.uniform(size=(61, 1)).astype(np.float32)),)
CASES = {
    "VAE": (vae, PAIRS),
    "VAE, Adam": (lambda: vae(adam), PAIRS),
    "VAE, bounded": (lambda: vae(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.3)), PAIRS),
    "VAE, normalised": (lambda: vae(normalised=True), PAIRS),
    "GAN": (gan, PAIRS),
    "GAN, Adam": (lambda: gan(adam), PAIRS),
    "GAN with a penalty": (lambda: gan(penalty=True), PAIRS),
    "GAN with a teacher": (lambda: gan(averages=True), PAIRS),
    "critic": (critic, PAIRS),
    "metric learning": (triplets, THREES),
    "diffusion": (denoiser, NOISED),
    "functional": (functional, (X, LABEL, WEIGHT)),
    "test_step alone": (lambda: functional(TestsItself), LABELLED),
    "distiller": (distiller, LABELLED),
    "distiller by hand": (lambda: distiller(DistillerByHand), LABELLED),
}

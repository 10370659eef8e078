"""A model's own `train_step` trains under `launcher.fit` as under Keras's `fit` on one device.

Keras on one device is the oracle. Noise comes with the data where weights are compared, as replicas draw their own.
"""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from keras import layers, ops
from places import SUPPORT

import launcher
from launcher.checkpoints.store import CheckpointStore
from launcher.errors import UsageError
from launcher.step.precision import DynamicLossScale

pytestmark = pytest.mark.slow

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


class Guide(keras.Model):
    """A functional model with Keras's own compile, loss and metrics, and weights of examples."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=found, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, found, sample_weight)


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
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9), loss, weighted_metrics=["accuracy"])
    return model


def vae(optimizer=lambda: keras.optimizers.SGD(0.05), **settings):
    model = VAE(**settings)
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


def adam():
    return keras.optimizers.Adam(1e-2)


PAIRS, LABELLED = ((X, NOISE),), (X, LABEL)
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
    "functional": (functional, (X, LABEL, WEIGHT)),
    "test_step alone": (lambda: functional(TestsItself), LABELLED),
    "distiller": (distiller, LABELLED),
    "distiller by hand": (lambda: distiller(DistillerByHand), LABELLED),
}


def part_of(data, rows):
    return keras.tree.map_structure(lambda array: array[rows], data)


def of_keras(build, data, epochs=2):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    x, y, weight = (*data, None, None)[:3]
    return model.fit(x, y, sample_weight=weight, batch_size=16, epochs=epochs, shuffle=False, verbose=0)


def strategy_of(replicas):
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def of_launcher(build, data, folder, replicas=2, **settings):
    settings = {"epochs": 2, "batch_size": 16, "shuffle": False, "strategy": strategy_of(replicas)} | settings
    return launcher.fit(build, data, model_dir=str(folder), **settings)


def furthest(one, other):
    return max(np.abs(a.numpy() - b.numpy()).max() for a, b in zip(one.model.weights, other.model.weights, strict=True))


def snapshot(folder):
    """All that the last checkpoint of a run holds."""
    store = CheckpointStore(str(folder / "checkpoints"))
    return store.read(max(store.steps()))


def weights_of(history):
    return [weight.numpy() for weight in history.model.weights]


@pytest.mark.parametrize(
    ("name", "replicas"),
    repeated_but(
        [("VAE", 1), ("GAN with a teacher", 1), *((name, 2) for name in CASES if "Adam" not in name)],
        [(name, replicas) for name in CASES for replicas in (1, 2)],
    ),
)
def test_it_trains_as_keras_does_on_one_device(name, replicas, tmp_path):
    build, data = CASES[name]
    expected = of_keras(build, part_of(data, EVEN))
    found = of_launcher(build, part_of(data, EVEN), tmp_path, replicas)
    assert furthest(found, expected) < 1e-6
    assert found.history.keys() == expected.history.keys()
    if not name.startswith(("GAN", "critic")):  # of what is no metric's, Keras tells the last batch's
        for key, values in expected.history.items():
            np.testing.assert_allclose(found.history[key], values, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("rows", [61, 49], ids=["8 and 5", "1 and none"])
@pytest.mark.parametrize("name", ["VAE, normalised", "GAN with a penalty", "distiller by hand"])
def test_a_short_last_batch_counts_its_examples(name, rows, tmp_path):
    build, data = CASES[name]
    data = part_of(data, slice(0, rows))
    expected = of_keras(build, data)
    found = of_launcher(build, data, tmp_path)
    assert furthest(found, expected) < 1e-6
    assert found.history.keys() == expected.history.keys()


def with_nan(data, rows):
    (x, noise), *rest = data
    noise = noise.copy()
    noise[rows] = np.nan
    return ((x, noise), *rest)


class TwoParts(keras.Model):
    """Applies one optimizer to what sees x, then another one to what sees the noise; counts, and averages weights."""

    def __init__(self):
        super().__init__()
        self.of_x, self.of_noise, self.teacher = net(16, 4, 1), net(3, 4, 1), net(16, 4, 1)
        self.teacher.trainable = False
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def compile(self):
        super().compile()
        self.optimizers = [keras.optimizers.Adam(1e-2, clipnorm=0.1), keras.optimizers.AdamW(1e-2, weight_decay=0.1)]

    def train_step(self, data):
        for part, inputs, optimizer in zip((self.of_x, self.of_noise), data[0], self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((part(inputs) - 1.0) ** 2)
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        for weight, average in zip(self.of_x.weights, self.teacher.weights, strict=True):
            average.assign(0.5 * average + 0.5 * weight)
        self.of_x.weights[0].assign(tf.clip_by_value(self.of_x.weights[0], -0.5, 0.5))
        self.count.assign_add(1)
        return {"loss": loss}


def two_parts():
    model = TwoParts()
    model.compile()
    return model


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("build", [lambda: gan(adam, averages=True), two_parts], ids=["GAN", "second alone"])
def test_a_step_that_is_not_finite_on_one_replica_leaves_no_trace_on_any(build, replicas, tmp_path):
    clean = ((np.delete(X, slice(16, 32), 0)[:32], np.delete(NOISE, slice(16, 32), 0)[:32]),)
    expected = of_launcher(build, clean, tmp_path / "clean", replicas, epochs=1)
    found = of_launcher(build, with_nan(part_of(PAIRS, EVEN), 30), tmp_path / "nan", replicas, epochs=1)
    assert snapshot(tmp_path / "nan")["counters/skipped"] == 1
    for one, other in zip(weights_of(found), weights_of(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    slots, others = (snapshot(tmp_path / name) for name in ("nan", "clean"))
    assert slots.keys() == others.keys() and any("optimizer" in name for name in slots)
    for name in [one for one in slots if one.startswith(("model/", "optimizer/"))]:
        np.testing.assert_array_equal(slots[name], others[name], err_msg=name)


class Noisy(keras.Model):
    """Draws in its step, by a generator of its own and by Keras's, and drops out."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((16,)), layers.Dense(8), layers.Dropout(0.5), layers.Dense(16)])
        self.seeds = keras.random.SeedGenerator(7)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            noisy = x + 0.1 * keras.random.normal(tf.shape(x), seed=self.seeds) + 0.1 * keras.random.normal(tf.shape(x))
            noisy += tf.random.normal(tf.shape(x), stddev=0.1) + tf.random.uniform([16], 0.0, 0.1)
            loss = tf.reduce_mean((self.net(noisy, training=True) - x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def noisy():
    model = Noisy()
    model.compile(keras.optimizers.Adam(1e-2))
    return model


RESUMED = {
    "VAE, normalised": (lambda: vae(adam, normalised=True), PAIRS),
    "GAN with a teacher": (lambda: gan(adam, averages=True), PAIRS),
    "two parts": (two_parts, PAIRS),
    "noise": (noisy, X),
}


@pytest.mark.parametrize("name", RESUMED)
def test_it_goes_on_to_the_same_bits(name, tmp_path):
    build, data = RESUMED[name]
    settings = {"replicas": 2, "shuffle": True, "checkpoint_every": 3}
    data = part_of(data, EVEN)
    undisturbed = of_launcher(build, data, tmp_path / "undisturbed", **settings)
    of_launcher(build, data, tmp_path / "stopped", **settings, steps=4)
    resumed = of_launcher(build, data, tmp_path / "stopped", **settings)
    assert resumed.history.keys() == undisturbed.history.keys()
    for key, values in undisturbed.history.items():
        assert resumed.history[key][-1] == values[-1]
    found, expected = snapshot(tmp_path / "stopped"), snapshot(tmp_path / "undisturbed")
    for name in [one for one in expected if not one.startswith("host/")]:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_in_float16_the_loss_scale_stands_where_gradients_begin(tmp_path):
    def build():
        model = vae(lambda: keras.optimizers.Adam(1e-2))
        losses_of = model.losses_of
        # So small that without a scale most gradients of 16 bits are zeros.
        model.losses_of = lambda data, training: [2.0**-16 * loss for loss in losses_of(data, training)]
        return model

    data = part_of(PAIRS, EVEN)
    in_float32 = of_launcher(build, data, tmp_path / "32")
    unscaled = {"precision": "mixed_float16", "loss_scale": "none"}
    settings = {"precision": "mixed_float16", "loss_scale": DynamicLossScale(initial_scale=2.0**24)}
    one, two = (of_launcher(build, data, tmp_path / str(count), count, **settings) for count in (1, 2))
    assert furthest(one, two) < 1e-4
    assert (
        furthest(two, in_float32) < 1e-3 < furthest(of_launcher(build, data, tmp_path / "no", **unscaled), in_float32)
    )


def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(tmp_path):
    settings = {"precision": "mixed_float16", "loss_scale": DynamicLossScale(initial_scale=2.0**24), "steps": 12}
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        of_launcher(lambda: gan(adam, averages=True), part_of(PAIRS, EVEN), folder, replicas, **settings)
        state = snapshot(folder)
        skipped = int(state["counters/skipped"])
        assert 1 <= skipped < 12
        assert state["loss_scale/scale"] == 2.0 ** (24 - skipped)
        counts = [int(state[name]) for name in state if "iteration" in name]
        assert counts == [12 - skipped] * 2


def test_replicas_draw_noise_of_their_own_and_another_one_in_each_step(tmp_path):
    class Draws(Noisy):
        def train_step(self, x):
            drawn = {
                "keras": keras.random.normal(()),
                "own": keras.random.normal((), seed=self.seeds),
                "tensorflow": tf.random.normal(()),
            }
            return {**super().train_step(x), **drawn, **{f"{key}^2": value**2 for key, value in drawn.items()}}

    def build():
        model = Draws()
        model.compile(keras.optimizers.Adam(1e-2))
        return model

    found = of_launcher(build, part_of(X, slice(0, 16)), tmp_path, epochs=2).history
    for key in ("keras", "own", "tensorflow"):
        mean, squares = np.array(found[key]), np.array(found[f"{key}^2"])
        assert (squares - mean**2 > 1e-6).all(), f"both replicas drew {mean} by {key}"
        assert mean[0] != mean[1]


def test_validation_is_by_the_test_step_of_its_own(tmp_path):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    data, held_out = part_of(PAIRS, EVEN), part_of(PAIRS, slice(20, 41))
    expected = vae().fit(*data, validation_data=held_out, batch_size=16, epochs=2, shuffle=False, verbose=0)
    found = launcher.fit(
        vae, data, held_out, epochs=2, batch_size=16, shuffle=False, model_dir=str(tmp_path), strategy=strategy_of(2)
    )
    assert found.history.keys() == expected.history.keys()
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
    # Keras shows the mean of the means of batches, of 16 and of 5.
    np.testing.assert_allclose(found.history["val_loss"], expected.history["val_loss"], rtol=1e-2)
    whole = float(sum(found.model.losses_of(part_of(held_out, slice(None)), False)))
    np.testing.assert_allclose(found.history["val_loss"][-1], whole, rtol=1e-5)


def of_dataset():
    return tf.data.Dataset.from_tensor_slices(X).batch(16)


def test_a_step_gets_the_elements_of_a_dataset_as_they_are(tmp_path):
    found = of_launcher(noisy, of_dataset, tmp_path, epochs=1)
    assert found.epoch == [0]


def applies_none():
    class AppliesNone(VAE):
        def train_step(self, data):
            return self.test_step(data)

    model = AppliesNone()
    model.compile("sgd")
    return model


def counts_by_a_variable():
    class Counts(VAE):
        def train_step(self, data):
            self.count.assign_add(1)
            return super().train_step(data)

    model = Counts()
    model.count = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    model.compile("sgd")
    return model


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (gan, {"microbatches": 2}, "train.microbatches = 2: the model has a train_step.* bind 1"),
        (
            gan,
            {"clipping": {"global_norm": 1.0}},
            r"Clipping.global_norm = 1.0: .* global_clipnorm=1.0 to the optimizer",
        ),
        (gan, {"jit_compile": True}, "train.jit_compile = True: .*leave the binding out"),
        (gan, {"shard_optimizer": True}, "train.shard_optimizer = True: .*leave the binding out"),
        (gan, {"optimizer": keras.optimizers.SGD}, "train.optimizer: .*leave the binding out"),
        (lambda: gan(lambda: keras.optimizers.SGD(0.1, use_ema=True)), {}, "use_ema=True acts on each replica"),
        (gan, {"validation": PAIRS}, "its test_step does not take the validation data.*does not have a `call"),
        (applies_none, {}, "train_step applies no Keras optimizer"),
        (counts_by_a_variable, {}, r"Counts's train_step assigns the tf.Variable .*by add_weight\(trainable=False\)"),
        (vae, {"train": (X, NOISE)}, "VAE's train_step does not take this data, in which x is float32"),
        (lambda: distiller(Distiller), {"train": LABELLED, "jit_compile": True}, "has a compute_loss of its own"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(build, arguments, message, tmp_path):
    data = arguments.pop("train", PAIRS)
    with pytest.raises(UsageError, match=message):
        of_launcher(build, data, tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


PROGRAM = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(SUPPORT)]!r}
import launcher
from test_own_train_step import EVEN, PAIRS, adam, gan, part_of

launcher.fit(lambda: gan(adam, averages=True), part_of(PAIRS, EVEN), epochs=8, batch_size=16, checkpoint_every=3)
"""


@pytest.mark.heavy
def test_two_workers_train_as_one_replica_and_a_killed_one_changes_no_bit(run_launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    for folder, command in {
        "one": ["--model_dir=one"],
        "two": ["--workers=2", "--model_dir=two"],
        "killed": ["--workers=2", "--model_dir=killed", "--drill=kill", "--drill_step=10", "--drill_reference=two"],
    }.items():
        module = "launcher.main" if folder == "one" else "launcher.launch"
        done = run_launcher("--gin_file=program.py", *command, module=module, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two, killed = (snapshot(tmp_path / folder) for folder in ("one", "two", "killed"))
    assert json.loads((tmp_path / "killed" / "drill.json").read_text())["passed"]
    for name in [name for name in one if name.startswith(("model/", "optimizer/"))]:
        np.testing.assert_allclose(two[name], one[name], atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(killed[name], two[name], err_msg=name)

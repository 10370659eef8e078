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
from keras import layers
from oracle import eager
from own_steps import (
    CASES,
    EVEN,
    NOISE,
    PAIRS,
    VAE,
    X,
    adam,
    gan,
    net,
    vae,
)
from places import SUPPORT

import launcher
from launcher.checkpoints.store import CheckpointStore
from launcher.errors import UsageError
from launcher.step.precision import DynamicLossScale

pytestmark = pytest.mark.slow


def part_of(data, rows):
    return keras.tree.map_structure(lambda array: array[rows], data)


def of_keras(build, data, epochs=2):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = eager(build())
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


# What others hold, too, or what is trained with a short last batch, below.
OFTEN = ("VAE", "VAE, Adam", "GAN", "GAN, Adam", "distiller")
OFTEN += ("VAE, normalised", "GAN with a penalty", "distiller by hand", "diffusion")
OFTEN += ("GAN with a teacher", "VAE, bounded")  # two optimizers, averages and clipping: `two_parts`


@pytest.mark.parametrize(
    ("name", "replicas"),
    repeated_but(
        [(name, 2) for name in CASES if name not in OFTEN],
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


SHORT = [("VAE, normalised", 49), ("GAN with a penalty", 61), ("distiller by hand", 49), ("diffusion", 61)]


@pytest.mark.parametrize(
    ("name", "rows"),
    repeated_but(SHORT[:2], [*SHORT, *((name, 110 - rows) for name, rows in SHORT), ("metric learning", 49)]),
)
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


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
@pytest.mark.parametrize(
    "build",
    [pytest.param(lambda: gan(adam, averages=True), id="GAN", marks=pytest.mark.nightly), two_parts],
    ids=lambda build: "second alone",
)
def test_a_step_that_is_not_finite_on_one_replica_leaves_no_trace_on_any(build, replicas, tmp_path):
    clean = ((np.delete(X, slice(16, 32), 0)[:32], np.delete(NOISE, slice(16, 32), 0)[:32]),)
    expected = of_launcher(build, clean, tmp_path / "clean", replicas, epochs=1)
    assert furthest(expected, of_keras(build, clean, epochs=1)) < 1e-6  # what a step assigns is as it was built, too
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


@pytest.mark.parametrize("name", repeated_but(["noise"], RESUMED))
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


@pytest.mark.parametrize("replicas", [(2,), pytest.param((1, 2), marks=pytest.mark.nightly)])
def test_in_float16_the_loss_scale_stands_where_gradients_begin(replicas, tmp_path):
    def build():
        model = vae(lambda: keras.optimizers.Adam(1e-2))
        losses_of = model.losses_of
        # So small that without a scale most gradients of 16 bits are zeros.
        model.losses_of = lambda data, training: [2.0**-16 * loss for loss in losses_of(data, training)]
        return model

    data = part_of(PAIRS, EVEN)
    in_float32 = of_keras(build, data)
    unscaled = {"precision": "mixed_float16", "loss_scale": "none"}
    settings = {"precision": "mixed_float16", "loss_scale": DynamicLossScale(initial_scale=2.0**24)}
    *others, two = (of_launcher(build, data, tmp_path / str(count), count, **settings) for count in replicas)
    assert all(furthest(one, two) < 1e-4 for one in others)
    assert (
        furthest(two, in_float32) < 1e-3 < furthest(of_launcher(build, data, tmp_path / "no", **unscaled), in_float32)
    )


@pytest.mark.nightly  # test_own_step_on_pjrt.py has it; a step that is skipped: above
@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(replicas, tmp_path):
    settings = {"precision": "mixed_float16", "loss_scale": DynamicLossScale(initial_scale=2.0**24), "steps": 12}
    of_launcher(lambda: gan(adam, averages=True), part_of(PAIRS, EVEN), tmp_path, replicas, **settings)
    state = snapshot(tmp_path)
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
    expected = eager(vae()).fit(*data, validation_data=held_out, batch_size=16, epochs=2, shuffle=False, verbose=0)
    found = launcher.fit(
        vae, data, held_out, epochs=2, batch_size=16, shuffle=False, model_dir=str(tmp_path), strategy=strategy_of(2)
    )
    assert found.history.keys() == expected.history.keys()
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], rtol=1e-5)
    # Keras shows the mean of the means of batches, of 16 and of 5.
    np.testing.assert_allclose(found.history["val_loss"], expected.history["val_loss"], rtol=1e-2)
    whole = float(sum(found.model.losses_of(part_of(held_out, slice(None)), False)))
    np.testing.assert_allclose(found.history["val_loss"][-1], whole, rtol=1e-5)


class Unmetered(keras.Sequential):
    """Counts its loss by no metric: Keras's fit tells 0."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {self.key: loss}


def test_a_returned_loss_that_no_metric_counts_is_told(tmp_path):
    x, y = np.ones((32, 2), np.float32), np.ones((32, 1), np.float32)
    found = {}
    for key in ("loss", "my_loss"):

        def build(key=key):
            model = Unmetered([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
            model.key = key
            model.compile("sgd", "mse")
            return model

        history = launcher.fit(build, x, y, batch_size=16, epochs=2, model_dir=str(tmp_path / key), verbose=0)
        found[key] = history.history[key]
    assert found["loss"] == found["my_loss"] and 0 < found["loss"][1] < found["loss"][0]


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


def counts_along_the_batch():
    class Judges(VAE):
        @property
        def metrics(self):
            return [*super().metrics, self.along]

    model = Judges()
    model.along = keras.metrics.CosineSimilarity(axis=0, name="along")
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
        (gan, {"shard": "optimizer"}, "train.shard: .*leave the binding out"),
        (gan, {"optimizer": keras.optimizers.SGD}, "train.optimizer: .*leave the binding out"),
        (lambda: gan(lambda: keras.optimizers.SGD(0.1, use_ema=True)), {}, "use_ema=True acts on each replica"),
        (gan, {"validation": PAIRS}, "its test_step does not take the validation data.*does not have a `call"),
        (applies_none, {}, "train_step applies no Keras optimizer"),
        (counts_along_the_batch, {}, "metric 'along' is taken along the batch"),
        (counts_by_a_variable, {}, r"Counts's train_step assigns the tf.Variable .*by add_weight\(trainable=False\)"),
        (vae, {"train": (X, NOISE)}, "VAE's train_step does not take this data, in which x is float32"),
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
from own_steps import EVEN, PAIRS, adam, gan
from test_own_train_step import part_of

launcher.fit(lambda: gan(adam, averages=True), part_of(PAIRS, EVEN), epochs=8, batch_size=16, checkpoint_every=3)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("engine", repeated_but(["tensorflow"], ["tensorflow", "pjrt"]))
def test_two_workers_train_as_one_replica_and_a_killed_one_changes_no_bit(run_launcher, tmp_path, engine):
    (tmp_path / "program.py").write_text(PROGRAM)
    for folder, command in {
        "one": ["--model_dir=one"],
        "two": ["--workers=2", "--model_dir=two"],
        "killed": ["--workers=2", "--model_dir=killed", "--drill=kill", "--drill_step=10", "--drill_reference=two"],
    }.items():
        module = "launcher.main" if folder == "one" else "launcher.launch"
        done = run_launcher("--gin_file=program.py", f"--engine={engine}", *command, module=module, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two, killed = (snapshot(tmp_path / folder) for folder in ("one", "two", "killed"))
    assert json.loads((tmp_path / "killed" / "drill.json").read_text())["passed"]
    for name in [name for name in one if name.startswith(("model/", "optimizer/"))]:
        np.testing.assert_allclose(two[name], one[name], atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(killed[name], two[name], err_msg=name)

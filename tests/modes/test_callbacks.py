"""Callbacks of `launcher.fit` see, decide and write what they do in Keras's own `fit` on one device.

Two oracles: Keras itself, and for what is killed and goes on, a run that nobody touched.
"""

from __future__ import annotations

import collections
import csv
import io
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import launcher

pytestmark = pytest.mark.slow

callbacks, random = keras.callbacks, np.random.default_rng(0)
X = random.normal(size=(64, 4)).astype(np.float32)
LABEL = (X @ random.normal(size=(4, 3))).argmax(-1)
VALIDATION = X[:24], LABEL[:24]
STEPS = 4  # of an epoch


def build(optimizer=None):
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3, activation="softmax")]
    )
    # At this rate the loss goes up and down.
    model.compile(optimizer or keras.optimizers.RMSprop(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def of_keras(made, **arguments):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    settings = {"epochs": 6, "batch_size": 16, "validation_data": VALIDATION, "shuffle": False, "verbose": 0}
    return arguments.pop("build", build)().fit(X, LABEL, callbacks=made, **settings | arguments)


def of_launcher(made, folder, **arguments):
    settings = {"epochs": 6, "batch_size": 16, "validation": VALIDATION, "shuffle": False, "verbose": 0}
    settings |= {"model_dir": str(folder / "run"), **arguments}
    return launcher.fit(settings.pop("build", build), (X, LABEL), callbacks=made, **settings)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def assert_same_rows(found, wanted, exactly=False):
    assert [row.keys() for row in found] == [row.keys() for row in wanted]
    for mine, theirs in zip(found, wanted, strict=True):
        numbers = [[float("nan" if row[name] == "NA" else row[name]) for name in row] for row in (mine, theirs)]
        np.testing.assert_allclose(*numbers, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-5)


def assert_same_weights(path, other, exactly=False):
    """Of two files, a whole model's or one of weights."""

    def weights(file):
        if str(file).endswith(".keras"):
            return keras.saving.load_model(file).get_weights()
        model = build()
        model.load_weights(file)
        return model.get_weights()

    for found, wanted in zip(weights(path), weights(other), strict=True):
        np.testing.assert_allclose(found, wanted, atol=0 if exactly else 1e-5, err_msg=str(path))


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def two():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def all_of_keras(folder):
    """One of each kind that writes or decides, with files below a folder."""
    folder.mkdir(exist_ok=True)
    return [
        callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        callbacks.ReduceLROnPlateau(monitor="val_loss", patience=0, min_delta=0.05, factor=0.5, cooldown=1),
        callbacks.CSVLogger(str(folder / "log.csv")),
        callbacks.ModelCheckpoint(str(folder / "{epoch:02d}.weights.h5"), save_weights_only=True),
        callbacks.ModelCheckpoint(str(folder / "best.keras"), "val_accuracy", save_best_only=True, mode="max"),
        callbacks.ModelCheckpoint(str(folder / "step{epoch}_{batch}.weights.h5"), save_weights_only=True, save_freq=5),
        callbacks.TerminateOnNaN(),
        callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.02, restore_best_weights=True),
    ]


def test_they_write_and_decide_what_they_do_in_keras(two, tmp_path):
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    expected = of_keras(all_of_keras(theirs), epochs=12)
    found = of_launcher(all_of_keras(mine), tmp_path, epochs=12, strategy=two)
    assert files_of(mine) == files_of(theirs)
    assert len(expected.epoch) < 12  # stopped early, and has gone back
    assert found.epoch == expected.epoch
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert_same_rows(rows_of(mine / "log.csv"), rows_of(theirs / "log.csv"))
    for name in files_of(mine):
        if not name.endswith(".csv"):
            assert_same_weights(mine / name, theirs / name)
    for one, other in zip(found.model.get_weights(), expected.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


class Told(callbacks.Callback):
    """Writes down all that it is told."""

    def __init__(self):
        super().__init__()
        self.calls = []


for _hook in [name for name in dir(callbacks.Callback) if name.startswith("on_") and "predict" not in name]:
    if _hook not in ("on_batch_begin", "on_batch_end"):

        def _note(self, *arguments, _hook=_hook, **named):
            logs = named["logs"] if named else arguments[-1]
            number = arguments[0] if len(arguments) + len(named) > 1 else None
            self.calls.append([_hook, number, {key: float(value) for key, value in (logs or {}).items()}])

        setattr(Told, _hook, _note)


@pytest.mark.parametrize("freq", [1, 2, [1, 4]])
def test_every_hook_is_called_as_in_keras(freq, tmp_path):
    theirs, mine = Told(), Told()
    settings = {"epochs": 5, "initial_epoch": 2, "validation_freq": freq, "validation_batch_size": 8}
    of_keras([theirs], **settings)
    found = of_launcher([mine], tmp_path, **settings)
    assert [call[:2] for call in mine.calls] == [call[:2] for call in theirs.calls]
    for (hook, number, logs), (*_, expected) in zip(mine.calls, theirs.calls, strict=True):
        assert logs.keys() == expected.keys(), (hook, number)
        for name, value in expected.items():
            assert logs[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (hook, number, name)
    assert mine.params == theirs.params | {"verbose": 0}
    assert found.epoch == [2, 3, 4]


class Dies(callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self.step:
            raise KeyboardInterrupt


class Remembers(callbacks.Callback):
    """A callback of one's own with attributes of many kinds, some of which it makes when an epoch begins."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.by_epoch, self.recent = collections.defaultdict(list), collections.deque(maxlen=3)
        self.seen, self.last = set(), None

    def on_train_begin(self, logs=None):
        self.model.optimizer.learning_rate = 0.05

    def on_epoch_begin(self, epoch, logs):
        self.clock = io.StringIO()

    def on_train_batch_end(self, batch, logs=None):
        self.clock.write(str(batch))
        self.by_epoch[len(self.seen)].append(logs["loss"])
        self.recent.append(batch)
        self.last = (batch, np.float32(logs["loss"]), tf.constant(1.0))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.add(epoch)
        if self.by_epoch[epoch][-1] > min(map(min, self.by_epoch.values())):
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate.numpy()) * 0.7
        record = {**self.by_epoch}, [*self.recent], sorted(self.seen), [float(part) for part in self.last]
        with open(self.path, "w") as file:
            json.dump(record, file)


@pytest.mark.parametrize("step", [6, 8, 11, 21])
def test_a_killed_run_goes_on_as_if_nobody_had_touched_it(step, tmp_path):
    def train(name, *more, **settings):
        folder = tmp_path / name
        made = [*all_of_keras(folder), Remembers(str(folder / "own.json")), *more]
        return of_launcher(made, folder, epochs=12, checkpoint_every=3, **settings)

    undisturbed = train("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        train("killed", Dies(step))
    resumed = train("killed")
    assert resumed.history == undisturbed.history
    whole, killed = tmp_path / "undisturbed", tmp_path / "killed"
    own = {name for name in files_of(whole) if not name.startswith("run")}
    assert own == {name for name in files_of(killed) if not name.startswith("run")}
    for name in own:
        if name.endswith((".csv", ".json")):
            assert (killed / name).read_text() == (whole / name).read_text()
        else:
            assert_same_weights(killed / name, whole / name, exactly=True)
    again = train("killed")
    assert again.history == undisturbed.history
    assert (killed / "log.csv").read_text() == (whole / "log.csv").read_text()

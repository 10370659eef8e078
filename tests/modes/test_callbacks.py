"""Callbacks of `launcher.fit` see, decide and write what they do in Keras's own `fit` on one device.

Two oracles: Keras itself, and for what is killed and goes on, a run that nobody touched.
"""

from __future__ import annotations

import collections
import csv
import http.server
import io
import json
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but

import launcher
from launcher.errors import UsageError
from launcher.run.actions import callback_state
from launcher.run.actions.spikes import Spikes
from launcher.tasks.keras_callbacks import TESTED, TRAINED, works_by_batches

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
            model = keras.saving.load_model(file)
            return [*model.get_weights(), *(one.numpy() for one in model.optimizer.variables)]
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


@pytest.mark.parametrize(
    ("one", "by_batches"),
    [
        (callbacks.ModelCheckpoint("a.keras"), ()),
        (callbacks.ModelCheckpoint("a.keras", save_freq=3), TRAINED),
        (callbacks.TensorBoard(), ()),
        (callbacks.TensorBoard(update_freq=3), TRAINED + TESTED),
        (callbacks.TensorBoard(profile_batch=3), TRAINED),
        (callbacks.BackupAndRestore("a"), ()),
        (callbacks.EarlyStopping(), ()),
        (callbacks.LambdaCallback(on_epoch_end=print), ()),
        (callbacks.LambdaCallback(on_train_batch_end=print), TRAINED),
        (callbacks.TerminateOnNaN(), TRAINED),
    ],
)
def test_only_what_works_by_batches_ends_loops_on_the_device(one, by_batches):
    for hooks in (TRAINED, TESTED):
        assert works_by_batches(one, hooks) == (hooks[0] in by_batches), hooks


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
            self.calls.append([_hook, number, {key: float(value) for key, value in logs.items()}])

        setattr(Told, _hook, _note)


@pytest.mark.parametrize("freq", repeated_but([2], [1, 2, [1, 4]]))
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


@pytest.mark.parametrize("steps", repeated_but([3], [2, 3, 9]))
def test_batches_are_told_of_as_often_as_steps_per_execution_says(steps, two, tmp_path):
    def grouped():
        model = build()
        model.steps_per_execution = steps
        return model

    theirs, mine = Told(), Told()
    of_keras([theirs], build=grouped)
    of_launcher([mine], tmp_path, build=grouped, strategy=two)
    mine, theirs = ([call for call in one.calls if "_test_" not in call[0]] for one in (mine, theirs))
    assert [call[0] for call in mine] == [call[0] for call in theirs]
    for (hook, number, logs), (_, expected, their_logs) in zip(mine, theirs, strict=True):
        # Keras before 3.12 gives both hooks the number of the first batch.
        assert number in (expected, None if expected is None else expected + steps - 1), hook
        assert logs == pytest.approx(their_logs, rel=1e-4, abs=1e-5), (hook, number)


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


@pytest.mark.parametrize("step", repeated_but([13], [6, 9, 11, 13, 21]))
def test_a_killed_run_goes_on_as_if_nobody_had_touched_it(step, tmp_path):
    def train(name, *more, **settings):
        folder = tmp_path / name
        made = [*all_of_keras(folder), Remembers(str(folder / "own.json")), *more]
        return of_launcher(made, folder, epochs=12, checkpoint_every=3, **settings)

    undisturbed = train("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        train("killed", Dies(step))
    with open(tmp_path / "killed" / "log.csv", "a") as file:
        file.write("7,torn")  # past the last checkpoint
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


def test_what_is_kept_of_a_callback_has_the_same_order_in_every_process():
    callback = callbacks.History()
    for name in "qwertyuiop":
        setattr(callback, name, 1.0)
    kept = callback_state.changed(callback, {}, set("poiuytrewq"))
    assert [*kept] == sorted(kept)
    assert {*"qwertyuiop"} <= kept.keys()


def with_averages():
    return build(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=9))


@pytest.mark.parametrize("swap_on_epoch", repeated_but([True], [False, True]))
def test_averages_of_the_optimizer_are_swapped_and_end_as_the_weights(swap_on_epoch, two, tmp_path):
    def made(folder):
        folder.mkdir()
        path = str(folder / "{epoch}.weights.h5")
        saves = callbacks.ModelCheckpoint(path, save_weights_only=True)
        return [callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch), saves]

    expected = of_keras(made(tmp_path / "theirs"), build=with_averages, epochs=4)
    found = of_launcher(made(tmp_path / "mine"), tmp_path, build=with_averages, epochs=4, strategy=two)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-4, err_msg=name)
    for name in files_of(tmp_path / "theirs"):
        assert_same_weights(tmp_path / "mine" / name, tmp_path / "theirs" / name)
    for one, other in zip(found.model.get_weights(), expected.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def events_of(folder):
    """(file's folder, tag, step) of each scalar, and the values."""
    found = {}
    for path in sorted(folder.rglob("events.out.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                if value.tensor.dtype == 1:
                    place = path.parent.name, value.tag, event.step
                    found.setdefault(place, []).append(tf.make_ndarray(value.tensor).item())
    return found


@pytest.mark.parametrize("settings", repeated_but([{"update_freq": 2}], [{}, {"update_freq": 2}]))
def test_tensorboard_has_the_events_that_keras_writes(settings, tmp_path):
    of_keras([callbacks.TensorBoard(tmp_path / "theirs", **settings)], epochs=2)
    of_launcher([callbacks.TensorBoard(tmp_path / "mine", **settings)], tmp_path, epochs=2)
    expected, found = events_of(tmp_path / "theirs"), events_of(tmp_path / "mine")
    assert found.keys() == expected.keys()
    assert any(tag.startswith("batch_") for _, tag, _ in found) == bool(settings)
    for place, values in expected.items():
        np.testing.assert_allclose(found[place], values, rtol=1e-4, err_msg=str(place))


@pytest.mark.parametrize("settings", repeated_but([{}], [{}, {"checkpoint_every": 0}]))
def test_a_backup_is_written_and_never_read(settings, tmp_path):
    class Looks(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.files = files_of(tmp_path / "backup")

    def made():
        return [callbacks.BackupAndRestore(str(tmp_path / "backup")), looks]

    looks = Looks()
    undisturbed = of_launcher([], tmp_path / "undisturbed", epochs=4, validation=None)
    with pytest.raises(KeyboardInterrupt):
        of_launcher([*made(), Dies(10)], tmp_path, epochs=4, validation=None, **settings)
    assert files_of(tmp_path / "backup") == looks.files == ["latest.weights.h5", "training_metadata.json"]
    resumed = of_launcher(made(), tmp_path, epochs=4, validation=None, **settings)
    assert resumed.history == undisturbed.history
    assert not (tmp_path / "backup").exists()
    attempts = [json.loads(line) for line in (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()]
    begins = [line["step"] for line in attempts if line["is"] == "begin"]
    assert begins == [0, 0 if settings else 8]


@pytest.mark.parametrize("kind", ["terminates", "own"])
def test_a_training_ends_within_an_epoch_where_it_does_in_keras(kind, tmp_path):
    class Ends(callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.optimizer.iterations >= 6

    weight = np.ones(64, np.float32)
    if kind == "terminates":
        weight[40] = np.inf  # in the third batch
    made = callbacks.TerminateOnNaN if kind == "terminates" else Ends
    theirs, mine = Told(), Told()
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    settings = {"epochs": 3, "batch_size": 16, "shuffle": False, "verbose": 0}
    build().fit(X, LABEL, sample_weight=weight, validation_data=VALIDATION, callbacks=[made(), theirs], **settings)
    run = str(tmp_path / "run")
    data = X, LABEL, weight
    found = launcher.fit(build, data, VALIDATION, callbacks=[made(), mine], model_dir=run, **settings)
    assert [call[:2] for call in mine.calls] == [call[:2] for call in theirs.calls]
    if kind == "own":
        assert [call[2] for call in mine.calls] == [pytest.approx(call[2], rel=1e-4) for call in theirs.calls]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == (3 if kind == "terminates" else 6)
    again = launcher.fit(build, data, VALIDATION, callbacks=[made()], model_dir=run, **settings)
    assert again.history == found.history


def test_a_run_that_goes_back_tells_them_of_each_epoch_once(tmp_path):
    weight = np.ones(64, np.float32)
    weight[40] = np.inf
    rewind = Spikes(action="rewind", window=10, skip_batches=1, max_rewinds=9)
    made = [callbacks.CSVLogger(str(tmp_path / "log.csv")), Remembers(str(tmp_path / "own.json"))]
    settings = {"epochs": 3, "batch_size": 16, "shuffle": False, "checkpoint_every": 3, "spikes": rewind}
    history = launcher.fit(build, (X, LABEL, weight), callbacks=made, model_dir=str(tmp_path / "run"), **settings)
    assert (tmp_path / "run" / "attempts.jsonl").read_text().count("step") > 3  # it went back
    assert history.epoch == [0, 1, 2]
    assert [float(row["loss"]) for row in rows_of(tmp_path / "log.csv")] == history.history["loss"]
    batches = json.loads((tmp_path / "own.json").read_text())[0]
    assert {epoch: len(losses) for epoch, losses in batches.items()} == {"0": STEPS, "1": STEPS, "2": STEPS}


def test_a_remote_monitor_posts_each_epoch_and_lambdas_get_their_logs(tmp_path):
    posted, ended = [], []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monitor = callbacks.RemoteMonitor(f"http://127.0.0.1:{server.server_port}", send_as_json=True)
        told = callbacks.LambdaCallback(on_train_begin=lambda logs: None, on_train_end=lambda logs: ended.append(logs))
        history = of_launcher([monitor, [told]], tmp_path, epochs=2)
        server.shutdown()
    assert posted == [
        {"epoch": epoch, **{name: values[epoch] for name, values in history.history.items()}} for epoch in range(2)
    ]
    assert ended == [{name: values[-1] for name, values in history.history.items()}]


def test_what_is_shown_is_for_verbose_to_say(tmp_path, capsys):
    of_launcher([], tmp_path / "quiet", epochs=1)
    assert capsys.readouterr().out == ""
    made = [callbacks.ProgbarLogger(), callbacks.ModelCheckpoint(str(tmp_path / "a.keras"))]
    of_launcher(made, tmp_path / "shown", epochs=2, verbose=2)
    shown = capsys.readouterr().out
    assert "Epoch 2/2" in shown and "4/4 - " in shown
    assert shown.count("ModelCheckpoint: called as in Keras, on the chief; the run itself keeps checkpoints") == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: callbacks.ModelCheckpoint("{val_mae}.keras"),
            'callbacks: ModelCheckpoint.on_epoch_end: Failed to format this callback filepath: "{val_mae}.keras"',
        ),
        (lambda: callbacks.CSVLogger("no/such.csv"), "callbacks: CSVLogger.on_train_begin: [Errno 2] No such file"),
        (callbacks.SwapEMAWeights, "callbacks: SwapEMAWeights.on_test_begin: SwapEMAWeights must be used when"),
    ],
)
def test_a_mistake_in_a_callback_of_keras_is_one_message(made, message, tmp_path):
    with pytest.raises(UsageError, match=re.escape(message)):
        of_launcher([made()], tmp_path, epochs=1)


def test_a_mistake_of_ones_own_comes_as_it_is(tmp_path):
    with pytest.raises(KeyError, match="mae"):
        of_launcher([callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs["mae"])], tmp_path, epochs=1)


def test_another_first_epoch_than_that_of_the_folder_is_refused(tmp_path):
    of_launcher([], tmp_path, epochs=1)
    with pytest.raises(UsageError, match="initial_epoch = 1, and the run in this model_dir began with 0"):
        of_launcher([], tmp_path, epochs=3, initial_epoch=1)


def test_an_argument_that_is_changed_counts_for_what_goes_on(tmp_path):
    def stops(patience):
        return callbacks.EarlyStopping("loss", min_delta=10.0, patience=patience)

    of_launcher([stops(9)], tmp_path, epochs=3)
    assert of_launcher([stops(4)], tmp_path, epochs=9).epoch == [0, 1, 2, 3, 4]

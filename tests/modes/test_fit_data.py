"""`launcher.fit` takes the data that Keras's `fit` takes, and trains on it to the same weights.

Keras itself is the oracle, on one device, in float32.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from oracle import eager

import launcher
from launcher.errors import UsageError
from launcher.run.input_position import InputPosition

pytestmark = pytest.mark.slow

layers, random = keras.layers, np.random.default_rng(0)
X = random.normal(size=(48, 6)).astype(np.float32)
Y = (X @ random.normal(size=(6, 3))).argmax(-1)
SERIES, TARGETS = random.normal(size=(60, 3)), random.normal(size=(60, 1))
WORDS = [random.integers(1, 20, size) for size in random.integers(2, 9, 32)]


def small():
    model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def of_five_steps():
    inputs = keras.Input((5, 3))
    model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(4)(inputs)))
    model.compile("adam", "mse", metrics=["mae"])
    return model


def of_words():
    embedding = layers.Embedding(20, 4, mask_zero=True)
    model = keras.Sequential([embedding, layers.LSTM(4), layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def of_keras(build, *data, **arguments):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    return eager(build()).fit(*data, epochs=2, verbose=0, **arguments)


def assert_same(ours, keras_own):
    assert ours.history.keys() == keras_own.history.keys()
    for name, values in keras_own.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
    for found, wanted in zip(ours.model.weights, keras_own.model.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-5, err_msg=found.path)


@pytest.fixture
def two():
    # Without collectives, which TensorFlow takes for those of another strategy in the same process.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


@pytest.fixture
def one():
    return tf.distribute.OneDeviceStrategy("CPU:0")


@pytest.mark.parametrize(
    "settings", repeated_but([{"microbatches": 2}], [{}, {"microbatches": 2}, {"jit_compile": True}])
)
def test_replicas_need_not_divide_the_batch(settings, two, tmp_path):
    expected = of_keras(small, X, Y, batch_size=7, shuffle=False, validation_data=(X[:23], Y[:23]))
    settings = {"batch_size": 7, "shuffle": False, "epochs": 2, **settings}
    found = launcher.fit(small, (X, Y), (X[:23], Y[:23]), model_dir=str(tmp_path), strategy=two, **settings)
    assert_same(found, expected)


@pytest.mark.nightly  # a PyDataset has batches of 7, and a dataset some of 2, below
def test_nor_the_batches_of_a_dataset(two, tmp_path):
    def batches(rows):
        return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(7)

    expected = of_keras(small, batches(48), validation_data=batches(23))
    assert_same(
        launcher.fit(small, batches(48), batches(23), epochs=2, model_dir=str(tmp_path), strategy=two), expected
    )


def windows(start, stop):
    return keras.utils.timeseries_dataset_from_array(
        SERIES[start:stop].astype(np.float32), TARGETS[start:stop], sequence_length=5, batch_size=8
    )


def padded(start, stop):
    """A batch of 2 rows, and others of 4, as long as their longest; a dataset that says nothing about lengths."""
    rows = tf.data.Dataset.from_generator(
        lambda: ((WORDS[row], Y[row]) for row in range(start, stop)),
        output_signature=(tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)),
    )
    return rows.take(2).padded_batch(4).concatenate(rows.skip(2).padded_batch(4))


@pytest.mark.parametrize(
    ("build", "batches"), repeated_but([(of_words, padded)], [(of_five_steps, windows), (of_words, padded)])
)
@pytest.mark.parametrize("microbatches", repeated_but([1], [1, 2]))
def test_sizes_of_a_batch_need_not_be_known(build, batches, microbatches, two, tmp_path):
    expected = of_keras(build, batches(0, 20), validation_data=batches(20, 31))
    settings = {"epochs": 2, "model_dir": str(tmp_path), "strategy": two, "microbatches": microbatches}
    assert_same(launcher.fit(build, batches(0, 20), batches(20, 31), **settings), expected)


def test_nor_the_number_of_its_axes(one, tmp_path):
    def batches(opaque):
        found = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        return found.map(lambda x, y: (tf.numpy_function(lambda of: of, [x], tf.float32), y)) if opaque else found

    expected = of_keras(small, batches(False))
    assert_same(launcher.fit(small, batches(True), epochs=2, model_dir=str(tmp_path), strategy=one), expected)


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """Not known to Keras by its name."""

    def __call__(self, step):
        return 0.01 / (1.0 + tf.cast(step, tf.float32))


@pytest.mark.parametrize("rate", [0.01, pytest.param(Falling(), marks=pytest.mark.nightly)])
def test_an_optimizer_may_be_made_before_the_model(rate, two, tmp_path):
    def of(optimizer):
        model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(3, activation="softmax")])
        model.compile(optimizer, "sparse_categorical_crossentropy")
        return model

    def made():
        found = keras.optimizers.AdamW(rate, weight_decay=0.1)
        found.exclude_from_weight_decay(var_names=["bias"])
        if rate == 0.01:
            found.learning_rate = 0.02
        return found

    expected, optimizer = of_keras(lambda: of(made()), X, Y, batch_size=8, shuffle=False), made()
    for folder in "first", "second":
        settings = {"batch_size": 8, "shuffle": False, "epochs": 2, "model_dir": str(tmp_path / folder)}
        assert_same(launcher.fit(lambda: of(optimizer), (X, Y), strategy=two, **settings), expected)


class Reversing(keras.utils.PyDataset):
    """Batches of 7, the rows of each epoch in the reverse order of the one before."""

    def __init__(self, rows=48, first_end=True, **kwargs):
        super().__init__(**kwargs)
        self.order, self.counts = np.arange(rows), first_end

    def __len__(self):
        return -(-len(self.order) // 7)

    def __getitem__(self, index):
        rows = self.order[7 * index : 7 * index + 7]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        if self.counts:
            self.order = self.order[::-1]
        self.counts = True


def endless(rows=48):
    while True:
        for first in range(0, rows, 8):
            yield X[first : first + 8], Y[first : first + 8]


class Loader:
    """What a torch DataLoader looks like: lists of what has `.numpy()`, begun again for each epoch."""

    def __len__(self):
        return 6

    def __iter__(self):
        return ([tf.constant(X[at : at + 8]), tf.constant(Y[at : at + 8])] for at in range(0, 48, 8))


ENDLESS = {"steps_per_epoch": 4, "validation_steps": 2}
PYTHON = {
    "a PyDataset": (Reversing, lambda: Reversing(23), {"shuffle": False}),
    "with workers": (lambda: Reversing(workers=3), lambda: (X[:16], Y[:16]), {"shuffle": False}),
    "a generator": (endless, lambda: endless(16), ENDLESS),
    "a loader": (Loader, Loader, {}),
}


@pytest.mark.parametrize(
    ("name", "is_function"),
    repeated_but(
        [("a PyDataset", True), ("a generator", True)],
        [(name, is_function) for name in PYTHON for is_function in (False, True)],
    ),
)
def test_batches_may_be_made_by_python(name, is_function, two, tmp_path):
    train, validation, arguments = PYTHON[name]
    # Keras tells a PyDataset of the end of an epoch before the first one, too, as it builds the model.
    of_first = Reversing(first_end=False) if "PyDataset" in name or "workers" in name else train()
    if name == "a loader":
        dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
        expected = of_keras(small, dataset, validation_data=dataset)
    else:
        expected = of_keras(small, of_first, validation_data=validation(), **arguments)
    train, validation = (train, validation) if is_function else (train(), validation())
    settings = {"epochs": 2, "model_dir": str(tmp_path), "strategy": two, **arguments}
    assert_same(launcher.fit(small, train, validation, **settings), expected)


class _Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations > 9:
            raise KeyboardInterrupt


@pytest.mark.nightly  # a dataset without a state of its own is read again, too, below
@pytest.mark.parametrize("name", [*PYTHON][:3])
def test_a_restarted_run_ends_as_an_undisturbed_one(name, one, tmp_path):
    def train(folder, *callbacks):
        train, _, arguments = PYTHON[name]
        settings = {
            "epochs": 3,
            "checkpoint_every": 4,
            "strategy": one,
            "steps_per_epoch": arguments.get("steps_per_epoch"),
        }
        return launcher.fit(small, train(), callbacks=callbacks, model_dir=str(tmp_path / folder), **settings)

    undisturbed = train("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        train("stopped", _Stops())
    resumed = train("stopped")
    for found, wanted in zip(resumed.model.weights, undisturbed.model.weights, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())


def three(*sizes):
    return iter([(X[:size], Y[:size]) for size in sizes])


def broken():
    yield X[:8], Y[:8]
    yield X[:8], Y[:8]
    yield X[:8], {}["label"]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (three(8, 8, 8), "generator ended after 3 batches, and more are asked for"),
        (three(4, 8, 8, 8), "more than 4 examples, which the first one has"),
        (tf.data.Dataset.from_generator(
            lambda: three(4, 8, 8, 8), output_signature=(tf.TensorSpec([None, 6]), tf.TensorSpec([None], tf.int64))
        ), "more than 4 examples, which the first one has.* leave steps_per_epoch out"),
        (broken(), r"test_fit_data.py line \d+, in broken\(\): .*KeyError: 'label'"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_trained_on_end_the_run_with_one_message(train, message, one, tmp_path):
    with pytest.raises(UsageError, match=message):
        launcher.fit(small, train, steps_per_epoch=6, model_dir=str(tmp_path), strategy=one)


def as_lists(rows):
    return X[:rows].tolist(), Y[:rows].tolist()


def as_sparse(rows):
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(X[:rows]), Y[:rows]))
    return dataset.batch(8)


@pytest.mark.parametrize("data", repeated_but([as_sparse], [as_lists, as_sparse]))
def test_numbers_may_be_in_lists_or_sparse(data, one, tmp_path):
    expected = of_keras(small, X, Y, validation_data=(X[:23], Y[:23]), batch_size=8, shuffle=False)
    settings = {"epochs": 2, "batch_size": 8, "shuffle": False, "model_dir": str(tmp_path), "strategy": one}
    assert_same(launcher.fit(small, data(48), data(23), **settings), expected)


def test_steps_per_epoch_is_what_an_epoch_of_arrays_is_and_they_may_be_validated_on_a_dataset(one, tmp_path):
    validation = tf.data.Dataset.from_tensor_slices((X[:23], Y[:23])).batch(5)
    given = {"steps_per_epoch": 3, "batch_size": 8, "shuffle": False}
    expected = of_keras(small, X, Y, validation_data=validation, **given)
    settings = {"epochs": 2, "model_dir": str(tmp_path), "strategy": one, **given}
    assert_same(launcher.fit(small, (X, Y), validation, **settings), expected)


class Scaling(layers.Layer):
    """What keras-hub's preprocessors look like."""

    def call(self, x, y=None, sample_weight=None):
        features = {"scaled": x["raw"] * 0.5, "squared": x["raw"] ** 2}
        return keras.utils.pack_x_y_sample_weight(features, y, sample_weight)


class Hub(keras.Model):
    """What keras-hub's tasks look like."""

    def __init__(self):
        inputs = {name: keras.Input((6,), name=name) for name in ("scaled", "squared")}
        outputs = layers.Dense(3, activation="softmax")(layers.Concatenate()([*inputs.values()]))
        super().__init__(inputs, outputs)
        self.preprocessor = Scaling()
        self.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])

    def preprocess_samples(self, x, y=None, sample_weight=None):
        return self.preprocessor(x, y=y, sample_weight=sample_weight)


@pytest.mark.parametrize("is_dataset", repeated_but([True], [False, True]))
def test_a_models_preprocessor_is_mapped_over_the_data(is_dataset, two, tmp_path):
    def data(rows):
        arrays = {"raw": X[:rows]}, Y[:rows]
        return tf.data.Dataset.from_tensor_slices(arrays).batch(8) if is_dataset else arrays

    prepared = {"scaled": X * 0.5, "squared": X**2}
    validation = {name: part[:23] for name, part in prepared.items()}, Y[:23]
    expected = of_keras(Hub, prepared, Y, validation_data=validation, batch_size=8, shuffle=False)
    settings = {"epochs": 2, "batch_size": 8, "shuffle": False, "model_dir": str(tmp_path), "strategy": two}
    assert_same(launcher.fit(Hub, data(48), data(23), **settings), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": padded(0, 20), "build": of_words, "jit_compile": True}, "XLA .* needs all but the first: pad, and"),
        (
            {"train": tf.data.Dataset.from_tensors((tf.ragged.constant([[1], [1, 2]]), Y[:2]))},
            "x of .* is ragged: have",
        ),
        ({"train": ([[1, 2], [3]], [0, 1])}, "training x: lists of numbers must be of one length"),
        ({"train": iter([(X, Y)])}, "does not say how many batches it has: say so with steps_per_epoch"),
        ({"train": iter([]), "steps_per_epoch": 2}, "the training list_iterator gives no batches"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(change, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        launcher.fit(**{"build": small, "model_dir": str(tmp_path / "run")} | change)
    assert not (tmp_path / "run").exists()


def shuffled(counts):
    """A dataset, or one that counts its rows, which the state of an iterator does not tell of."""
    found, rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(40, seed=3), tf.Variable(0)
    if counts:
        found = found.map(lambda x, y: (x, y, tf.cast(rows.assign_add(1) > 0, tf.float32)))
    return found.batch(8)


@pytest.mark.parametrize(
    ("strategy", "counts"),
    repeated_but(
        [("one", False), ("one", True)], [(strategy, counts) for strategy in ("one", "two") for counts in (False, True)]
    ),
)
def test_a_dataset_goes_on_from_its_own_state_or_is_read_again(counts, strategy, request, tmp_path, monkeypatch):
    strategy = request.getfixturevalue(strategy)
    keras.utils.set_random_seed(0)  # before the dataset is made, as after
    opened, open_at = [], InputPosition.open
    monkeypatch.setattr(InputPosition, "open", lambda self: opened.append(self) or open_at(self))

    def train(folder, *callbacks):
        settings = {"epochs": 3, "checkpoint_every": 4, "strategy": strategy, "model_dir": str(tmp_path / folder)}
        return launcher.fit(small, shuffled(counts), callbacks=callbacks, **settings)

    undisturbed = train("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        train("stopped", _Stops())
    (manifest,) = tmp_path.glob("stopped/checkpoints/*8/manifest.json")
    assert ("input_position" in manifest.read_text()) != counts
    resumed = train("stopped")
    assert str(opened[-1]) == ("reading the dataset again: 8 of 8 batches" if counts else "opening the data")
    assert_same(resumed, undisturbed)
    for found, wanted in zip(resumed.model.weights, undisturbed.model.weights, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())

"""`launcher.fit` does what Keras's `fit` does on one device: the same epochs and weights, on one replica and on two.

Keras itself is the oracle, on one device, in float32, with examples in their own order.
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from oracle import eager

import launcher
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

layers, random = keras.layers, np.random.default_rng(0)
X = random.normal(size=(64, 6)).astype(np.float32)
LABEL = (X @ random.normal(size=(6, 3))).argmax(-1)
POSITIVE = (LABEL == 1).astype(np.float32)[:, np.newaxis]
WEIGHT = random.uniform(0.5, 2.0, 64).astype(np.float32)
WORDS = np.where(np.arange(9) < random.integers(2, 10, (64, 1)), random.integers(1, 20, (64, 9)), 0)


def classifier(**compiled):
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-2))(inputs)
    hidden = layers.BatchNormalization()(hidden)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))
    settings = {"optimizer": keras.optimizers.RMSprop(1e-2), "loss": "sparse_categorical_crossentropy"}
    model.compile(**settings | compiled)
    return model


def scored():
    return classifier(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")])


def weighted_by_decay():
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.1, global_clipnorm=0.5)
    return classifier(optimizer=optimizer, weighted_metrics=["accuracy"])


def judged_by_curve():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(inputs))
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(), keras.metrics.Precision()])
    return model


def of_two_outputs():
    first, second = keras.Input((4,), name="first"), keras.Input((2,), name="second")
    joined = layers.Concatenate()([layers.Dense(4, activation="tanh")(first), second])
    outputs = {"kind": layers.Dense(3, name="kind")(joined), "sign": layers.Dense(1, name="sign")(joined)}
    model = keras.Model({"first": first, "second": second}, outputs)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.Adam(1e-2),
        {"kind": crossentropy, "sign": keras.losses.BinaryCrossentropy(from_logits=True)},
        loss_weights={"kind": 1.0, "sign": 0.2},
        metrics={"kind": ["accuracy"], "sign": [keras.metrics.MeanSquaredError()]},
    )
    return model


def of_words():
    model = keras.Sequential(
        [
            layers.Embedding(20, 4, mask_zero=True),
            layers.LSTM(4, return_sequences=True),
            layers.Dense(20, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def not_built_yet():
    model = keras.Sequential([layers.Dense(4, activation="relu"), layers.Dense(3)])
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


TWO = ({"first": X[:, :4], "second": X[:, 4:]}, {"kind": LABEL, "sign": POSITIVE})
CASES = {
    "metrics and batch statistics": (scored, (X, LABEL), {}),
    "decay, clipping and example weights": (weighted_by_decay, (X, LABEL, WEIGHT), {}),
    "two losses": (of_two_outputs, TWO, {}),
    "a mask": (of_words, (WORDS, np.roll(WORDS, -1, axis=1)), {}),
    "class weights": (not_built_yet, (X, LABEL), {"class_weight": {0: 2.0, 2: 0.5}}),
}


def of_keras(build, data, **arguments):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = eager(build())
    x, y, *weight = data
    validation = tuple(keras.tree.map_structure(lambda array: array[:24], part) for part in data)
    arguments.setdefault("epochs", 3)
    weight = {"sample_weight": weight[0]} if weight else {}
    history = model.fit(
        x, y, validation_data=validation, batch_size=16, shuffle=False, verbose=0, **weight, **arguments
    )
    return history, validation


def assert_same(ours, keras_own, tolerance=1e-5, shown=1e-5, skip=()):
    assert ours.epoch == keras_own.epoch
    assert ours.history.keys() == keras_own.history.keys()
    for name in keras_own.history.keys() - set(skip):
        np.testing.assert_allclose(ours.history[name], keras_own.history[name], rtol=shown, atol=shown, err_msg=name)
    for found, wanted in zip(ours.model.weights, keras_own.model.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=tolerance, err_msg=found.path)


@pytest.fixture
def two():
    # Without collectives, which TensorFlow takes for those of another strategy in the same process.
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


# Of metrics, class weights and the losses of outputs, test_keras_metrics.py; of two losses, test_keras_losses.py.
@pytest.mark.parametrize("name", repeated_but(["decay, clipping and example weights"], CASES))
def test_it_trains_as_keras_does_on_one_device(name, two, tmp_path):
    build, data, arguments = CASES[name]
    expected, validation = of_keras(build, data, **arguments)
    settings = {"epochs": 3, "batch_size": 16, "shuffle": False, **arguments}
    found = launcher.fit(build, data, validation, model_dir=str(tmp_path), strategy=two, **settings)
    # Keras shows the mean of the batches' means, where they differ in length.
    unequal = ("val_kind_loss", "val_sign_loss")
    assert_same(found, expected, skip=unequal)
    if name == "two losses":
        kind, sign, whole = (np.array(found.history[key]) for key in (*unequal, "val_loss"))
        np.testing.assert_allclose(kind + 0.2 * sign, whole, rtol=1e-5)


def of_keras_in_parts(build, parts, batch_size=16):
    """The weights after an epoch in which Keras sees each part of a batch alone, and what came of them is averaged."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = build()
    moving = model.non_trainable_variables
    for rows in np.arange(len(X)).reshape(-1, parts, batch_size // parts):
        before, found = [variable.numpy() for variable in moving], []
        for part in rows:
            with tf.GradientTape() as tape:
                loss = model.compute_loss(y=LABEL[part], y_pred=model(X[part], training=True))
            gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
            found.append((gradients, [variable.numpy() for variable in moving]))
            for variable, value in zip(moving, before, strict=True):
                variable.assign(value)
        gradients, moved = keras.tree.map_structure(lambda *of_parts: sum(of_parts) / parts, *found)
        model.optimizer.apply(gradients, model.trainable_variables)
        for variable, value in zip(moving, moved, strict=True):
            variable.assign(value)
    return [variable.numpy() for variable in model.weights]


LOCAL = [({}, 2), ({"jit_compile": True}, 2), ({"jit_compile": True, "microbatches": 2}, 4)]


@pytest.mark.parametrize(("settings", "parts"), repeated_but(LOCAL[2:], LOCAL))
def test_local_batch_norm_is_that_of_keras_on_each_part_of_the_batch(settings, parts, two, tmp_path):
    settings = {"batch_norm": "local", "batch_size": 16, "shuffle": False, "strategy": two, **settings}
    found = launcher.fit(scored, (X, LABEL), model_dir=str(tmp_path), **settings).model
    for variable, expected in zip(found.weights, of_keras_in_parts(scored, parts), strict=True):
        first, second = (copy.numpy() for copy in variable.value.values)
        np.testing.assert_array_equal(first, second, err_msg=variable.path)
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6, err_msg=variable.path)


@pytest.mark.nightly  # test_keras_metrics.py and test_fit_data.py have short batches
def test_a_short_last_batch_is_the_mean_over_its_own_examples(two, tmp_path):
    data = (X[:39], POSITIVE[:39])
    expected, validation = of_keras(judged_by_curve, data)
    settings = {"epochs": 3, "batch_size": 16, "shuffle": False}
    found = launcher.fit(judged_by_curve, data, validation, model_dir=str(tmp_path), strategy=two, **settings)
    assert_same(found, expected)


@pytest.mark.nightly  # test_fit_data.py has one
def test_a_dataset_gives_its_own_batches_also_a_short_one(two, tmp_path):
    def dataset(rows):
        return tf.data.Dataset.from_tensor_slices((X[:rows], LABEL[:rows])).batch(16)

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = not_built_yet()
    expected = model.fit(dataset(39), validation_data=dataset(24), epochs=2, verbose=0)
    found = launcher.fit(
        not_built_yet, lambda: dataset(39), dataset(24), epochs=2, model_dir=str(tmp_path), strategy=two
    )
    assert_same(found, expected)


@pytest.mark.nightly  # test_callbacks.py has these beside all others
def test_callbacks_set_the_rate_and_end_the_run_as_in_keras(two, tmp_path):
    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=0.3, factor=0.5),
            keras.callbacks.EarlyStopping(monitor="loss", min_delta=0.2, patience=1, restore_best_weights=True),
        ]

    expected, validation = of_keras(scored, (X, LABEL), callbacks=callbacks(), epochs=8)
    assert len(expected.epoch) < 8
    settings = {"epochs": 8, "batch_size": 16, "shuffle": False, "model_dir": str(tmp_path), "strategy": two}
    found = launcher.fit(scored, (X, LABEL), validation, callbacks=callbacks(), **settings)
    assert_same(found, expected)
    again = launcher.fit(scored, (X, LABEL), validation, callbacks=callbacks(), **settings)
    assert_same(again, expected)


class OfOneLayer(keras.Model):
    """A layer in a policy of its own, and a loss that is computed in training alone."""

    def __init__(self, policy):
        super().__init__(dtype=policy)
        self.dense, self.told = layers.Dense(3, dtype=policy), []

    def call(self, inputs):
        return self.dense(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.told.append(training)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def of_one_layer(policy, weight):
    model = OfOneLayer(policy)
    model.compile(keras.optimizers.SGD(0.1 / weight), "mse", loss_weights=weight)
    return model


def test_a_model_compiled_in_float16_has_its_loss_scaled_in_any_policy_of_the_run(two, tmp_path):
    def build():  # its gradients are less than float16 has
        return of_one_layer("mixed_float16", 1e-8)

    data = (X, X[:, :3])
    expected, validation = of_keras(build, data)
    settings = {"epochs": 3, "batch_size": 16, "shuffle": False, "model_dir": str(tmp_path), "strategy": two}
    found = launcher.fit(build, data, validation, **settings)
    assert_same(found, expected, tolerance=1e-2, shown=1e-2)


def test_without_validation_a_loss_of_ones_own_is_computed_for_training_alone(tmp_path):
    found = launcher.fit(lambda: of_one_layer("float32", 1.0), (X, X[:, :3]), model_dir=str(tmp_path))
    assert set(found.model.told) == {True}


class _Dies(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch and self.model.optimizer.iterations > 4:
            raise KeyboardInterrupt


@pytest.mark.nightly  # test_callbacks.py has this and others
def test_what_callbacks_count_goes_on_after_a_restart_within_an_epoch(tmp_path):
    def train(folder, *more):
        callbacks = [keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=0.3, factor=0.5), *more]
        settings = {"epochs": 4, "batch_size": 16, "checkpoint_every": 3, "model_dir": str(tmp_path / folder)}
        return launcher.fit(scored, (X, LABEL), callbacks=callbacks, **settings)

    undisturbed = train("undisturbed")
    with pytest.raises(KeyboardInterrupt):
        train("killed", _Dies(2))
    resumed = train("killed")
    assert resumed.history == undisturbed.history
    for found, wanted in zip(resumed.model.weights, undisturbed.model.weights, strict=True):
        np.testing.assert_array_equal(found.numpy(), wanted.numpy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"build": lambda: keras.Sequential([layers.Dense(3)])}, "is not compiled"),
        ({"build": lambda: keras.utils.clear_session() or scored()}, r"clear_session\(\) where the model is made"),
        ({"callbacks": [print]}, "callbacks: <built-in function print> is not a keras.callbacks.Callback"),
        ({"verbose": 3}, r"verbose = 3: must be 0 \(show nothing\), 1, 2 or 'auto'"),
        ({"validation_freq": 0}, "validation_freq = 0: must be a number of epochs, or a list"),
        ({"initial_epoch": 2, "epochs": 2}, "initial_epoch = 2 and epochs = 2: no epoch lies between them"),
        ({"epocs": 1}, "did you mean 'epochs'"),
        ({"train": (X, LABEL[:5])}, "must be of one length"),
        ({"train": (X[:, :5], LABEL)}, r"x is float32 \[None, 5\], .*: Input 0 .* expected shape=\(None, 6\)"),
        ({"train": (X, np.stack([POSITIVE] * 2))}, "must be of one length"),
        ({"train": X}, r"without any y \(data is one tuple, \(x, y\)\)"),
        ({"build": "mlp"}, "expected a compiled model, or a function that returns one; got str"),
        ({"replicas": 64, "batch_size": 64}, "TensorFlow was used before its devices were set up for mirrored"),
        ({"train": tf.data.Dataset.from_tensor_slices((X, LABEL))}, r"call .batch\(size\)"),
        ({"train": tf.data.Dataset.from_tensor_slices((X, LABEL)).batch(8).repeat()}, "steps_per_epoch"),
        ({"validation_split": 1.5}, "validation_split = 1.5"),
        ({"batch_norm": "keras"}, "train.batch_norm = 'keras': must be one of 'auto', 'global', 'local'"),
        ({"build": not_built_yet, "batch_norm": "local"}, "sequential has no batch normalisation; leave it out"),
        ({"build": lambda: classifier(loss=keras.losses.MeanSquaredError(reduction="sum"))}, "reduction='sum'"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_name(change, message, tmp_path):
    arguments = {"build": scored, "train": (X, LABEL), "model_dir": str(tmp_path / "run")} | change
    with pytest.raises(UsageError, match=message):
        launcher.fit(**arguments)
    assert not (tmp_path / "run").exists()


def test_a_program_that_fits_in_a_scope_is_one_message(run_launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import keras, launcher, numpy, tensorflow as tf\n"
        "with tf.distribute.MirroredStrategy(['CPU:0']).scope():\n"
        "    model = keras.Sequential([keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    launcher.fit(model, numpy.ones((8, 4)), numpy.ones((8, 1)))\n"
    )
    refused = run_launcher(f"--gin_file={program}", f"--model_dir={tmp_path / 'run'}")
    assert (refused.returncode, "Traceback" in refused.stderr) == (64, False)
    assert "command line says what the model is made and trained on: call fit outside of" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_program_runs_with_the_launchers_flags(run_launcher, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import keras, launcher, numpy\n"
        "x = numpy.random.default_rng(0).normal(size=(32, 4))\n"
        "data = x, x[:, :1]\n"
        "def build():\n"
        "    model = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse')\n"
        "    return model\n"
        "for _ in range(2):\n"
        "    print('losses', launcher.fit(build, data, data, epochs=2, batch_size=8).history['loss'])\n"
    )
    command = [f"--gin_file={program}", "--replicas=2", f"--model_dir={tmp_path / 'run'}"]
    command += ["--gin_param=train.jit_compile = True"]
    refused = run_launcher(*command)
    assert (refused.returncode, "resnet" in refused.stderr) == (64, False)
    assert "works neither with" in refused.stderr and "train.batch_norm = 'local'" in refused.stderr
    done = run_launcher(*command, "--gin_param=train.batch_norm = 'local'")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("losses [") == 2
    assert "each microbatch of each replica by itself, 4 examples" in done.stdout
    for folder in ("run", "run/fit_2"):
        assert json.loads((tmp_path / folder / "summary.json").read_text())["num_replicas"] == 2
    done = run_launcher(f"--gin_file={program}", "--mode=eval", f"--model_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "evaluation at step 8 " in done.stdout and "losses" not in done.stdout


def test_a_recipe_binds_a_compiled_model_and_its_data(run_launcher, tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "import gin, keras, numpy\n"
        "@gin.configurable\n"
        "def build():\n"
        "    model = keras.Sequential([keras.layers.Dense(1)])\n"
        "    model.compile('sgd', 'mse', metrics=['mae'])\n"
        "    return model\n"
        "@gin.configurable\n"
        "def data():\n"
        "    x = numpy.random.default_rng(0).normal(size=(32, 4))\n"
        "    return x, x[:, :1]\n"
    )
    recipe = tmp_path / "mine.gin"
    recipe.write_text(
        "import mine\n"
        "train.task = @KerasTask()\nKerasTask.build = @build\nKerasTask.train = @data\n"
        "KerasTask.validation_split = 0.25\n"
        "train.global_batch_size = 8\ntrain.epochs = 2\ntrain.best_metric = 'mae'\n"
    )
    done = run_launcher(f"--gin_file={recipe}", f"--model_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr
    assert "mae" in json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]["eval"]


def test_a_label_out_of_range_is_said_in_one_message(tmp_path):
    with pytest.raises(UsageError, match=r"a label (value )?of.* 7\b"):
        launcher.fit(not_built_yet, (X, np.full(64, 7)), model_dir=str(tmp_path))


def test_a_function_makes_the_same_dataset_in_every_attempt(tmp_path):
    def shuffled():
        return tf.data.Dataset.from_tensor_slices((X, LABEL)).shuffle(64).batch(16)

    first, second = (
        launcher.fit(not_built_yet, shuffled, epochs=2, model_dir=str(tmp_path / name)) for name in ("first", "second")
    )
    assert first.history == second.history


def test_a_length_in_steps_takes_the_place_of_epochs(tmp_path):
    launcher.fit(not_built_yet, (X, LABEL), steps=3, batch_size=16, model_dir=str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["step"] == 3

"""`launcher.fit(model, …)` stands where `model.fit(…)` stood: the model itself is trained, from the state that it has.

Keras's own `fit` is the oracle, with examples in their own order.
"""

from __future__ import annotations

import contextlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from oracle import eager
from own_steps import GAN, NOISE, VAE, X

import launcher
from launcher.errors import TrainingError, UsageError

pytestmark = pytest.mark.slow

random = np.random.default_rng(0)
LABEL = random.integers(0, 3, len(X))
WEIGHT = random.uniform(0.5, 2.0, len(X)).astype(np.float32)
HELD_OUT = X[:20], LABEL[:20]


def classifier():
    """Not built yet, with an optimizer that has a state and a layer whose statistics move."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
    return model


def plain(metric="accuracy"):
    """A model whose batches may be cut anywhere, as no BatchNormalization looks at a whole one."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, metrics=[metric])
    return model


def assert_same(ours, keras_own):
    for name in keras_own.history:
        np.testing.assert_allclose(ours.history[name], keras_own.history[name], rtol=1e-5, atol=1e-5, err_msg=name)
    for found, wanted in zip(ours.model.get_weights(), keras_own.model.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_a_model_goes_on_from_call_to_call_as_with_keras(replicas, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"validation_data": HELD_OUT, "batch_size": 10, "shuffle": False, "verbose": 0}
    mine, other = classifier(), eager(classifier())
    for _ in range(2):
        history = launcher.fit(mine, X, LABEL, replicas=replicas, **arguments)
        assert history.model is mine
        assert_same(history, other.fit(X, LABEL, **arguments))
        mine.evaluate(X, LABEL, verbose=0)  # which leaves its counts in the metrics
    np.testing.assert_allclose(mine.predict(X, verbose=0), other.predict(X, verbose=0), atol=1e-5)
    # Afterwards it is a model of this process, which Keras trains, with the optimizer's state.
    assert_same(mine.fit(X, LABEL, **arguments), other.fit(X, LABEL, **arguments))


def test_data_by_keras_names_is_taken(tmp_path):
    arguments = {"x": X, "y": LABEL, "sample_weight": WEIGHT, "validation_data": list(HELD_OUT), "shuffle": False}
    mine, other = classifier(), eager(classifier())
    history = launcher.fit(mine, **arguments, verbose=0, model_dir=str(tmp_path / "model"))
    assert_same(history, other.fit(**arguments, verbose=0))
    by_position = {name: value for name, value in arguments.items() if name not in ("x", "y")}
    found = launcher.fit(classifier, X, LABEL, **by_position, model_dir=str(tmp_path / "function"), seed=3)
    assert_same(found, history)


@pytest.mark.parametrize("replicas", repeated_but([1], [1, 2]))  # of two, one optimizer's: above
def test_a_model_with_optimizers_of_its_own_goes_on(replicas, tmp_path):
    def gan():
        keras.utils.set_random_seed(5)
        model = GAN()
        model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2))
        return model

    data = tf.data.Dataset.from_tensor_slices((X, NOISE)).map(lambda x, noise: ((x, noise),)).batch(16)
    mine, other = gan(), eager(gan())
    for number in range(2):
        launcher.fit(mine, data, model_dir=str(tmp_path / str(number)), replicas=replicas)
        other.fit(data, verbose=0)
        for found, wanted in zip(mine.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_layers_made_afterwards_get_names_of_their_own(tmp_path):
    model = plain()
    launcher.fit(model, X, LABEL, model_dir=str(tmp_path))
    assert keras.layers.Dense(1).name not in [layer.name for layer in model.layers]


def test_a_message_names_the_line_of_the_call(tmp_path):
    with pytest.raises(UsageError, match=r"test_fit_model.py line \d+: the model is not compiled"):
        launcher.fit(keras.Sequential([keras.layers.Dense(1)]), X, LABEL, model_dir=str(tmp_path))


@pytest.mark.parametrize("is_within", repeated_but([True], [False, True]))
def test_a_model_made_under_a_strategy_is_trained_on_it(is_within, tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    other = eager(plain())
    with strategy.scope():
        mine = plain()
    with strategy.scope() if is_within else contextlib.nullcontext():
        history = launcher.fit(mine, X, LABEL, **arguments, model_dir=str(tmp_path))
        mine.predict(X, verbose=0)
    assert "that was given" in json.loads((tmp_path / "run.json").read_text())["plan"]["strategy"]
    assert_same(history, other.fit(X, LABEL, **arguments))


def test_a_model_made_under_a_strategy_is_trained_on_another_with_the_metrics_it_was_given(tmp_path):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice()).scope():
        mine = plain(keras.metrics.SparseCategoricalAccuracy())
    arguments = {"batch_size": 8, "shuffle": False, "verbose": 0}
    history = launcher.fit(mine, X, LABEL, **arguments, strategy="one_device", model_dir=str(tmp_path))
    assert_same(history, eager(plain(keras.metrics.SparseCategoricalAccuracy())).fit(X, LABEL, **arguments))


def test_a_scope_that_is_not_fits_own_is_one_message(tmp_path):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        for model, asked in ((classifier, "auto"), (classifier(), "one_device")):
            with pytest.raises(UsageError, match=r"call fit outside of `with strategy.scope\(\):`"):
                launcher.fit(model, X, LABEL, strategy=asked, model_dir=str(tmp_path))
    assert not any(tmp_path.iterdir())


def test_where_a_second_model_or_process_is_needed_a_function_is_asked_for(tmp_path):
    with pytest.raises(UsageError, match="give a function that builds the model"):
        launcher.fit(classifier(), X, LABEL, workers=2, model_dir=str(tmp_path))
    with pytest.raises(UsageError, match="a function that builds the model"):
        launcher.fit(classifier(), X, LABEL, model_dir=str(tmp_path), precision_watch={"every": 1})


def comparing():
    """Of the examples of a batch with one another, by a model without statistics or losses of its own."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(3)(inputs)
    hidden = keras.layers.Lambda(lambda x: x - keras.ops.mean(x, axis=0, keepdims=True))(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


@pytest.mark.parametrize("build", repeated_but([comparing], [classifier, comparing]))
def test_a_short_batch_is_of_its_examples_alone_on_one_replica(build, tmp_path):
    arguments = {"shuffle": False, "verbose": 0, "validation_data": HELD_OUT}  # 61 and 20 examples, 32 a batch
    history = launcher.fit(build(), X, LABEL, **arguments, model_dir=str(tmp_path))
    assert_same(history, eager(build()).fit(X, LABEL, **arguments))


def sure():
    """Of probabilities so near 0 that only their logits tell the loss."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(3, "softmax", kernel_initializer="ones")])
    model.layers[0].kernel.assign(40 * model.layers[0].kernel * [[-1, 0, 1]])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


class Endpoint(keras.layers.Layer):
    """Has a loss of Keras's in its call."""

    def __init__(self):
        super().__init__()
        self.dense, self.loss = keras.layers.Dense(3), keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, inputs):
        x, label = inputs
        logits = self.dense(x)
        self.add_loss(self.loss(label, logits))
        return logits


def by_a_layer():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((16,)), keras.Input((), dtype="int32")
    model = keras.Model(inputs, Endpoint()(inputs))
    model.compile("sgd")
    return model


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
@pytest.mark.parametrize(("build", "data"), [(sure, (X, LABEL)), (by_a_layer, ([X, LABEL],))], ids=["logits", "layer"])
def test_a_loss_is_that_of_keras(build, data, replicas, tmp_path):
    arguments = {"shuffle": False, "verbose": 0, "batch_size": 16}
    history = launcher.fit(build(), *data, **arguments, replicas=replicas, model_dir=str(tmp_path))
    keras_own = eager(build()).fit(*data, **arguments)
    assert build is not sure or keras_own.history["loss"][0] > 17
    assert_same(history, keras_own)


def test_a_model_that_takes_neither_zeros_nor_one_example_is_tried_with_the_data(tmp_path):
    def build():
        keras.utils.set_random_seed(3)
        known = keras.layers.IntegerLookup(vocabulary=[5, 6, 7], num_oov_indices=0)
        embedded = [known, keras.layers.Embedding(3, 4), keras.layers.Flatten()]
        of_eight = keras.layers.Lambda(lambda x: keras.ops.reshape(x, (8, 4)))
        model = keras.Sequential([*embedded, of_eight, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    data = (5 + LABEL[:48, None], LABEL[:48].astype(np.float32))
    arguments = {"shuffle": False, "verbose": 0, "batch_size": 8}
    history = launcher.fit(build(), *data, **arguments, model_dir=str(tmp_path))
    assert_same(history, eager(build()).fit(*data, **arguments))


class Counted(keras.Model):
    """Has a step that takes the number of examples for known, and that of words as it comes."""

    def __init__(self, is_known):
        super().__init__()
        self.embedding, self.is_known = keras.layers.Embedding(4, 3), is_known

    def call(self, words):
        return keras.ops.mean(self.embedding(words), axis=(1, 2))

    def train_step(self, data):
        words, y = data
        examples = keras.ops.cast(words.shape[0] if self.is_known else tf.shape(words)[0], "float32")
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(words) - y) ** 2) / examples
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"squares": loss}


def test_a_step_of_fewer_examples_than_a_batch_is_not_taken_for_one_of_means(tmp_path):
    def build():
        keras.utils.set_random_seed(3)
        model = Counted(False)
        model.compile("sgd")
        return model

    data = (np.tile(LABEL[:8, None], (1, 5)), LABEL[:8].astype(np.float32))  # of a batch of 32
    history = launcher.fit(build(), *data, shuffle=False, model_dir=str(tmp_path))
    assert_same(history, eager(build()).fit(*data, shuffle=False, verbose=0))


@pytest.mark.parametrize("is_known", repeated_but([False], [True, False]))
def test_a_step_sees_the_shapes_that_it_sees_in_keras(is_known, tmp_path):
    def build():
        keras.utils.set_random_seed(3)
        model = Counted(is_known)
        model.compile("sgd")
        return model

    def rows():
        for label in LABEL[:32]:
            yield np.full(5, label), np.float32(label)

    spec = (tf.TensorSpec([5 if is_known else None], tf.int64), tf.TensorSpec([]))
    data = tf.data.Dataset.from_generator(rows, output_signature=spec)
    data = data.batch(32, drop_remainder=is_known)
    history = launcher.fit(build(), data, steps_per_epoch=1, model_dir=str(tmp_path), replicas=2 if is_known else 1)
    assert_same(history, build().fit(data, steps_per_epoch=1, verbose=0))


def test_a_model_that_is_built_by_fit_begins_with_the_weights_of_keras(tmp_path):
    class Attentive(keras.Model):
        """Its attention makes layers where it is built."""

        def __init__(self):
            super().__init__()
            self.attention, self.dense = keras.layers.MultiHeadAttention(2, 3), keras.layers.Dense(1)

        def call(self, x):
            return self.dense(self.attention(x, x)[:, 0])

    def build():
        keras.utils.set_random_seed(3)
        model = Attentive()
        model.compile("sgd", "mse")
        return model

    data, arguments = (X[:48].reshape(48, 4, 4), X[:48, 0]), {"shuffle": False, "verbose": 0}
    history = launcher.fit(build(), *data, **arguments, model_dir=str(tmp_path))
    assert_same(history, eager(build()).fit(*data, **arguments))


def test_a_model_with_steps_of_its_own_is_evaluated_afterwards(tmp_path):
    def plain(metric="accuracy"):
        keras.utils.set_random_seed(5)
        model = VAE()
        model.compile(keras.optimizers.SGD(1e-2), metrics=["mae"])
        return model

    data = tf.data.Dataset.from_tensor_slices((X, NOISE)).map(lambda x, noise: ((x, noise),)).batch(16)
    mine, other = plain(), eager(plain())
    launcher.fit(mine, data, model_dir=str(tmp_path))
    other.fit(data, verbose=0)
    # Keras cannot tell the shapes of a model without a call, and does not ask where there is no strategy.
    np.testing.assert_allclose(mine.evaluate(data, verbose=0), other.evaluate(data, verbose=0), rtol=1e-5)


def test_a_keras_that_lacks_what_a_model_is_put_on_devices_by_is_named(monkeypatch, tmp_path):
    model = classifier()
    with monkeypatch.context() as changed:
        for kind in keras.optimizers.Optimizer.__mro__:
            if "_var_key" in vars(kind):
                changed.delattr(kind, "_var_key")
        with pytest.raises(TrainingError, match=r"Keras 3\.\d+\.\d+ has no _var_key, .* install keras 3\.8"):
            launcher.fit(model, X, LABEL, model_dir=str(tmp_path))

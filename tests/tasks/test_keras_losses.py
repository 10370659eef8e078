"""A loss that divides by anything but the rows is that of Keras on one device, on any topology, or refused by name.

Keras on one device is the oracle. The last batch is short, in training and in validation.
"""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from keras import layers, losses, ops
from oracle import eager

import launcher
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

_random = np.random.default_rng(0)
X = _random.normal(size=(10, 6)).astype(np.float32)
Y = (X @ _random.normal(size=(6, 1))).astype(np.float32)
WORDS = np.where(np.arange(5) < _random.integers(1, 6, (10, 1)), _random.integers(1, 9, (10, 5)), 0)
NEXT = np.where(_random.uniform(size=WORDS.shape) < 0.3, 255, np.roll(WORDS, -1, axis=1))
WORDS_OF_400 = np.tile(np.arange(400) % 8 + 1, (8, 1))
HELD_OUT = slice(0, 5)


class AddsLoss(layers.Layer):
    """Adds a mean over the rows, or another function of their values; maybe in training alone."""

    def __init__(self, of_rows=ops.mean, always=True):
        super().__init__()
        self.supports_masking, self.of_rows, self.always = True, of_rows, always

    def call(self, x, training=False):
        if training or self.always:
            self.add_loss(0.1 * self.of_rows(ops.sum(ops.square(x), (-1, -2))))
        return x


def crossentropy(**arguments):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def masked_mean(y, found):
    mask = ops.cast(y != 0, "float32")
    return ops.sum(ops.sparse_categorical_crossentropy(ops.where(mask > 0, y, 1), found, from_logits=True) * mask) / (
        ops.sum(mask)
    )


def contrast(y, found):
    found = ops.normalize(found, axis=-1)
    return ops.sparse_categorical_crossentropy(
        ops.arange(ops.shape(found)[0]), ops.matmul(found, ops.transpose(found)), from_logits=True
    )


def a_row(y, found):
    return ops.mean(ops.abs(y - found) ** 1.5, axis=-1)


class Compares(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) / ops.std(y_pred) + sum(self.losses)


def of_words(loss, *, mask=True, adds=()):
    model = keras.Sequential([layers.Embedding(9, 4, mask_zero=mask), *(one() for one in adds), layers.Dense(9)])
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy"])
    return model


def of_everything():
    """Masked tokens of which some are ignored, beside an output without a mask and what layers add."""
    inputs = keras.Input((5,), dtype="int32")
    found = AddsLoss()(layers.Embedding(9, 4, mask_zero=True)(inputs))
    row = layers.Dense(1, name="row", activity_regularizer=keras.regularizers.L2(0.1))(
        layers.GlobalAveragePooling1D()(found)
    )
    model = keras.Model(inputs, {"word": layers.Dense(9, name="word")(found), "row": row})
    model.compile(
        keras.optimizers.SGD(0.5),
        {"word": crossentropy(ignore_class=255), "row": "mse"},
        loss_weights={"word": 1.0, "row": 0.3},
    )
    return model


def regression(loss, *, units=1, kind=keras.Model, activation=None):
    inputs = keras.Input((6,))
    hidden = layers.Dense(4, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(inputs)
    model = kind(inputs, layers.Dense(units, activation=activation)(hidden))
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


WHOLE = (X, (Y > 0).astype(np.float32))
CASES = {
    "everything": (of_everything, (WORDS, {"word": NEXT, "row": Y})),
    "a mask and ignored words": (lambda: of_words(crossentropy(ignore_class=255)), (WORDS, NEXT)),
    "ignored words": (lambda: of_words(crossentropy(ignore_class=255), mask=False), (WORDS, NEXT)),
    "a masked mean": (lambda: of_words(masked_mean, mask=False), (WORDS, np.roll(WORDS, -1, axis=1))),
    "Dice": (lambda: regression(losses.Dice(), activation="sigmoid"), WHOLE),
    "Circle": (lambda: regression(losses.Circle(gamma=1.0), units=3, activation="tanh"), WHOLE),
    "contrast": (lambda: regression(contrast, units=3), WHOLE),
    "a sum over a constant": (lambda: regression(lambda y, found: ops.sum(ops.square(y - found)) / 7), (X, Y)),
    "added in training": (
        lambda: of_words(crossentropy(), adds=[lambda: AddsLoss(always=False)], mask=False),
        (WORDS, NEXT % 9),
    ),
    "nothing": (lambda: regression(lambda y, found: 0 * ops.mean(found)), (X, Y)),  # beside penalties and add_loss
    "rows": (lambda: regression(a_row), (X, Y, np.linspace(0.5, 2, 10, dtype=np.float32))),
    "compute_loss": (lambda: regression("mse", kind=Compares), (X, Y)),
}


def part(data, rows=HELD_OUT):
    return keras.tree.map_structure(lambda array: array[rows], data)


def strategy_of(replicas):
    if replicas == 1:
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())


def of_launcher(name, folder, replicas=2, **arguments):
    build, data = CASES[name] if isinstance(name, str) else name
    settings = {"epochs": 2, "batch_size": 4, "shuffle": False, "strategy": strategy_of(replicas)}
    return launcher.fit(build, data, part(data), model_dir=str(folder), **settings | arguments)


XLA, PARTS = {"jit_compile": True}, {"microbatches": 2}
TOPOLOGIES = [(2, {}), (1, XLA)]
GATE = [
    ("everything", 2, {}),
    ("Circle", 2, {}),  # takes the whole batch, as does a masked mean
    ("a mask and ignored words", 2, XLA | PARTS),
    ("added in training", 1, XLA),
]
MORE = [("nothing", 1, PARTS), ("ignored words", 1, PARTS), ("rows", 2, XLA)]
MORE += [(name, *where) for name in CASES for where in TOPOLOGIES]
ALL = [*GATE, *(case for case in MORE if case not in GATE)]


@pytest.mark.parametrize(("name", "replicas", "arguments"), repeated_but(GATE, ALL))
def test_it_is_the_loss_of_keras_on_one_device(name, replicas, arguments, tmp_path):
    build, (x, y, *weight) = CASES[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = eager(build())
    settings = {"epochs": 2, "batch_size": 4, "shuffle": False, "verbose": 0}
    validation = part(CASES[name][1])
    expected = model.fit(x, y, sample_weight=weight[0] if weight else None, validation_data=validation, **settings)
    found = of_launcher(name, tmp_path, replicas, **arguments)
    for key in {"loss", "val_loss", "accuracy"} & expected.history.keys():
        np.testing.assert_allclose(found.history[key], expected.history[key], rtol=1e-5, err_msg=key)
    for mine, theirs in zip(found.model.weights, model.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-6, err_msg=mine.path)


class Squares(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.sqrt(ops.mean(ops.square(y - y_pred))) * ops.mean(ops.square(self.layers[1].kernel))


@pytest.mark.parametrize(
    ("case", "replicas", "arguments", "message"),
    [
        ("a masked mean", 1, PARTS, "the loss masked_mean does not add up over the rows of a batch"),
        ("contrast", 2, XLA, "the loss contrast does not add up"),
        ("Circle", 2, XLA, "the loss circle does not add up"),
        ("everything", 1, PARTS, "a part of the loss is divided by what a mask"),
        ((lambda: regression("mse", kind=Squares), (X, Y)), 2, {}, "Squares.compute_loss does not add up"),
        (
            (lambda: of_words(crossentropy(), adds=[lambda: AddsLoss(ops.sum)]), (WORDS, WORDS)),
            2,
            {},
            "a layer adds a loss that is no mean over the rows",
        ),
        (
            (lambda: of_words(crossentropy(), mask=False, adds=[lambda: AddsLoss(ops.sum, False)]), (WORDS, WORDS)),
            1,
            PARTS,
            "a layer adds a loss that is no mean over the rows",
        ),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(case, replicas, arguments, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        of_launcher(case, tmp_path / "run", replicas, **arguments)
    assert not (tmp_path / "run").exists()


def test_a_mask_over_many_tokens_skips_no_step_in_float16(tmp_path):
    data = WORDS_OF_400, WORDS_OF_400
    found = of_launcher((lambda: of_words(crossentropy()), data), tmp_path, 1, precision="mixed_float16")
    assert json.loads((tmp_path / "summary.json").read_text())["loss_scale"] == 2**15
    assert np.isfinite(found.history["loss"]).all()


@pytest.mark.parametrize(("replicas", "arguments"), repeated_but([(2, PARTS)], [(1, {}), (2, {}), (2, PARTS)]))
def test_rows_of_an_embedding_that_occur_twice_are_added_up_and_the_plan_says_so(replicas, arguments, tmp_path, capsys):
    words, y = np.array([[1, 1, 2], [1, 3, 3], [1, 2, 2], [3, 1, 1]]), np.arange(4, dtype=np.float32)[:, np.newaxis]

    def build(embedded):
        model = keras.Sequential([embedded, layers.Flatten(), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.1), "mse")
        return model

    class Dense(layers.Embedding):
        def call(self, x):
            return ops.matmul(ops.one_hot(x, self.input_dim), self.embeddings)

    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    expected = eager(build(Dense(4, 2)))
    expected.fit(words, y, epochs=3, batch_size=4, verbose=0)
    found = of_launcher((lambda: build(layers.Embedding(4, 2)), (words, y)), tmp_path, replicas, epochs=3, **arguments)
    for mine, theirs in zip(found.model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-5)
    assert "rows of an embedding that occur twice in a batch are added up before adam" in capsys.readouterr().out

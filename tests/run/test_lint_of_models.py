"""launcher.lint: a model made of all traps of docs/traps.md that a model shows, and one made of their remedies."""

from __future__ import annotations

import inspect
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import launcher
from launcher.errors import UsageError
from launcher.machine import versions
from launcher.run import layer_lint

pytestmark = pytest.mark.slow
layers = keras.layers
HALF = "mixed_float16"
MENDED = {
    "masked statistics of one replica": "norm",
    "dropout in 16 bits": "drop",
    "no loss scale": "crop",
    "schedule of parts": "muon",
}
if versions.keeps_metrics_variables():
    MENDED["metric that is a variable"] = "alias"
MET = {
    "crop in training alone": "crop",
    "sentinel in 16 bits": "mask",
    "ids in 16 bits": "tokens/table",
    "weights in 16 bits": "narrow",
    "pooling in float16": "pool",
    "head in 16 bits": "shares",
    "outputs in 16 bits": "value",
    "attention under Muon": "attend/query/bias, attend/key/bias, attend/value/bias",
}


class Tokens(layers.Layer):
    """Casts ids before its table sees them, as each layer does that holds another."""

    def __init__(self, **named):
        super().__init__(**named)
        self.table = layers.Embedding(5000, 4, name="table")

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        return self.table(ids)


class Alias(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="alias")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(1.0)

    def result(self):
        return self.total


class Copied(Alias):
    def result(self):
        return keras.ops.copy(self.total)


def optimizer(name):
    """One with a schedule, which a Muon reads at each part of an update."""
    decays = keras.optimizers.schedules.CosineDecay(0.1, 1000)
    if not hasattr(keras.optimizers, "Muon"):
        pytest.skip("this Keras has no Muon")
    return {
        "muon": lambda: keras.optimizers.Muon(decays, gradient_accumulation_steps=4),
        "nadam": lambda: keras.optimizers.Nadam(),
    }[name]()


def trapped(by):
    """Everything that a model shows, once."""
    images, series = keras.Input((12, 12, 3), name="images"), keras.Input((6, 4), name="series")
    ids = keras.Input((6,), name="ids")
    seen = layers.GlobalAveragePooling2D(dtype="float32")(layers.RandomCrop(4, 4, name="crop", dtype=HALF)(images))
    masked = layers.Masking(-9999.0, name="mask", dtype=HALF)(series)
    normed = layers.BatchNormalization(synchronized=True, name="norm", dtype="float32")(masked)
    attended = layers.MultiHeadAttention(2, 4, name="attend", dtype="float32")(normed, normed)
    pooled = layers.GlobalAveragePooling1D(name="pool", dtype=HALF)(attended)
    with_mixed = layers.Flatten(dtype="float32")(Tokens(name="tokens", dtype=HALF)(ids))
    narrow = layers.Dense(3, use_bias=False, name="narrow", dtype="float16")(with_mixed)
    joined = layers.Concatenate(dtype="float32")([seen, pooled, narrow])
    joined = layers.Dropout(0.01, name="drop", dtype=HALF)(joined)
    shares = layers.Dense(3, "softmax", name="shares", dtype=HALF)(joined)
    model = keras.Model([images, series, ids], [shares, layers.Dense(1, name="value", dtype=HALF)(joined)])
    losses = {"shares": "categorical_crossentropy", "value": "mse"}
    model.compile(optimizer(by), losses, metrics={"value": [Alias()]})
    return model


def mended(by):
    """The same with the remedies that the findings name."""
    images, series = keras.Input((12, 12, 3), name="images"), keras.Input((6, 4), name="series")
    ids = keras.Input((6,), dtype="int32", name="ids")
    seen = layers.CenterCrop(4, 4)(layers.RandomCrop(12, 12, dtype=HALF)(images))
    masked = layers.Masking(-1.0, dtype=HALF)(series)
    normed = layers.BatchNormalization(synchronized=True)(layers.Dense(4)(series))
    attended = layers.MultiHeadAttention(2, 4, use_bias=False)(normed, masked)
    pooled = layers.GlobalAveragePooling1D(dtype=HALF)(layers.Conv1D(4, 1)(attended))
    narrow = layers.Dense(3, dtype=HALF)(layers.Flatten()(Tokens(dtype=HALF)(ids)))
    joined = layers.Concatenate()([layers.GlobalAveragePooling2D()(seen), pooled, narrow])
    joined = layers.Dropout(0.5, dtype=HALF)(joined)
    model = keras.Model([images, series, ids], [layers.Dense(3, "softmax")(joined), layers.Dense(1)(joined)])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(scaled, ["categorical_crossentropy", "mse"], metrics=[[], [Copied()]])
    return model


def batch():
    random = np.random.default_rng(0)
    series = random.normal(size=(4, 6, 4)).astype(np.float32)
    series[0, 2:], series[3, 5:] = -9999.0, -9999.0
    ids = np.float32([[5, 2048, 2049, 2050, 4097, 4998]] * 4)
    return [random.normal(size=(4, 12, 12, 3)).astype(np.float32), series, ids]


@pytest.fixture(scope="module")
def model():
    return trapped("muon")


def rules(found):
    assert len({one.rule for one in found}) == len(found), [*map(str, found)]
    return {one.rule: one.path for one in found}


@pytest.mark.skipif(versions.of(keras.__version__) < (3, 14), reason="with it a mask ends where a dtype changes")
def test_each_trap_is_named_once_with_its_layer_and_there_is_no_other_line(model):
    assert rules(launcher.lint(model)) == MET | MENDED | {"no loss scale": "mask, tokens, crop and 5 more"}
    task = types.SimpleNamespace(example=None)
    assert rules([*layer_lint.of_run(model, task)]) == MET
    assert rules(launcher.lint(trapped("nadam"))).keys() == {*MET, *MENDED, "momentum of Nadam"} - {
        "attention under Muon",
        "schedule of parts",
    }


def test_the_remedies_leave_nothing_to_say():
    assert [*map(str, launcher.lint(mended("adam"), batch()))] == []


def test_numbers_are_those_of_the_batch_by_numpy(model):
    texts = {one.rule: one.text for one in launcher.lint(model, batch())}
    ids = batch()[2]
    assert f"{np.sum(ids.astype(np.float16) != ids)} of the {ids.size} in a batch" in texts["ids in 16 bits"]
    assert "0 of the 5 steps in a batch that are -9999" in texts["sentinel in 16 bits"]
    dropped = np.mean(layers.Dropout(0.01, seed=1, dtype=HALF)(np.ones(2**20, np.float32), training=True) == 0)
    said = float(re.search(r"drops ([0-9.]+)", texts["dropout in 16 bits"])[1])
    assert abs(said - dropped) < 3e-4 < said - 0.01  # three times what chance does


def test_a_model_that_is_not_built_is_refused_and_one_that_cannot_be_traced_says_less():
    with pytest.raises(UsageError, match="is not built"):
        launcher.lint(keras.Sequential([layers.Dense(1)]))

    class Own(keras.Model):
        def __init__(self):
            super().__init__(dtype=HALF)
            self.tokens = Tokens()

        def call(self, ids):
            return tf.constant(float(keras.ops.sum(self.tokens(ids))))  # at once alone

    made = Own()
    made(np.ones((2, 3), np.float32))
    assert launcher.lint(made, np.ones((2, 3), np.float32)) == []


def test_the_public_name_is_the_one_of_the_page():
    assert launcher.lint is layer_lint.lint and "x" in inspect.signature(launcher.lint).parameters

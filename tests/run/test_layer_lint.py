"""Every rule of layers in 16 bits: where it speaks, where it is silent, its number by NumPy, and what a user sees."""

from __future__ import annotations

import functools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import launcher
from launcher.run import layer_lint

pytestmark = pytest.mark.slow
layers = keras.layers


def sequential(*body, size=(5, 1)):
    return keras.Sequential([keras.Input(size), *body])


class LookedUp(keras.Model):
    """Casts what comes to its dtype before a layer sees it."""

    def __init__(self, head: keras.layers.Layer):
        super().__init__(name="own")
        self.table, self.head = layers.Embedding(5000, 4, name="table"), head

    def call(self, ids):
        return self.head(self.table(ids))


class Named(layers.Layer):
    """Knows its activation by name."""

    def __init__(self, activation: str):
        super().__init__(name="last")
        self.activation = activation

    def call(self, inputs):
        return keras.activations.get(self.activation)(inputs)


def found(make, *, policy="mixed_float16", inputs="float32") -> dict[str, str]:
    """Path and text by rule."""
    keras.config.set_dtype_policy(policy)
    try:
        task = types.SimpleNamespace(example=(tf.zeros([1, 5, 1], inputs), None, None, None))
        return {one.rule: f"{one.path}: {one.text}" for one in layer_lint.of_run(make(), task)}
    finally:
        keras.config.set_dtype_policy("float32")


def dense(activation=None, dtype=None):
    return layers.Dense(1, activation, dtype=dtype, name="last")


def by(loss):
    """A softmax compiled with a loss, which may be no cross entropy that looks for its logits."""
    model = sequential(dense("softmax"))
    model.compile(loss=loss)
    return model


POOLED = [layers.GlobalAveragePooling1D, lambda: dense(dtype="float32")]


@pytest.mark.parametrize(
    ("rule", "path", "number", "speaks", "silent"),
    [
        ("head", "last", "8.3", lambda: sequential(dense("sigmoid")), lambda: sequential(dense("sigmoid", "float32"))),
        (
            "head",
            "last",
            "8.3",
            lambda: sequential(dense(layers.Activation("sigmoid"))),  # an activation may be any object
            lambda: sequential(dense(functools.partial(keras.activations.elu, alpha=2.0))),
        ),
        ("head", "last", "8.3", lambda: sequential(Named("sigmoid")), lambda: sequential(Named("relu"))),
        ("head", "last", "16", lambda: LookedUp(dense("softmax")), lambda: LookedUp(dense("softmax", "float32"))),
        (
            "head",
            "soft",
            "16",
            lambda: sequential(dense(), layers.Softmax(name="soft")),
            lambda: sequential(dense("sigmoid"), layers.Dense(1, dtype="float32")),
        ),
        ("head", "last", "16", lambda: by("CategoricalCrossentropy"), lambda: by("mse")),
        ("outputs", "last", "2048", lambda: by(lambda y, p: 0.0), lambda: by("sparse_categorical_crossentropy")),
        ("outputs", "last", "2048", lambda: sequential(dense()), lambda: sequential(dense("sigmoid"))),
        ("outputs", "last", "2048", lambda: sequential(dense("relu")), lambda: sequential(dense(dtype="float32"))),
        (
            "sentinel",
            "mask",
            "-9999",
            lambda: sequential(layers.Masking(-9999.0, name="mask")),
            lambda: sequential(layers.Masking(-9999.0, dtype="float32"), layers.Masking(-1.0), layers.Masking(-999.0)),
        ),
        (
            "pooling",
            "pool",
            "65504",
            lambda: sequential(layers.Masking(), layers.GlobalAveragePooling1D(name="pool")),
            lambda: sequential(layers.GlobalAveragePooling1D()),
        ),
        (
            "ids",
            "table",
            "2048",
            lambda: LookedUp(dense()),
            lambda: sequential(layers.Embedding(9, 2), size=(5,)),
        ),
    ],
)
def test_a_rule_names_the_layer_and_the_number_and_is_silent_elsewhere(rule, path, number, speaks, silent):
    (text,) = [text for name, text in found(speaks).items() if name.startswith(rule)]
    assert path in text.partition(":")[0] and number in text
    assert not [name for name in found(silent) if name.startswith(rule)]
    assert not found(speaks, policy="float32")


def test_the_numbers_are_those_of_the_dtype():
    texts = found(lambda: LookedUp(dense()), policy="mixed_bfloat16")
    assert "above 256" in texts["ids in 16 bits"]
    many = found(lambda: sequential(layers.Dense(65520, "softmax"), size=(1,)))
    assert "of 65520 equal logits each share is 0" in many["head in 16 bits"]
    assert float(np.float16(1 / 65520)) > 0 == float(np.float16(1) / np.float16(65520))  # the sum of ones is infinite
    assert not found(lambda: LookedUp(dense(dtype="float32")), policy="mixed_bfloat16", inputs="int32")
    assert {"sentinel in 16 bits"} == set(
        found(lambda: sequential(layers.Masking(-999.0), dense("relu", "float32")), policy="mixed_bfloat16")
    )
    for dtype, logit in (("bfloat16", 6.24), ("float16", 8.32)):
        rounded = [float(tf.cast(1 / (1 + np.exp(-one)), dtype)) for one in (logit - 0.05, logit + 0.05)]
        assert rounded[0] < 1 == rounded[1]


def test_who_trains_sees_the_notes_and_once_that_no_gradient_is_left(tmp_path, capfd):
    def build():
        keras.config.set_dtype_policy("mixed_bfloat16")
        last = [layers.Dense(1, use_bias=False, kernel_initializer="ones"), layers.Activation("sigmoid", name="end")]
        model = sequential(*last, size=(1,))
        model.compile(keras.optimizers.SGD(1.0), "binary_crossentropy")
        return model

    x, y = np.full((16, 1), 18, np.float32), np.zeros((16, 1), np.float32)
    launcher.fit(build, (x, y), batch_size=4, epochs=2, precision="mixed_bfloat16", model_dir=str(tmp_path))
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "sequential/end: sigmoid is computed in bfloat16" in line]
    assert [line.partition(",")[0] for line in lines if "exactly 0" in line] == ["step 1: all gradients are exactly 0"]


def test_an_epoch_counts_the_examples_of_skipped_steps_as_keras_does(tmp_path):
    def build():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=2.0**15)
        model = sequential(layers.Dense(2, dtype="mixed_float16"), dense(dtype="float32"), size=(3,))
        model.compile(optimizer, "mse", metrics=["mae"])
        return model

    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 3)).astype(np.float32), random.normal(size=(32, 1)).astype(np.float32)
    y[:8] += 3000  # so that the first step overflows
    keras.utils.set_random_seed(1)
    model = build()
    arguments = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0}
    ours = launcher.fit(model, x, y, replicas=2, model_dir=str(tmp_path), **arguments)
    other = model.fit(x, y, **arguments)
    for name, wanted in other.history.items():
        np.testing.assert_allclose(ours.history[name], wanted, rtol=1e-3)
    assert other.history["mae"][0] > 700

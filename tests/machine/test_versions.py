"""What differs between versions of TensorFlow and Keras, and which of them are taken."""

from __future__ import annotations

import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from places import ROOT, SMALL_DIGITS
from served import run_here

from launcher.errors import UsageError
from launcher.machine import versions
from launcher.serving import model_file


@pytest.mark.parametrize(
    ("version", "number"),
    [("2.16.1", (2, 16)), ("2.17.0+nv25.2", (2, 17)), ("3.8.0.dev2025", (3, 8)), ("3.15", (3, 15))],
)
def test_versions_of_vendors_are_read(version, number):
    assert versions.of(version) == number


@pytest.mark.parametrize(
    ("module", "version", "message"),
    [
        (tf, "2.15.1", r"TensorFlow 2\.15\.1 is installed, and Launcher needs 2\.16 or later: .*cpu"),
        (keras, "3.3.2", r"Keras 3\.3\.2 is installed, and Launcher needs 3\.8 or later: .*install 'keras>=3\.8'"),
        (keras, "2.15.0", r"Keras 2\.15\.0 is installed"),
    ],
)
def test_what_is_too_old_is_said_with_what_to_install(module, version, message, monkeypatch):
    versions.check()
    monkeypatch.setattr(module, "__version__", version)
    with pytest.raises(UsageError, match=message):
        versions.check()


def test_pip_is_told_the_same():
    setup = (ROOT / "setup.py").read_text()
    for name, oldest in (("tensorflow-cpu", versions.TENSORFLOW), ("keras", versions.KERAS)):
        assert f'"{name}>={oldest[0]}.{oldest[1]}' in setup


def test_keras_sums_activity_penalties_where_it_is_said_to():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(1.0))]
    )
    x = np.ones((4, 2), np.float32)
    outputs = np.asarray(model(x))
    expected = (outputs**2).sum() / (1 if versions.sums_activity_penalties() else 4)
    np.testing.assert_allclose(sum(map(float, model.losses)), expected, rtol=1e-6)


MANY_LAYERS = [
    keras.layers.Conv1D(4, 3, padding="same"),
    keras.layers.BatchNormalization(),
    keras.layers.Conv1DTranspose(4, 3, padding="same", kernel_initializer=keras.initializers.HeNormal()),
    keras.layers.LayerNormalization(),
    keras.layers.LSTM(4, return_sequences=True),
    keras.layers.GlobalAveragePooling1D(),
    keras.layers.Dropout(0.5),
    keras.layers.Dense(2, activation="gelu", kernel_regularizer="l2"),
]


def test_a_configuration_without_later_arguments_is_that_of_the_same_model():
    words = keras.Input((6,), dtype="int32")
    inside = keras.layers.Embedding(8, 4)(words)
    inside = keras.layers.MultiHeadAttention(2, 2)(inside, inside)
    for layer in MANY_LAYERS:
        inside = layer(inside)
    model = keras.Model(words, inside)
    whole = json.loads(model.to_json())
    short = versions.without_later_arguments(whole)
    assert json.loads(keras.models.model_from_json(json.dumps(short)).to_json()) == whole
    if versions.of(keras.__version__) > (3, 12):
        assert len(json.dumps(short)) < len(json.dumps(whole))


def test_a_saved_model_says_nothing_that_keras_3_8_does_not_know(tmp_path):
    flags = ["--gin_param=train.steps = 1", f"--model_dir={tmp_path}"]
    assert run_here(f"--gin_file={SMALL_DIGITS}", *flags).returncode == 0
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert len(file.namelist()) == len(set(file.namelist())) and file.testzip() is None
        assert not {"quantization_config", "renorm", "input_axes"} & set(
            json.dumps(json.loads(file.read("config.json"))).split('"')
        )


def test_a_keras_that_may_run_what_a_file_holds_opens_none_unless_it_is_trusted(tmp_path, monkeypatch):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    chosen = model_file.Weights(step=1, arrays={}, averaged=False)
    model_file.save_keras(model, str(tmp_path / "model.keras"), "last", chosen)
    monkeypatch.setattr(keras, "__version__", "3.11.3")
    with pytest.raises(UsageError, match=r"model\.keras is not opened, as Keras 3\.11\.3 may run Python"):
        model_file.load(str(tmp_path), "last")
    monkeypatch.setattr(keras, "__version__", "3.12.0")
    np.testing.assert_array_equal(model_file.load(str(tmp_path), "last").get_weights()[0], model.get_weights()[0])

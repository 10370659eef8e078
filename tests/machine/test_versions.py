"""What differs between versions of TensorFlow and Keras, and which of them are taken."""

from __future__ import annotations

import inspect
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
        (tf, "2.15.1", r"TensorFlow 2\.15\.1 is before 2\.16: .*cpu"),
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


REQUIRED = {
    "filters": 2,
    "units": 2,
    "kernel_size": 3,
    "rate": 0.1,
    "num_heads": 2,
    "key_dim": 2,
    "input_dim": 4,
    "output_dim": 4,
    "stddev": 0.1,
    "head_dim": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 2,
    "factor": 0.1,
    "target_shape": (4,),
    "dims": (1,),
    "layer": keras.layers.Dense(2),
    "cell": keras.layers.LSTMCell(2),
    "layers": [],
}


def made(kind):
    """A layer with arguments of its own where it asks for some; None of a kind that asks for others."""
    needed = [one for one in inspect.signature(kind.__init__).parameters.values() if one.default is one.empty]
    try:
        return kind(
            **{one.name: REQUIRED.get(one.name, 1) for one in needed if one.name not in ("self", "args", "kwargs")}
        )
    except Exception:
        return None


def test_every_layer_is_itself_again_without_later_arguments():
    kinds = [kind for kind in vars(keras.layers).values() if inspect.isclass(kind) and kind is not keras.layers.Layer]
    found = {kind: one for kind in kinds if isinstance(one := made(kind), keras.layers.Layer)}
    assert len(found) > 100 and keras.layers.TextVectorization in found
    differ = []
    for kind, layer in found.items():
        whole = keras.saving.serialize_keras_object(layer)
        try:
            again = keras.saving.deserialize_keras_object(versions.without_later_arguments(whole))
            if keras.saving.serialize_keras_object(again) != whole:
                differ.append(kind.__name__)
        except Exception as error:
            differ.append(f"{kind.__name__}: {error}")
    assert differ == []


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

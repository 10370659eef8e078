"""A model exported in each format and loaded again answers as the Keras model does, for any number of rows."""

from __future__ import annotations

import os

import keras
import numpy as np
import pytest
import small_run
import tensorflow as tf
from cases import repeated_but

from launcher.serving import export
from launcher.serving.weights import Weights

pytestmark = pytest.mark.slow

WEIGHTS = Weights(step=1, averaged=False, arrays={})


def two_inputs():
    wide, narrow = keras.Input((3,), name="wide"), keras.Input((2,), name="narrow")
    joined = keras.layers.Concatenate()([keras.layers.Dense(4, activation="tanh")(wide), narrow])
    outputs = {"price": keras.layers.Dense(1)(joined), "kind": keras.layers.Dense(3, activation="softmax")(joined)}
    return keras.Model({"wide": wide, "narrow": narrow}, outputs)


def sequential():
    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(2, name="logits")]
    return keras.Sequential([keras.Input((3,), name="wide"), *layers])


@keras.saving.register_keras_serializable(package="test_formats")
class OfWholeBatch(keras.Model):
    """Takes the batch as the task has it, and needs one of its tensors."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(2)

    def call(self, batch):
        return self.dense(batch["wide"])


def whole_batch():
    model = OfWholeBatch()
    model({"wide": tf.zeros([1, 3])})
    return model


def called_with(model, batch):
    if isinstance(model, keras.Sequential):
        return batch["wide"]
    return batch if isinstance(model, OfWholeBatch) else {name: batch[name] for name in ("wide", "narrow")}


def loss(model, batch, training):
    outputs = tf.nest.flatten(model(called_with(model, batch), training=training))
    return tf.add_n([tf.reduce_sum(output) for output in outputs]), tf.reduce_sum(batch["weight"]), {}


def built(make):
    arrays = {"wide": np.ones([1, 8, 3], np.float32), "narrow": np.ones([1, 8, 2], np.float32)}
    return small_run.build(small_run.GivenTask({**arrays, "weight": np.ones([1, 8], np.float32)}, make, loss))


def answers(folder, name, inputs):
    """What an exported model answers, by the names of its outputs if the format keeps them."""
    if name == "saved_model":
        served = tf.saved_model.load(folder).signatures["serving_default"]
        return served(**{key: tf.constant(value) for key, value in inputs.items()})
    if name == "litert":
        return tf.lite.Interpreter(os.path.join(folder, "model.tflite")).get_signature_runner()(**inputs)
    model = keras.saving.load_model(os.path.join(folder, "model.keras"))
    outputs = model(called_with(model, inputs), training=False)
    return outputs if isinstance(outputs, dict) else {"": outputs}


FORMATS, MODELS = ["saved_model", "keras", "litert"], [two_inputs, sequential, whole_batch]
EACH_ONCE = [*zip(MODELS, FORMATS, strict=True), (two_inputs, "litert"), (whole_batch, "saved_model")]


@pytest.mark.parametrize(
    ("make", "name"), repeated_but(EACH_ONCE, [(make, name) for make in MODELS for name in FORMATS])
)
def test_an_exported_model_answers_as_the_keras_model(make, name, tmp_path):
    made = built(make)
    folder = str(tmp_path / name)
    export.WRITERS[name](made, WEIGHTS, folder)
    needed = ("wide", "narrow") if make is two_inputs else ("wide",)
    for rows in (1, 7):
        draws = np.random.default_rng(rows)
        inputs = {"wide": draws.normal(size=(rows, 3)), "narrow": draws.normal(size=(rows, 2))}
        inputs = {key: inputs[key].astype(np.float32) for key in needed}
        expected = made.model(called_with(made.model, inputs), training=False)
        found = answers(folder, name, inputs)
        if make is two_inputs:
            assert set(found) == {"price", "kind"}
        elif name != "keras":
            assert set(found) == {"logits" if make is sequential else "output"}
        expected = expected if isinstance(expected, dict) else {next(iter(found)): expected}
        for key, value in expected.items():
            np.testing.assert_allclose(np.array(found[key]), np.array(value), atol=1e-6)


def test_a_table_of_words_in_the_model_is_exported_with_it(tmp_path):
    def words():
        text = keras.Input((), dtype="string", name="text")
        found = keras.layers.StringLookup(vocabulary=["no", "yes"], output_mode="one_hot")(text)
        return keras.Model(text, keras.layers.Dense(1, name="score")(found))

    def loss(model, batch, training):
        return tf.reduce_sum(model(batch["text"], training=training)), tf.reduce_sum(batch["weight"]), {}

    arrays = {"text": np.array([["yes"] * 4]), "weight": np.ones([1, 4], np.float32)}
    made = small_run.build(small_run.GivenTask(arrays, words, loss))
    export.WRITERS["saved_model"](made, WEIGHTS, str(tmp_path / "saved"))
    served = tf.saved_model.load(str(tmp_path / "saved")).signatures["serving_default"]
    texts = tf.constant(["no", "what", "yes"])
    np.testing.assert_allclose(served(text=texts)["score"], made.model(texts), atol=1e-6)


def test_the_formats_of_the_command_line(launched, tmp_path):
    for name, file in (("saved_model", "saved_model.pb"), ("keras", "model.keras"), ("litert", "model.tflite")):
        done = launched("--mode=export", f"--export_format={name}", f"--export_dir={tmp_path}/{name}")
        assert done.returncode == 0, done.stderr
        assert (tmp_path / name / file).stat().st_size > 1000
    images = np.random.default_rng(0).normal(size=(7, 8, 8, 1)).astype(np.float32)
    expected = keras.saving.load_model(tmp_path / "keras/model.keras")(images)
    runner = tf.lite.Interpreter(str(tmp_path / "litert/model.tflite")).get_signature_runner()
    np.testing.assert_allclose(runner(image=images)["logits"], expected, atol=1e-6)
    refused = launched("--mode=export", "--export_format=onnx")
    assert refused.returncode == 64 and "saved_model|keras|litert" in refused.stderr
    refused = launched("--mode=predict", "--export_format=keras")
    assert refused.returncode == 64 and "--export_format is for --mode=export," in refused.stderr

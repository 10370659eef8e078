"""What XLA has no operations for is done by the host where it is about the data alone, said by others, or refused."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pods
import pytest
import tensorflow as tf
from places import PYTHONPATH

from launcher.step_program import xla_forms

PROGRAM = """
import json, keras, numpy as np, tensorflow as tf, zoo, launcher
from launcher.errors import UsageError

def fit(name, **how):
    kind = zoo.kinds()[name]
    about = {"epochs": 1, "batch_size": 16, "shuffle": False, "verbose": 0, "validation_data": (kind.x, kind.y), **how}
    return kind, launcher.fit(kind.model, kind.x, kind.y, **about)

kind, told = fit("several inputs", engine="pjrt", replicas=4, shard="all", model_dir="run")
again = keras.saving.load_model("run/model.keras")
assert [one.shape for one in again.optimizer.variables[2:4]] == [again.trainable_variables[0].shape] * 2  # no parts
x = {name: tf.constant(column) for name, column in kind.x.items()}
np.testing.assert_allclose(again(x), told.model(x), rtol=1e-6)
_, by_tensorflow = fit("several inputs")
print("FOUND", json.dumps([one.history for one in (told, by_tensorflow)]))
try:
    fit("TextVectorization of unknown length", engine="pjrt", replicas=4)
except UsageError as error:
    print("REFUSED", error)
"""


@pytest.mark.slow
def test_words_are_looked_up_by_the_host_to_the_same_losses_and_the_model_still_takes_words(run_launcher, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {"PYTHONPATH": f"{PYTHONPATH}:{tmp_path}", "XLA_FLAGS": pods.FAST_COMPILE}
    done = run_launcher(module="program", env=env, cwd=tmp_path, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("FOUND", "REFUSED")))
    told, by_tensorflow = json.loads(lines["FOUND"])
    assert told.keys() == by_tensorflow.keys()
    for name, values in by_tensorflow.items():
        assert told[name] == pytest.approx(values, rel=1e-6), name
    assert "layer 'embedding' of type Embedding" in lines["REFUSED"]
    assert "output_sequence_length" in lines["REFUSED"]


def _operation(make):
    with tf.Graph().as_default():
        return make().op


IMAGES = np.random.default_rng(0).normal(size=(2, 6, 5, 3)).astype(np.float32)
TURNS = np.array([[0.9, 0.3, -1.5, -0.3, 1.1, 2.2, 0.01, -0.02], [1, 0, 40, 0, -1, -30, 0, 0]], np.float32)


@pytest.mark.parametrize(
    ("mode", "interpolation"),
    [*itertools.product(("CONSTANT", "NEAREST", "REFLECT", "WRAP"), ("BILINEAR", "NEAREST"))],
)
def test_turned_pictures_are_those_of_tensorflows_kernel(mode, interpolation):
    given = (IMAGES, TURNS, [7, 4], 0.5)
    about = {"fill_mode": mode, "interpolation": interpolation}

    def make(*inputs):
        names = ("images", "transforms", "output_shape", "fill_value")
        return tf.raw_ops.ImageProjectiveTransformV3(**dict(zip(names, inputs, strict=True)), **about)

    form = xla_forms.FORMS["ImageProjectiveTransformV3"](_operation(lambda: make(*given)))
    found = form(*map(tf.constant, given))
    np.testing.assert_allclose(found, make(*given), rtol=1e-4, atol=1e-5)


RESIZED = {
    "ResizeArea": lambda raw: raw.ResizeArea(images=IMAGES, size=[3, 9]),
    "ResizeBicubic": lambda raw: raw.ResizeBicubic(images=IMAGES, size=[3, 9], half_pixel_centers=True),
    "ResizeBicubicGrad": lambda raw: raw.ResizeBicubicGrad(
        grads=IMAGES, original_image=tf.zeros((2, 4, 9, 3)), half_pixel_centers=True
    ),
    "ResizeNearestNeighborGrad": lambda raw: raw.ResizeNearestNeighborGrad(
        grads=IMAGES, size=[3, 9], half_pixel_centers=True
    ),
    "ScaleAndTranslate": lambda raw: raw.ScaleAndTranslate(
        images=IMAGES, size=[3, 9], scale=[0.5, 1.8], translation=[0.0, 0.0], kernel_type="lanczos3"
    ),
    "ScaleAndTranslateGrad": lambda raw: raw.ScaleAndTranslateGrad(
        grads=IMAGES, original_image=tf.zeros((2, 4, 9, 3)), scale=[6 / 4, 5 / 9], translation=[0.0, 0.0]
    ),
}


@pytest.mark.parametrize("name", RESIZED)
def test_resized_pictures_are_those_of_tensorflows_kernel(name):
    form = xla_forms.FORMS[name](_operation(lambda: RESIZED[name](tf.raw_ops)))
    np.testing.assert_allclose(form(tf.constant(IMAGES)), RESIZED[name](tf.raw_ops), rtol=1e-4, atol=1e-5)

"""MODEL_DIR/model.keras and `launcher.load`: the weights of the checkpoints, opened by plain Keras and in notebooks."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
from cases import repeated_but
from places import PYTHONPATH, SMALL_DIGITS
from served import run_here

import launcher
from launcher.checkpoints import CheckpointStore, weight_files
from launcher.data.images import digits
from launcher.errors import UsageError
from launcher.machine import versions
from launcher.serving import read_back

pytestmark = pytest.mark.slow

IMAGES = digits.load()[1]["image"][:7].astype(np.float32)

OPENS = """
import sys
import keras, numpy
model = keras.saving.load_model(sys.argv[1])
numpy.save(sys.argv[3], model.predict(numpy.load(sys.argv[2]), verbose=0))
assert not any(name.partition(".")[0] in ("launcher", "models") for name in sys.modules)
"""


def saved(store, step, prefix):
    """Weights of a checkpoint as it holds them, without names that count up."""
    return [array for name, array in store.read(step).items() if name.startswith(prefix)]


def assert_weights(model, arrays):
    for weight, array in zip(model.weights, arrays, strict=True):
        np.testing.assert_array_equal(weight.numpy(), array)


@pytest.fixture
def store(digits_run):
    return CheckpointStore(str(digits_run / "checkpoints"), is_chief=False)


@pytest.fixture
def copied(digits_run, tmp_path):
    """A copy of the run, to be changed."""
    shutil.copytree(digits_run, tmp_path / "run")
    return tmp_path / "run"


def test_import_launcher_imports_no_tensorflow():
    code = "import launcher, sys; assert 'load' in dir(launcher); assert not {'tensorflow', 'keras'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        launcher.lod  # noqa: B018


def test_a_training_on_two_replicas_leaves_a_model_that_plain_keras_opens_elsewhere(digits_run, store, tmp_path):
    printed = (digits_run.parent / "printed").read_text()
    assert f"model.keras holds the model with the weights of step {store.best()} (averaged)" in printed
    np.save(tmp_path / "images.npy", IMAGES)
    arguments = [str(digits_run / "model.keras"), str(tmp_path / "images.npy"), str(tmp_path / "answers.npy")]
    environ = {**os.environ, "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", OPENS, *arguments], check=True, timeout=240, cwd=tmp_path, env=environ)
    expected = launcher.load(str(digits_run)).predict(IMAGES, verbose=0)
    np.testing.assert_allclose(np.load(tmp_path / "answers.npy"), expected, atol=1e-6)
    assert not list(digits_run.glob("partial*"))


def test_load_gives_the_weights_of_the_checkpoint_asked_for_with_and_without_the_file(copied, store):
    best, last = store.best(), store.latest()
    for step, which in ((best, "best"), (last, "last"), (best, "averaged")):
        assert_weights(launcher.load(str(copied), which), saved(store, step, "ema/"))
    before = keras.config.dtype_policy()
    (copied / "model.keras").unlink()
    built = launcher.load(str(copied))
    assert_weights(built, saved(store, best, "ema/"))
    assert keras.config.dtype_policy() == before


def test_load_without_checkpoints_takes_what_the_file_holds(copied):
    expected = launcher.load(str(copied)).predict(IMAGES, verbose=0)
    shutil.rmtree(copied / "checkpoints")
    np.testing.assert_array_equal(launcher.load(str(copied), trust=True).predict(IMAGES, verbose=0), expected)
    with pytest.raises(UsageError, match=r"no checkpoint and no model\.keras with such weights"):
        launcher.load(str(copied), "last", trust=True)


def test_what_load_refuses(copied, tmp_path):
    for arguments, message in (
        ((str(tmp_path / "nowhere"),), "there is no folder"),
        ((str(tmp_path),), "no checkpoint and no model.keras"),
        ((str(copied), "newest"), "'best', 'last', 'averaged'"),
    ):
        with pytest.raises(UsageError, match=message):
            launcher.load(*arguments)


@pytest.fixture
def loaded_elsewhere(copied, run_launcher):
    """loaded_elsewhere(*arguments): what a process prints that loads the copy from another directory."""

    def run(*arguments):
        options = {"module": "loads_folder", "cwd": copied.parent, "env": {"PYTHONPATH": PYTHONPATH}}
        done = run_launcher(str(copied), *arguments, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("model_file", repeated_but(["of another step"], ["none", "of another step", "cut short"]))
def test_python_that_came_with_a_folder_is_run_only_where_it_is_trusted(copied, loaded_elsewhere, model_file):
    path = copied / "model.keras"
    if model_file == "of another step":
        with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
            file.writestr("launcher.json", '{"step": -1}')
    elif model_file == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    (copied / "beside.py").write_text(f"import pathlib; pathlib.Path({str(copied.parent / 'ran')!r}).touch()")
    config = (copied / "config.gin").read_text()
    (copied / "config.gin").write_text(f"import beside\n{config}")
    printed = loaded_elsewhere()
    assert f"config.gin line 1: import beside: {copied}/beside.py lies in {copied}" in printed
    assert "trust=True" in printed and not (copied.parent / "ran").exists()
    assert "loaded" in loaded_elsewhere("trust")
    assert (copied.parent / "ran").exists()


def test_a_lambda_layer_of_a_folder_is_run_only_where_it_is_trusted(copied):
    shutil.rmtree(copied / "checkpoints")
    inputs = keras.Input((8, 8, 1))
    ran = copied.parent / "ran"
    path = str(ran)  # what Keras saves with a lambda must be JSON, and it has no module of its own
    run = keras.layers.Lambda(lambda x: (__import__("pathlib").Path(path).touch(), x)[1], output_shape=(8, 8, 1))
    model = keras.Model(inputs, run(inputs))
    ran.unlink(missing_ok=True)
    model.save(copied / "model.keras")
    with zipfile.ZipFile(copied / "model.keras", "a") as file:
        file.writestr("launcher.json", '{"which": "best", "step": 1, "averaged": false}')
    with pytest.raises(
        UsageError, match=r"model\.keras (cannot be loaded: .*[Ll]ambda|is not opened, as Keras 3\.(8|9|10|11)\.)"
    ):
        launcher.load(str(copied))
    assert not ran.exists()
    launcher.load(str(copied), trust=True)(IMAGES)
    assert ran.exists()


def test_a_model_file_that_unpacks_to_far_more_than_it_has_is_not_unpacked(copied):
    with zipfile.ZipFile(copied / "model.keras", "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("model.weights.h5.more", bytes(80 * 2**20))
    with pytest.raises(UsageError, match=r"model\.keras is not read: it would unpack to 83\d{6} bytes"):
        launcher.load(str(copied))


def test_a_pipe_in_a_folder_is_not_waited_for(copied, loaded_elsewhere):
    (copied / "model.keras").unlink()
    os.mkfifo(copied / "model.keras")
    (copied / "assets").mkdir(exist_ok=True)
    os.mkfifo(copied / "assets/vocabulary.json")
    assert "loaded" in loaded_elsewhere()


UNSAVABLE = """
import gin
import keras
import numpy as np
import tensorflow as tf
from launcher.data.pipeline import ArrayExamples, RandomAccessData


class Shifted(keras.Model):
    def __init__(self, shift):
        super().__init__()
        self.dense, self.shift = keras.layers.Dense(1), shift

    def call(self, x):
        return self.dense(x) + self.shift()

    def get_config(self):  # so that every version of Keras says no
        raise NotImplementedError("shift is a function")


@gin.configurable
class Lines:
    def data(self):
        return RandomAccessData(train=ArrayExamples({"x": np.arange(8, dtype="float32")[:, None]}))

    def model(self):
        model = Shifted(lambda: 1.0)
        model(tf.zeros([1, 1]))
        return model

    def loss(self, model, batch, training):
        error = model(batch["x"], training=training)[:, 0] - batch["x"][:, 0]
        return tf.reduce_sum(error**2 * batch["weight"]), tf.reduce_sum(batch["weight"]), {}
"""


@pytest.fixture
def own_task(tmp_path, monkeypatch):
    """Flags for a user's task whose model has no config."""
    (tmp_path / "shifted_lines.py").write_text(UNSAVABLE)
    (tmp_path / "own.gin").write_text(
        "import shifted_lines\ntrain.task = @Lines()\ntrain.optimizer = @momentum\nmomentum.learning_rate = 0.001\n"
        "train.global_batch_size = 4\ntrain.steps = 2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield [f"--gin_file={tmp_path}/own.gin", f"--model_dir={tmp_path}/run"]
    sys.modules.pop("shifted_lines", None)


def test_a_model_that_keras_cannot_save_is_a_note_and_a_file_of_its_weights(own_task, tmp_path):
    done = run_here(*own_task)
    assert done.returncode == 0, done.stderr
    assert "Keras cannot save this model" in done.stdout and "get_config()" in done.stdout
    assert "Traceback" not in done.stderr
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert "model.weights.h5" in files and not {name for name in files if name.endswith(".keras")}
    loaded = launcher.load(str(tmp_path / "run"))
    anew = launcher.load(str(tmp_path / "run"), "last")
    anew.load_weights(tmp_path / "run/model.weights.h5")
    assert_weights(anew, [weight.numpy() for weight in loaded.weights])
    refused = run_here(*own_task, "--mode=export", "--export_format=keras")
    assert refused.returncode == 64 and "Keras cannot save this model" in refused.stderr


def test_no_model_file_by_choice_and_an_unknown_choice(tmp_path):
    flags = [f"--gin_file={SMALL_DIGITS}", "--gin_param=train.steps = 1", f"--model_dir={tmp_path}/run"]
    done = run_here(*flags, "--gin_param=Checkpoints.save_model = 'newest'")
    assert done.returncode == 64 and "'best', 'last', 'none'" in done.stderr
    done = run_here(*flags, "--gin_param=Checkpoints.save_model = 'none'")
    assert done.returncode == 0 and not list((tmp_path / "run").glob("model*"))


@pytest.mark.heavy
def test_two_workers_leave_one_model_file_of_the_checkpoint(run_workers, tmp_path):
    flags = [f"--gin_file={SMALL_DIGITS}", "--gin_param=train.steps = 4", f"--model_dir={tmp_path}/run"]
    for done in run_workers(2, *flags):
        assert done.returncode == 0, done.stderr
    store = CheckpointStore(str(tmp_path / "run/checkpoints"), is_chief=False)
    model = keras.saving.load_model(tmp_path / "run/model.keras")
    assert_weights(model, saved(store, store.best(), "model/"))


@keras.saving.register_keras_serializable("test_model_file")
class Forgets(keras.layers.Layer):
    """Its get_config() leaves out what it was made with."""

    def __init__(self, factor=1.0, **arguments):
        super().__init__(**arguments)
        self.factor = factor

    def get_config(self):
        return {"name": self.name}

    def call(self, x):
        return x * self.factor


def adapted(mode, *more):
    """A model of which the first layer is quantized and has LoRA."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="first"), *more])
    if mode:
        model.quantize(mode)
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(np.full((2, 4), 0.05))
    return model


def test_a_file_that_does_not_answer_as_the_model_is_told_and_one_that_does_is_not(tmp_path):
    mode = "int4" if versions.of(keras.__version__) >= (3, 12) else "int8"
    shared = keras.layers.Dense(4)
    for model, said in (
        (adapted(mode), "answers one batch otherwise"),
        (adapted(None), ""),
        (adapted(None, Forgets(2.0)), "answers one batch otherwise, by up to"),
        (adapted(None, Forgets()), ""),
        (adapted(None, Forgets(), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0), shared), ""),
    ):
        model.save(tmp_path / "model.keras")
        drawn, states = random.getstate(), [one.numpy() for one in model.variables]
        found = read_back.difference(model, str(tmp_path / "model.keras"))
        assert said in found and bool(said) == bool(found), found
        assert random.getstate() == drawn
        for one, state in zip(model.variables, states, strict=True):
            np.testing.assert_array_equal(one.numpy(), state)


def test_a_quantized_model_with_lora_is_loaded_as_it_was_trained(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)

    def of(file):
        model = adapted("int8") if file is None else keras.saving.load_model(file)
        if file is None:
            optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.1)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            model.compile(optimizer, "mse")
        return model

    trained = launcher.fit(lambda: of(None), x, x[:, :4], epochs=2, model_dir=str(tmp_path / "run")).model
    told = capsys.readouterr().out
    assert "model.safetensors has them as they were trained" in told and "; not of sequential" in told
    answers = trained.predict(x, verbose=0)
    of_file = keras.saving.load_model(tmp_path / "run" / "model.keras").predict(x, verbose=0)
    assert np.abs(of_file - answers).max() > 1e-3
    np.testing.assert_allclose(launcher.load(str(tmp_path / "run")).predict(x, verbose=0), answers, atol=1e-6)
    dead = launcher.fit(lambda: of(tmp_path / "run" / "model.keras"), x, x[:, :4], model_dir=str(tmp_path / "dead"))
    told = capsys.readouterr().out
    assert "LoRA's two matrices of first are both 0" in told and dead.history["loss"]
    assert re.search(
        r"weight decay +0\.1, of first/bias, first/lora_kernel_a, first/lora_kernel_b; of all weights", told
    )
    (again,) = [one for one in weight_files.read(str(tmp_path / "run" / "model.safetensors")) if "kernel_b" in one.name]
    np.testing.assert_array_equal(again.value, trained.layers[0].lora_kernel_b.numpy())

"""A recipe's own module may run TensorFlow where it is imported and in every method: fresh processes, any topology."""

from __future__ import annotations

import json

import numpy as np
import pytest

TASK = """
import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, RandomAccessData

HALF = tf.constant(127.5)


@gin.configurable
def surcharge(amount: float = 0.0):
    return amount


@gin.configurable
class Pictures:
    def __init__(self, units: int = 4):
        self.units = int(tf.constant(units) + 0)

    def data(self):
        def examples(subset):
            found = keras.utils.image_dataset_from_directory(
                "pictures", image_size=(4, 4), batch_size=None, validation_split=0.5, subset=subset, seed=1
            )
            images, labels = zip(*found.as_numpy_iterator(), strict=True)
            return ArrayExamples({"image": np.stack(images) / HALF.numpy() - 1, "label": np.stack(labels)})

        return RandomAccessData(train=examples("training"), evaluation=examples("validation"))

    def model(self):
        units = int(tf.reduce_sum(tf.ones([self.units])))
        return keras.Sequential(
            [keras.Input((4, 4, 3)), keras.layers.Flatten(), keras.layers.Dense(units, "gelu"), keras.layers.Dense(2)]
        )

    def loss(self, model, batch, training):
        logits, weight = model(batch["image"], training=training), batch["weight"]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
        more = surcharge() if training else 0.0
        return tf.reduce_sum((losses + more) * weight), tf.reduce_sum(weight), {}
"""

RECIPE = """
import pictures
train.task = @Pictures()
train.optimizer = @momentum
train.steps = 3
train.global_batch_size = 4
momentum.learning_rate = 0.1
AMOUNT = 0.5
surcharge.amount = %AMOUNT
"""

PEERS = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}
ALONE_OF_TWO = {"TF_CONFIG": json.dumps(PEERS)}


@pytest.fixture
def recipe(tmp_path):
    import keras

    generator = np.random.default_rng(0)
    for label in ("cats", "dogs"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(6):
            keras.utils.save_img(tmp_path / "pictures" / label / f"{number}.png", generator.integers(0, 255, (4, 4, 3)))
    (tmp_path / "pictures.py").write_text(TASK)
    (tmp_path / "pictures.gin").write_text(RECIPE)
    return "--gin_file=pictures.gin"


def measured(folder):
    summary = json.loads((folder / "summary.json").read_text())
    return [summary["metrics"][split]["loss"] for split in ("train", "eval")]


@pytest.mark.heavy
def test_a_module_that_runs_tensorflow_trains_alike_on_replicas_and_workers(
    run_launcher, run_workers, recipe, tmp_path
):
    mirrored = run_launcher(recipe, "--model_dir=mirrored", "--replicas=2", "--deterministic")
    assert mirrored.returncode == 0, mirrored.stderr
    for worker in run_workers(2, recipe, "--model_dir=workers", "--gin_param=verify.steps = 2"):
        assert worker.returncode == 0, worker.stderr
    np.testing.assert_allclose(measured(tmp_path / "workers"), measured(tmp_path / "mirrored"), rtol=1e-5)


@pytest.mark.heavy
@pytest.mark.nightly
def test_other_modes_of_a_module_that_runs_tensorflow(run_launcher, recipe, tmp_path):
    def run(*args):
        finished = run_launcher(recipe, "--model_dir=run", *args)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    run()
    assert "evaluation at step 3" in run("--mode=eval", "--replicas=2")
    run("--mode=precision_report", "--replicas=2", "--gin_param=precision_report.policy = 'float32'")
    assert "2 replicas x 1 microbatch x 2" in run("--dry_run", "--replicas=2")
    assert "3 ok" in run("--mode=doctor", "--replicas=2", "--doctor_checks=recipe,data,strategy")


def test_a_dry_run_of_one_worker_runs_the_module_and_waits_for_nobody(run_launcher, recipe, tmp_path):
    finished = run_launcher(recipe, "--dry_run", env=ALONE_OF_TWO)
    assert finished.returncode == 0, finished.stderr
    assert "4 examples a step = 2 replicas x 1 microbatch x 2" in finished.stdout


def test_a_wrong_binding_of_launchers_own_is_refused_before_peers_are_waited_for(run_launcher, recipe):
    finished = run_launcher(recipe, "--gin_param=train.steps = 'ten'", env=ALONE_OF_TWO)
    assert finished.returncode == 64, finished.stderr
    assert "train.steps = 'ten': expected int" in finished.stderr

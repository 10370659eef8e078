"""train.microbatches = 'auto': the fewest that fit on every worker's devices, tried in processes of their own."""

from __future__ import annotations

import dataclasses

import pods
import pytest
from places import PYTHONPATH

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.run import microbatches

# Memory that holds so many examples, as a device's would: TensorFlow says RESOURCE_EXHAUSTED beyond.
MODULE = """
import os
import gin, keras, numpy as np, tensorflow as tf
from launcher.data.pipeline import ArrayExamples, RandomAccessData

ROOM = int(os.environ.get("ROOM", "0"))

@gin.configurable
class Bounded:
    def data(self):
        inputs = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        return RandomAccessData(train=ArrayExamples({"x": inputs}))

    def model(self):
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

    def loss(self, model, batch, training):
        def allocate(examples):
            if examples > ROOM:
                raise MemoryError(f"no room for {examples} examples")
            return 0.0
        out = model(batch["x"], training=training)
        out += tf.py_function(allocate, [tf.shape(out)[0]], tf.float32)
        return tf.reduce_sum(out**2), tf.reduce_sum(batch["weight"]), {}
"""

RECIPE = """
import bounded
train.task = @Bounded()
train.optimizer = @adam
train.steps = 3
train.global_batch_size = 16
train.microbatches = 'auto'
adam.learning_rate = 0.1
"""


@pytest.mark.heavy
def test_all_workers_take_the_number_of_the_one_that_needs_most(run_workers, tmp_path):
    (tmp_path / "bounded.py").write_text(MODULE)
    recipe = tmp_path / "bounded.gin"
    recipe.write_text(RECIPE)
    envs = [{"ROOM": room, "PYTHONPATH": PYTHONPATH} for room in ("8", "4")]
    command = ("--mode=train", f"--gin_file={recipe}")
    chief, other = run_workers(2, *command, f"--model_dir={tmp_path}/tried", env=envs)
    assert (chief.returncode, other.returncode) == (0, 0), chief.stderr + other.stderr
    assert "2 replicas x 2 microbatches x 4 (auto: 1 ran out of memory)" in chief.stdout
    assert "trying 2" not in chief.stdout, "the chief's own memory holds them all at once"
    assert "trying 2" in other.stdout


@pytest.fixture
def plan():
    params = ["train.global_batch_size = 12", "train.microbatches = 'auto'"]
    resolved = pods.plan_of("resnet_cpu.gin", params)
    assert resolved.microbatches == 1
    assert "auto: how many microbatches fit is tried when training starts" in resolved.describe()["batch"]
    devices = dataclasses.replace(
        resolved.strategy, kind="mirrored", num_replicas=2, local_replicas=2, devices=("CPU:0", "CPU:1")
    )
    yield dataclasses.replace(resolved, strategy=devices)
    gin_bindings.reset()


def test_where_not_even_one_example_fits_the_batch_is_refused(plan, monkeypatch):
    tried = []
    monkeypatch.setattr(microbatches, "_fits", lambda request: tried.append(request["gin_params"]))
    with pytest.raises(UsageError, match=r"not even 6 microbatches of one example fit .* CPU:1"):
        microbatches.decide(plan, gin_files=["any.gin"], gin_params=["train.seed = 3"], say=lambda text: None)
    assert tried == [
        ["train.seed = 3", f"train.microbatches = {n}", "train.global_batch_size = 12", "train.eval_batch_size = 12"]
        for n in (1, 2, 3, 6)
    ]


def test_a_tpu_is_left_to_preflight(plan):
    tpu = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind="tpu", accelerator="tpu"))
    with pytest.raises(UsageError, match="let --mode=preflight say how many fit"):
        microbatches.decide(tpu, gin_files=[], gin_params=[])

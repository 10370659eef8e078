"""`--mode=verify` as a command, on a recipe of one's own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal

import forked
import psutil
import pytest

# ---------------------------------------------------------------------------------------------------- the whole command

TASK = """
import os

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, RandomAccessData

ORIGIN = tf.zeros([8])  # TensorFlow is in use from here on, in every process that is to set it up


def logistic(values):
    # Doubles a small difference 12 times.
    values = tf.sigmoid(values)
    for _ in range(12):
        values = 4 * values * (1 - values)
    return values


@gin.configurable
class Points:
    def __init__(self, fault: str = "", units: int = 16):
        self.fault, self.units = fault, units

    def data(self):
        generator = np.random.default_rng(0)
        x = generator.normal(size=[100, 8]).astype("float32")
        examples = ArrayExamples({"x": x, "label": (x.sum(1) > 0).astype("int32")})
        return RandomAccessData(train=examples, evaluation=examples)

    def model(self):
        if self.fault == "dies" and '"index": 1' in os.environ.get("TF_CONFIG", ""):
            os.write(2, b"no more disk\\n")
            os._exit(9)
        if self.fault == "hangs":
            open("hanging", "w").close()
            while True:
                pass
        layers = [keras.Input((8,)), keras.layers.Dense(self.units, "relu", name="first")]
        if "norm" in self.fault:
            layers.append(keras.layers.BatchNormalization(name="norm"))
        if self.fault == "dropout":
            layers.append(keras.layers.Dropout(0.5, name="drop"))
        if self.fault == "chaos":
            layers.append(keras.layers.Activation(logistic, name="chaos"))
        return keras.Sequential([*layers, keras.layers.Dense(2, name="last")])

    def loss(self, model, batch, training):
        logits, weight = model(batch["x"], training=training), batch["weight"]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], tf.cast(logits, tf.float32))
        total = tf.reduce_mean(losses) if "mean" in self.fault else tf.reduce_sum(losses * weight)
        if self.fault == "drift":  # the loss has the right value and, on all replicas but the first, a wrong gradient
            replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            total += 6e-4 * replica * (total - tf.stop_gradient(total))
        return total, tf.reduce_sum(weight), {"peak": tf.reduce_max(losses)} if "mean" in self.fault else {}
"""

RECIPE = """
import points
train.task = @Points()
train.optimizer = @adam
train.steps = 6
train.global_batch_size = 12
adam.learning_rate = 0.01
verify.replicas = 2
precision_report.batches = 3
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "points.py").write_text(TASK)
    (tmp_path / "points.gin").write_text(RECIPE)
    return ["--gin_file=points.gin", "--mode=verify"]


def only_mirrored(fault: str) -> list[str]:
    return [
        "--gin_param=verify.workers = ()",
        "--gin_param=verify.microbatches = ()",
        f"--gin_param=Points.fault = '{fault}'",
    ]


@pytest.mark.heavy
def test_a_recipe_of_ones_own_is_verified_on_every_topology_with_its_dropout_off(run_launcher, recipe, tmp_path):
    # Wide enough for its optimizer's state to be shared out, which changes nothing either.
    recipe += ["--gin_param=Points.units = 128", "--gin_param=train.shard = 'optimizer'"]
    dropout = "--gin_param=Points.fault = 'dropout'"
    finished = run_launcher(*recipe, dropout, "--gin_param=verify.microbatches = (2, 5)")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "microbatches 5: not applicable: train.global_batch_size = 12 cannot be split evenly" in finished.stdout
    written = json.loads((tmp_path / "runs/points/verify.json").read_text())
    assert written["steps"] == 6
    assert written["within_tolerance"]
    verdicts = {one["topology"]: one["verdict"] for one in written["topologies"]}
    within = dict.fromkeys(["mirrored 2", "workers 2", "microbatches 2"], "within")
    assert verdicts == {**within, "microbatches 5": "not applicable"}
    for one in written["topologies"][:2]:
        assert one["deviations"]["replicas"]["value"] == 0
        assert one["deviations"]["loss"]["value"] < 1e-5
    assert not (tmp_path / "runs/points/checkpoints").exists()


@pytest.mark.nightly  # tests/step_program compares them step by step
@pytest.mark.heavy
def test_the_engine_of_jax_is_compared_with_that_of_tensorflow(run_launcher, recipe, tmp_path):
    finished = run_launcher(*recipe, "--engine=pjrt")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads((tmp_path / "runs/points/verify.json").read_text())
    assert written["within_tolerance"]
    assert [one["topology"] for one in written["topologies"]] == ["pjrt 1", "pjrt 2", "workers 2", "microbatches 2"]
    assert {one["engine"] for one in written["topologies"]} == {"pjrt"}
    assert written["topologies"][2]["deviations"]["replicas"]["value"] == 0
    # XLA draws other masks than TensorFlow, also for one replica.
    dropout = ("--gin_param=verify.replicas = ()", "--gin_param=verify.dropout = True")
    finished = run_launcher(*recipe, *only_mirrored("dropout"), *dropout, "--engine=pjrt")
    assert finished.returncode == 70, finished.stdout + finished.stderr
    assert "pjrt 1: loss off by" in finished.stdout


@pytest.mark.heavy
@pytest.mark.nightly  # the next test has the same exit code for another difference
def test_dropout_that_is_asked_for_is_a_difference(run_launcher, recipe):
    finished = run_launcher(*recipe, *only_mirrored("dropout"), "--gin_param=verify.dropout = True")
    assert finished.returncode == 70, finished.stdout + finished.stderr


@pytest.mark.heavy
def test_a_task_that_depends_on_the_topology_is_found_out(run_launcher, recipe, tmp_path):
    finished = run_launcher(*recipe, *only_mirrored("mean and norm"))
    assert finished.returncode == 70, finished.stderr
    for quantity in ("loss", "moving statistics", "metrics"):
        assert re.search(f"mirrored 2: .*{quantity} off by ", finished.stdout), finished.stdout
    assert "worst offender is mirrored 2" in finished.stderr
    assert "is the task's loss() a sum over the batch" in finished.stderr
    written = json.loads((tmp_path / "runs/points/verify.json").read_text())
    assert not written["within_tolerance"]
    deviations = written["topologies"][0]["deviations"]
    assert not deviations["loss"]["within"] and not deviations["moving_statistics"]["within"]
    assert written["topologies"][0]["deviations"]["metrics"]["where"].startswith("metrics/")


@pytest.mark.heavy
@pytest.mark.nightly
def test_training_that_amplifies_rounding_is_verified_and_a_small_mistake_in_it_is_not(run_launcher, recipe, tmp_path):
    finished = run_launcher(*recipe, *only_mirrored("chaos"))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "amplified rounding in mirrored 2" in finished.stdout
    written = json.loads((tmp_path / "runs/points/verify.json").read_text())
    assert written["verified"]
    assert not written["within_tolerance"]
    assert written["topologies"][0]["verdict"] == "amplified rounding"
    assert written["control"]["deviations"]["loss"]["value"] > 0

    finished = run_launcher(*recipe, *only_mirrored("drift"), "--gin_param=train.steps = 40")
    assert finished.returncode == 70, finished.stdout
    assert "Rounding does not explain it" in finished.stderr


@pytest.mark.heavy
def test_a_worker_that_dies_fails_its_topology_and_leaves_no_orphans(start_launcher, recipe):
    bindings = ("--gin_param=verify.replicas = ()", "--gin_param=verify.microbatches = ()")
    started = start_launcher(*recipe, *bindings, "--gin_param=Points.fault = 'dies'")
    seen: set[psutil.Process] = set()

    def ended():
        with contextlib.suppress(psutil.NoSuchProcess):
            seen.update(forked.children(started.process.pid, recursive=True))
        return started.process.poll() is not None

    started.wait_until(ended)
    finished = started.wait()
    assert finished.returncode == 70, finished.stderr
    assert "workers 2: failed: worker 1 ended with exit code 9" in finished.stdout
    assert "no more disk" in finished.stdout
    assert len(seen) >= 3, "one process for the baseline and one for each worker"
    left = [one for one in seen if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert not forked.without_nurseries(left)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_follow_when_the_command_is_ended(start_launcher, recipe, tmp_path, number):
    (tmp_path / "scratch").mkdir()
    started = start_launcher(*recipe, "--gin_param=Points.fault = 'hangs'", env={"TMPDIR": str(tmp_path / "scratch")})
    started.wait_until((tmp_path / "hanging").exists)
    (worker,) = forked.children(started.process.pid, recursive=True)
    os.kill(started.process.pid, number)  # not its group
    worker.wait(timeout=60)
    started.wait()
    if number == signal.SIGTERM:
        assert not list((tmp_path / "scratch").glob("verify-*"))


def test_flags_that_contradict_verify_are_refused(run_launcher, recipe):
    finished = run_launcher(*recipe, "--replicas=2")
    assert finished.returncode == 64
    assert "verify.replicas" in finished.stderr

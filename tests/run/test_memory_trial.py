"""train.microbatches and train.rematerialize = 'auto': what fits on every worker's devices, tried in processes."""

from __future__ import annotations

import dataclasses

import keras
import pods
import pytest
from places import PYTHONPATH

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.machine.runtime_kinds import PJRT
from launcher.run import memory_trial
from launcher.run.memory_trial import Setting

# Memory that holds so many examples' activations, as a device's would: TensorFlow says RESOURCE_EXHAUSTED beyond.
MODULE = """
import os
import gin, keras, numpy as np, tensorflow as tf
from launcher.data.pipeline import ArrayExamples, RandomAccessData

ROOM = int(os.environ.get("ROOM", "0"))

class Computed(keras.layers.Dense):
    rematerialize = False

    def call(self, inputs, training=False):
        computed = super().call
        return keras.remat(computed)(inputs) if self.rematerialize and training else computed(inputs)

@gin.configurable
class Bounded:
    def data(self):
        inputs = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        return RandomAccessData(train=ArrayExamples({"x": inputs}))

    def model(self):
        return keras.Sequential([keras.Input((8,)), Computed(1)])

    def loss(self, model, batch, training):
        kept = 1 if model.layers[-1].rematerialize else 4
        def allocate(examples):
            if examples * kept > ROOM:
                if os.environ["ENDS"] == "by itself":
                    raise MemoryError(f"no room for {examples} examples")
                # As the C++ library does.
                os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'")
                os.abort()
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
train.global_batch_size = 4
train.microbatches = 'auto'
train.rematerialize = 'auto'
adam.learning_rate = 0.1
"""


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(keras, "remat"), reason="this Keras has no remat")
def test_all_workers_take_what_is_enough_for_each_of_them(run_workers, tmp_path):
    (tmp_path / "bounded.py").write_text(MODULE)
    recipe = tmp_path / "bounded.gin"
    recipe.write_text(RECIPE)
    rooms = (("4", "by itself"), ("2", "at once"))
    envs = [{"ROOM": room, "ENDS": how, "PYTHONPATH": PYTHONPATH} for room, how in rooms]
    command = ("--mode=train", f"--gin_file={recipe}")
    chief, other = run_workers(2, *command, f"--model_dir={tmp_path}/tried", env=envs)
    assert (chief.returncode, other.returncode) == (0, 0), chief.stderr + other.stderr
    assert "2 replicas x 2 microbatches x 1 (auto: 1 did not fit)" in chief.stdout
    assert "on (auto: without it, all numbers of microbatches did not fit)" in chief.stdout
    tried = "trying train.rematerialize = {}, train.microbatches = {}"
    assert tried.format(False, 2) in chief.stdout
    assert tried.format(True, 1) not in chief.stdout, "the chief's own memory is enough without"
    assert tried.format(True, 1) in other.stdout
    assert tried.format(True, 2) not in other.stdout, "with it, one microbatch is enough for the other"


@pytest.fixture
def planned():
    """planned(*bindings): a plan of two replicas of a worker, each with six examples."""

    def make(*bindings):
        resolved = pods.plan_of("lm_cpu.gin", ["train.global_batch_size = 12", *bindings])
        devices = dataclasses.replace(
            resolved.strategy, kind="mirrored", num_replicas=2, local_replicas=2, devices=("CPU:0", "CPU:1")
        )
        return dataclasses.replace(resolved, strategy=devices)

    yield make
    gin_bindings.reset()


MICROBATCHES, REMATERIALIZE = "train.microbatches = 'auto'", "train.rematerialize = 'auto'"
WITHOUT, WITH = (tuple(Setting(choice, count) for count in (1, 2, 3, 6)) for choice in (False, True))


@pytest.mark.parametrize(
    ("bindings", "order"),
    [
        ([MICROBATCHES], [Setting(None, count) for count in (1, 2, 3, 6)]),
        ([REMATERIALIZE], [Setting(False), Setting(True)]),
        ([MICROBATCHES, REMATERIALIZE], [*WITHOUT, *WITH]),
    ],
)
def test_what_costs_least_is_tried_first_and_the_first_that_fits_is_taken(planned, monkeypatch, bindings, order):
    for fitting in (order[0], order[-1]):
        plan, tried = planned(*bindings), []
        assert (plan.microbatches, plan.rematerialize) == (1, False if REMATERIALIZE in bindings else None)
        assert "when training starts, or by preflight" in str(plan.describe())

        def fits(request, tried=tried, fitting=fitting):
            tried.append(tuple(request["gin_params"]))
            return set(fitting.bindings) <= set(request["gin_params"])

        monkeypatch.setattr(memory_trial, "_fits", fits)
        found = memory_trial.decide(plan, gin_files=["a.gin"], gin_params=["train.seed = 3"], say=lambda text: None)
        assert (found.microbatches, found.rematerialize) == (fitting.microbatches or 1, fitting.rematerialize)
        whole = ("train.global_batch_size = 12", "train.eval_batch_size = 12")
        expected = [("train.seed = 3", *one.bindings, *whole) for one in order]
        assert tried == expected[: order.index(fitting) + 1]


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ([MICROBATCHES], r"not even 6 microbatches of one example fit in the memory of .* CPU:1"),
        ([MICROBATCHES, REMATERIALIZE], r"not even 6 .* fit with train.rematerialize = True in the memory of"),
        ([REMATERIALIZE], r"even with .* the step does not fit .*; bind train.microbatches = 'auto'"),
    ],
)
def test_where_nothing_fits_the_batch_is_refused(planned, monkeypatch, bindings, message):
    monkeypatch.setattr(memory_trial, "_fits", lambda request: False)
    with pytest.raises(UsageError, match=message):
        memory_trial.decide(planned(*bindings), gin_files=["any.gin"], gin_params=[], say=lambda text: None)


def test_a_tpu_is_left_to_preflight(planned):
    plan = planned(MICROBATCHES, REMATERIALIZE)
    tpu = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, kind="tpu", accelerator="tpu"))
    with pytest.raises(UsageError, match="let --mode=preflight find it, and bind that"):
        memory_trial.decide(tpu, gin_files=["any.gin"], gin_params=[])


def test_an_engine_with_devices_of_its_own_tries_on_these(planned, monkeypatch):
    plan, tried = planned(MICROBATCHES), []
    monkeypatch.setattr(memory_trial, "_fits", lambda request: tried.append(request) or True)
    on_jax = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, runtime=PJRT))
    assert memory_trial.decide(on_jax, gin_files=["any.gin"], gin_params=[], say=lambda text: None).microbatches == 1
    assert [(one["engine"], one["strategy"], one["replicas"]) for one in tried] == [("pjrt", None, 2)]


def test_a_call_of_fit_that_no_other_process_can_make_is_refused(planned):
    with pytest.raises(UsageError, match=r"train.microbatches = 'auto': .* give --gin_file=PROGRAM.py"):
        memory_trial.decide(planned(MICROBATCHES), gin_files=[], gin_params=[])

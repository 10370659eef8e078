"""mixed_float16 with one example of the global batch that overflows: every topology takes the same decisions."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import keras
import numpy as np
import pytest
import small_run
import tensorflow as tf
from building import build_session
from cases import repeated_but

from launcher.checkpoints import CheckpointStore
from launcher.data.pipeline import Shard
from launcher.run.plan import RunPlan
from launcher.step import gradients, overflow
from launcher.step.diagnosis import Diagnosis
from launcher.step.precision import FixedLossScale

pytestmark = pytest.mark.slow

STEPS = 24  # one epoch is 16 steps, so the bad example comes once or twice

MODULE = '''
import gin, keras, numpy as np, tensorflow as tf
from sklearn.datasets import load_digits
from launcher.data.pipeline import ArrayExamples, RandomAccessData

@gin.configurable
class Poisoned:
    """Digits, of which one is so bright that it overflows in float16."""
    def data(self):
        images, labels = load_digits(return_X_y=True)
        images = (images[:512] / 16 - 0.3).astype("float32")
        images[100] = 1e6
        return RandomAccessData(train=ArrayExamples({"image": images, "label": labels[:512].astype("int32")}))

    def model(self):
        return keras.Sequential([
            keras.Input((64,)), keras.layers.Dense(32, "relu", name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(10, dtype="float32", name="two")])

    def loss(self, model, batch, training):
        logits = model(batch["image"], training=training)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], logits)
        return tf.reduce_sum(losses * batch["weight"]), tf.reduce_sum(batch["weight"]), {}
'''

RECIPE = f"""
import overflowing
train.task = @Poisoned()
train.optimizer = @adamw
train.precision = 'mixed_float16'
train.steps = {STEPS}
train.global_batch_size = 32
train.log_every = 1
adamw.learning_rate = 1e-3
adamw.weight_decay = 0.01
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overflowing")
    (folder / "overflowing.py").write_text(MODULE)
    (folder / "overflowing.gin").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def first_session(folder):
    """first_session(replicas, microbatches): a session of the recipe and its first state, made once."""

    @functools.cache
    def make(replicas, microbatches):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.syspath_prepend(str(folder))
            made = build_session("overflowing.gin", [f"train.microbatches = {microbatches}"], replicas)
        return made, made.trainer.state.snapshot()

    return make


@pytest.fixture
def session(first_session):
    """session(replicas=1, microbatches=1): that session at its first step."""

    def restored(replicas=1, microbatches=1):
        made, start = first_session(replicas, microbatches)
        made.trainer.state.restore(start)
        return made

    return restored


@pytest.fixture
def train(session):
    """train(replicas=1, microbatches=1): the records of all steps, and the session."""

    def run(replicas=1, microbatches=1):
        made = session(replicas, microbatches)
        return made.trainer.train(made.trainer.batches(made.plan.data), STEPS), made

    return run


def skipped_steps(records):
    return [int(step) for step in records.first_step + np.flatnonzero(records.finite == 0)]


@pytest.mark.nightly  # test_train_step_properties.py has overflows anywhere on other topologies
def test_every_topology_skips_the_same_steps_and_replicas_stay_equal(train):
    expected, _ = train()
    skipped = skipped_steps(expected)
    assert 1 <= len(skipped) <= 2
    assert expected.loss_scale[0] == 2.0**15
    assert expected.loss_scale[-1] in (2.0**14, 2.0**13)
    for replicas, microbatches in [(2, 1), (2, 2)]:
        records, made = train(replicas, microbatches)
        assert skipped_steps(records) == skipped
        np.testing.assert_array_equal(records.loss_scale, expected.loss_scale)
        assert made.trainer.skipped_steps == len(skipped)
        for variable in [*made.model.weights, *made.trainer.optimizer.variables]:
            copies = [copy.numpy() for copy in variable.value.values]
            assert len(copies) == replicas
            for copy in copies:
                assert np.isfinite(copy).all(), variable.path
                np.testing.assert_array_equal(copy, copies[0], err_msg=variable.path)


def test_a_skipped_step_leaves_weights_slots_statistics_and_counters_untouched(train, session):
    records, _ = train()
    bad = skipped_steps(records)[0]
    made = session(2)
    trainer = made.trainer
    batches = trainer.batches(made.plan.data)
    trainer.train(batches, bad - 1)
    before = trainer.state.snapshot()
    trainer.train(batches, 1)
    after = trainer.state.snapshot()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert {"counters/step", "counters/skipped", "loss_scale/scale"} <= moved
    assert {name for name in moved if not name.startswith("loss_scale/")} == {"counters/step", "counters/skipped"}


@pytest.mark.nightly  # test_keras_defects.py has two workers that overflow, and replicas say so above
@pytest.mark.heavy
def test_two_workers_skip_the_same_steps_and_the_log_says_so(train, folder, run_workers, tmp_path):
    skipped = skipped_steps(train()[0])
    workers = run_workers(2, "--gin_file=overflowing.gin", f"--model_dir={tmp_path}/run", cwd=folder)
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    for step in skipped:
        (note,) = (line for line in workers[0].stdout.splitlines() if line.startswith(f"step {step} skipped: "))
        assert note.startswith(f"step {step} skipped: the loss was not finite; loss scale")
    assert "; its batch holds no such number, so the model or loss() made it: by an overflow" in workers[0].stdout
    events = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    assert events[-1]["skipped_steps"] == len(skipped)
    assert [event["step"] for event in events if event["loss"] is None] == skipped
    state = CheckpointStore(f"{tmp_path}/run/checkpoints").read(STEPS)
    assert all(np.isfinite(value).all() for value in state.values())


def test_scale_and_skipped_steps_survive_a_restart(train):
    records, made = train()
    state = made.trainer.state.snapshot()
    _, other = train(2)
    other.trainer.state.restore(state)
    assert other.trainer.skipped_steps == len(skipped_steps(records))
    assert other.trainer.loss_scale == made.trainer.loss_scale
    resumed = other.trainer.train(other.trainer.batches(other.plan.data), 4)
    further = made.trainer.train(made.trainer.batches(made.plan.data), 4)
    assert resumed.first_step == STEPS + 1
    np.testing.assert_array_equal(resumed.loss_scale, further.loss_scale)
    np.testing.assert_array_equal(resumed.finite, further.finite)


@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_layers_that_overflow_and_the_replica_that_saw_it_are_named(train, session, replicas):
    records, _ = train(replicas)
    bad = skipped_steps(records)[0]
    made = session(replicas)
    trainer, data = made.trainer, made.plan.data
    trainer.train(trainer.batches(data), bad)
    before = trainer.state.snapshot()
    named = Diagnosis(trainer, data).non_finite_gradients()
    batch = next(iter(data.train_batches(shard_of(bad))))
    seen_by = int(np.flatnonzero(batch["image"].numpy().max(axis=1) > 1e5)[0]) // (32 // replicas)
    assert named.startswith("sequential/one/kernel")
    assert named.endswith(f"on replica {seen_by}")
    after = trainer.state.snapshot()
    assert all(np.array_equal(after[name], value) for name, value in before.items())


def narrow_model():
    """y = (x A) b: of the gradients, only the one that b stands in overflows."""
    steep = keras.initializers.Constant(2.0**9)
    return keras.Sequential(
        [
            keras.Input((2,)),
            # So wide that the squares of its gradient are summed apart from those of small ones.
            keras.layers.Dense(2100, use_bias=False, name="first", kernel_initializer="zeros"),
            keras.layers.Dense(1, use_bias=False, name="second", kernel_initializer=steep),
        ]
    )


@pytest.mark.parametrize(
    ("replicas", "on_gpus"), repeated_but([(2, False), (1, True)], [(1, False), (2, False), (1, True)])
)
def test_a_skipped_step_names_the_layers_that_overflowed_and_no_other_does(replicas, on_gpus, monkeypatch):
    """One program on GPUs tells it by the sums of squares, of which it makes the norm."""
    monkeypatch.setattr(RunPlan, "is_one_program", on_gpus)
    monkeypatch.setattr(gradients.tfxla, "optimization_barrier", lambda same: [same])  # XLA's alone
    # What the backward pass brings to b is 1 / 4 of the scale; to A, 2^9 times that and the inputs.
    inputs = np.zeros((3, 4, 2), np.float32)
    inputs[1, 3] = 1
    made = small_run.build(
        small_run.GivenTask(small_run.linear_batches(inputs), narrow_model, small_run.negative_sum), replicas,
        precision="mixed_float16", loss_scale=FixedLossScale(scale=2.0**11),
    )  # fmt: skip
    records = small_run.train(made)
    np.testing.assert_array_equal(records.finite, [0, 0, 0])
    np.testing.assert_array_equal(records.non_finite, [[True, False]] * 3)
    made = small_run.build(
        small_run.GivenTask(small_run.linear_batches(inputs), narrow_model, small_run.negative_sum), replicas,
        precision="mixed_float16", loss_scale=FixedLossScale(scale=2.0**7),
    )  # fmt: skip
    records = small_run.train(made)
    np.testing.assert_array_equal(records.finite, [1, 1, 1])
    assert not records.non_finite.any()
    # In the second step A's gradient alone is not 0: two rows of 2,100 numbers.
    assert records.gradient_norm[1] == pytest.approx(2.0**9 / 4 * (2 * 2100) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("count", [1, 23, 24, 25, 161])
def test_flags_of_any_number_of_weights_come_through_the_report(count):
    flags = np.random.default_rng(count).random((5, count)) < 0.5
    packed = np.stack([overflow.pack(tf.constant(row, tf.float32)).numpy() for row in flags])
    assert packed.shape == (5, overflow.num_scalars(count)) and packed.dtype == np.float32
    np.testing.assert_array_equal(overflow.unpack(packed.astype(np.float64), count), flags)


def test_layers_are_named_once_from_the_loss_on_and_few_of_many():
    paths = [f"layer{number}/{weight}" for number in range(6) for weight in ("kernel", "bias")]

    def named(*layers):
        return overflow.describe(paths, np.array([int(path[5]) in layers for path in paths]))

    assert named(1, 2) == "layer2, layer1"
    assert named(0, 1, 2, 3, 4) == "layer4, layer3, layer2 and 2 more"
    assert named(*range(6)) == "layer5, layer4, layer3 and 3 more, which is every layer"
    assert named() == "no single gradient, only their norm"


def shard_of(step):
    return Shard(global_batch_size=32, num_replicas=1, first_replica=0, local_replicas=1, seed=0, start_step=step - 1)

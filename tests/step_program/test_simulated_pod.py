"""The simulated pod: steps that JAX takes on 2, 4 and 8 CPU devices, beside those of TensorFlow."""

from __future__ import annotations

import itertools

import numpy as np
import pods
import pytest
import tensorflow as tf
import text_run
from building import build_session

pytestmark = pytest.mark.slow

STEPS = 5


def trained(recipe, params, replicas=1, batches=None):
    """Losses, records and state of the Trainer after STEPS steps."""
    made = build_session(recipe, params, replicas)
    if batches is None:
        fed = made.trainer.batches(made.plan.data)
    else:
        fed = iter(made.strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(batches)))
    records = made.trainer.train(fed, STEPS)
    return records, made.trainer.state.snapshot()


def assert_same_training(pod, expected):
    records, state = expected
    np.testing.assert_allclose(pod.losses, records.loss / records.weight, rtol=1e-5)
    np.testing.assert_allclose(pod.reports["gradient_norm"], records.gradient_norm, rtol=1e-4)
    np.testing.assert_allclose(pod.reports["learning_rate"], records.learning_rate, rtol=1e-6)
    pods.assert_close(pod.state(), state, 1e-5)
    assert records.loss[-1] != records.loss[0]


def language_model(folder, *more):
    own = ("language_model.dropout = 0.0", f"train.steps = {STEPS}")
    return "lm_cpu.gin", [*text_run.corpus_bindings(folder), *own, *more]


def of_images(*more):
    return "resnet_cpu.gin", [*pods.SMALL_CONVOLUTIONS, f"train.steps = {STEPS}", *more]


@pytest.fixture(scope="module")
def convolutions_on_one_replica():
    return trained(*of_images())


@pytest.mark.nightly  # the pod of a language model, below, is trained alike
@pytest.mark.parametrize(("replicas", "microbatches"), [(2, 2), (4, 1), (8, 1)])
def test_convolutions_on_a_pod_train_to_the_weights_of_the_trainer(
    replicas, microbatches, convolutions_on_one_replica, run_launcher, tmp_path
):
    recipe, params = of_images(f"train.microbatches = {microbatches}")
    pod = pods.run(tmp_path, recipe, params, run_launcher, replicas=replicas, steps=STEPS)
    assert len(pod.states) == replicas
    assert_same_training(pod, convolutions_on_one_replica)


# Of a gradient near zero Adam makes a step of the whole rate, and so of its rounding; not so with an epsilon above it.
ADAMW = "adamw.epsilon = 1e-5"


@pytest.fixture(scope="module")
def language_model_on_one_replica(text_folder):
    return trained(*language_model(text_folder, ADAMW))


@pytest.mark.nightly  # the next test has it with another optimizer
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_transformer_on_a_pod_trains_to_the_weights_of_the_trainer(
    replicas, language_model_on_one_replica, text_folder, run_launcher, tmp_path
):
    recipe, params = language_model(text_folder, ADAMW)
    pod = pods.run(tmp_path, recipe, params, run_launcher, replicas=replicas, steps=STEPS)
    assert_same_training(pod, language_model_on_one_replica)


@pytest.mark.nightly  # test_pjrt_engine.py runs such a step at the front door
def test_averages_of_weights_and_factored_moments_move_as_in_the_trainer(text_folder, run_launcher, tmp_path):
    adafactor = ("train.optimizer = @adafactor", "adafactor.learning_rate = 1e-2", "train.ema_decay = 0.9")
    recipe, params = language_model(text_folder, *adafactor)
    pod = pods.run(tmp_path, recipe, params, run_launcher, replicas=2, steps=STEPS)
    expected = trained(recipe, params)
    assert any(name.startswith("ema/") for name in expected[1])
    assert_same_training(pod, expected)


@pytest.mark.nightly  # what is reduced for it, test_compiled_keras_models.py finds in compiled programs
@pytest.mark.parametrize(("over", "replicas"), [("global", 1), ("local", 2)])
def test_batch_norm_on_a_pod_is_over_the_whole_batch_or_that_of_each_replica(over, replicas, run_launcher, tmp_path):
    recipe, params = of_images("two_convolutions.group_size = None", f"train.batch_norm = '{over}'")
    pod = pods.run(tmp_path, recipe, params, run_launcher, replicas=2, steps=STEPS)
    assert_same_training(pod, trained(recipe, params, replicas))


MODULE = """
import gin, keras, numpy as np, tensorflow as tf
from launcher.data.pipeline import ArrayExamples, RandomAccessData
from launcher.models.normalization import BatchNormalization

@gin.configurable
class Vectors:
    def __init__(self, dropout=0.0):
        self.dropout = dropout

    def data(self):
        values = np.random.default_rng(0).normal(size=(256, 16)).astype("float32")
        labels = (values[:, 0] > 0).astype("int32")
        return RandomAccessData(train=ArrayExamples({"x": values, "label": labels}))

    def model(self):
        return keras.Sequential([
            keras.Input((16,)), keras.layers.Dense(32, "gelu"), BatchNormalization(group_size=4),
            keras.layers.Dropout(self.dropout), keras.layers.Dense(2, dtype="float32")])

    def loss(self, model, batch, training):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], model(batch["x"], training=training))
        return tf.reduce_sum(losses * batch["weight"]), tf.reduce_sum(batch["weight"]), {}
"""

RECIPE = f"""
import vectors
train.task = @Vectors()
train.optimizer = @momentum
train.steps = {STEPS}
train.global_batch_size = 32
momentum.learning_rate = 0.05
"""


@pytest.fixture
def vectors(tmp_path, monkeypatch):
    (tmp_path / "vectors.py").write_text(MODULE)
    (tmp_path / "vectors.gin").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "vectors.gin"


@pytest.mark.nightly  # test_pjrt_engine.py has a step that is skipped on all devices
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_an_overflow_at_the_last_replica_alone_is_skipped_by_the_pod_as_by_the_trainer(
    replicas, vectors, run_launcher, tmp_path
):
    params = ["train.precision = 'mixed_float16'"]
    made = build_session(vectors, params)
    taken = itertools.islice(made.trainer.batches(made.plan.data), STEPS)
    batches = tf.nest.map_structure(lambda *steps: np.stack(steps), *taken)
    batches["x"][2, -1] = 1e6  # third step, last example, which the last replica has
    np.savez(tmp_path / "batches.npz", **batches)
    given = tmp_path / "batches.npz"
    pod = pods.run(tmp_path, vectors, params, run_launcher, replicas=replicas, steps=STEPS, batches=given)
    # The tests' own process has four devices; what is trained is the same on any number.
    records, state = trained(vectors, params, min(replicas, 4), batches)
    assert list(records.finite) == [1, 1, 0, 1, 1]
    np.testing.assert_array_equal(pod.reports["finite"], records.finite)
    np.testing.assert_array_equal(pod.reports["loss_scale"], records.loss_scale)
    assert pod.reports["loss_scale"][3] == pod.reports["loss_scale"][2] / 2
    found = pod.state()
    for name in ("counters/step", "counters/skipped", "loss_scale/scale", "loss_scale/hysteresis_left"):
        np.testing.assert_array_equal(found[name], state[name], err_msg=name)
    # Sums in float16 differ by their order.
    pods.assert_close(found, state, 2e-3)


@pytest.mark.nightly  # test_weights_in_parts.py has dropout, too
def test_each_replica_of_a_pod_draws_the_dropout_of_its_part_of_the_batch(vectors, run_launcher, tmp_path):
    def run(name, replicas, microbatches):
        params = ["Vectors.dropout = 0.5", f"train.microbatches = {microbatches}"]
        return pods.run(tmp_path / name, vectors, params, run_launcher, replicas=replicas, steps=STEPS)

    # XLA draws other numbers than TensorFlow's own kernels, so the Trainer cannot be asked here. Parts of a batch draw
    # by where they begin in it.
    two_replicas, two_parts = run("replicas", 2, 1), run("parts", 1, 2)
    np.testing.assert_allclose(two_replicas.losses, two_parts.losses, rtol=1e-5)
    without, _ = trained(vectors, ["Vectors.dropout = 0.0"])
    change = two_replicas.losses * without.weight / without.loss - 1
    assert np.abs(change).max() > 1e-3, "nothing was dropped, so nothing is compared"

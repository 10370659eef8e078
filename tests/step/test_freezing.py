"""What is frozen or trained at another rate, by pattern, against plain gradient descent by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, build

from launcher.errors import UsageError
from launcher.optimizers import Optimizer, lars

pytestmark = pytest.mark.slow

BASE_WEIGHTS = ("c", "bn/gamma", "bn/beta", "bn/moving_mean", "bn/moving_variance")


def task():
    x = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)

    def model():
        inner = keras.Input((3,))
        hidden = keras.layers.Dense(4, name="c")(inner)
        base = keras.Model(inner, keras.layers.BatchNormalization(name="bn")(hidden), name="base")
        outer = keras.Input((3,))
        return keras.Model(outer, keras.layers.Dense(2, name="head")(base(outer)), name="whole")

    def loss(model, batch, training):
        return tf.reduce_sum(tf.square(model(batch["x"], training=training) - 1.0)), tf.constant(4.0), {}

    return GivenTask({"x": x}, model, loss)


def trained(replicas=1, **recipe):
    made = build(task(), replicas, **recipe)
    before = {weight.path: weight.numpy() for weight in made.model.weights}
    made.trainer.train(made.trainer.batches(made.plan.data), 3)
    moved = {weight.path: weight.numpy() - before[weight.path] for weight in made.model.weights}
    return made, moved


@pytest.mark.parametrize("patterns", [("base",), ("base/.*",), ("c", "bn/.*")])
@pytest.mark.parametrize("replicas", repeated_but([2], [1, 2]))
def test_a_frozen_base_moves_neither_weights_nor_statistics(patterns, replicas):
    made, moved = trained(replicas, freeze=patterns)
    assert {path for path, change in moved.items() if np.any(change)} == {"head/kernel", "head/bias"}
    assert not [v for v in made.trainer.optimizer.variables if "c_kernel" in v.path or "bn_gamma" in v.path]


def test_a_normalisation_whose_gains_alone_are_frozen_goes_on_with_its_statistics():
    _, moved = trained(freeze=("bn/gamma", "bn/beta"))
    still = {path for path, change in moved.items() if not np.any(change)}
    assert still == {"bn/gamma", "bn/beta"}


def test_rates_are_multiplied_with_their_decoupled_decay():
    def optimizer():
        return Optimizer(keras.optimizers.SGD(0.1), weight_decay=0.5, decoupled=True, exclude_from_decay=())

    _, plain = trained(optimizer=optimizer)
    _, slow = trained(optimizer=lambda: Optimizer(keras.optimizers.SGD(0.025), weight_decay=0.5, decoupled=True))
    assert np.any(plain["head/kernel"] != slow["head/kernel"])
    made, moved = trained(
        optimizer=lambda: Optimizer(keras.optimizers.SGD(0.1), weight_decay=0.5, decoupled=True),
        rate_multipliers={".*": 0.25},
    )
    for path, change in slow.items():
        np.testing.assert_allclose(moved[path], change, rtol=1e-5, atol=1e-7, err_msg=path)
    assert float(made.trainer.optimizer.learning_rate(tf.constant(0.0))) == pytest.approx(0.1)


def test_one_layers_rate_is_multiplied_under_lars_too():
    """In the first step from velocities of zero, an update is proportional to the rate."""

    def first_step(**recipe):
        made = build(task(), optimizer=lambda: lars(learning_rate=0.1, trust_coefficient=0.5), **recipe)
        before = [weight.numpy() for weight in made.model.trainable_variables]
        made.trainer.train(made.trainer.batches(made.plan.data), 1)
        after = made.model.trainable_variables
        return {w.path: w.numpy() - old for w, old in zip(after, before, strict=True)}

    plain, moved = first_step(), first_step(rate_multipliers={"base/.*": 0.5, "head/kernel": 2.0})
    for path, change in plain.items():
        factor = {"head/kernel": 2.0, "head/bias": 1.0}.get(path, 0.5)
        np.testing.assert_allclose(moved[path], factor * change, rtol=1e-4, atol=1e-7, err_msg=path)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"freeze": "base/.*"}, r"must be a list of regular expressions, \('base/\.\*',\)"),
        ({"freeze": ("heat",)}, "train.freeze: 'heat' matches the whole path of no layer or weight of whole; did you"),
        ({"freeze": (".*",)}, "leaves nothing of whole to train"),
        ({"freeze": ("(",)}, r"'\(' is no regular expression"),
        ({"rate_multipliers": {"head": 0.0}}, "must be finite and above 0; train.freeze is for"),
        ({"rate_multipliers": {"hea.": 0.1, ".ead": 0.3}}, r"'hea\.' and '\.ead' give layer head different values"),
        ({"rate_multipliers": {"base": 0.1}, "freeze": ("base",)}, "'base' gives no trained weight of whole its rate"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(recipe, message):
    with pytest.raises(UsageError, match=message):
        build(task(), **recipe)

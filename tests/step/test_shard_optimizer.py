"""`train.shard = 'optimizer'`: each replica holds its part of the optimizer's state, and trains to the same bits."""

from __future__ import annotations

import dataclasses
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from small_run import GivenTask, build, copies, train

from launcher import optimizers
from launcher.errors import UsageError
from launcher.optimizers.weight_shards import shard_of
from launcher.run import session
from launcher.step import gradients, precision
from launcher.step.diagnosis import Diagnosis

pytestmark = pytest.mark.slow

STEPS, BATCH, FEATURES = 3, 16, 33
KERAS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "Nadam": {},
    "Ftrl": {"l1_regularization_strength": 0.01},
    "Lion": {},
    "ScheduleFreeAdamW": {"weight_decay": 0.1},
}


def batches(bad_step: int | None) -> dict[str, np.ndarray]:
    source = np.random.default_rng(1)
    x = source.normal(size=(STEPS, BATCH, FEATURES)).astype(np.float32)
    if bad_step is not None:
        x[bad_step, 3, 5] = np.inf
    return {"x": x, "y": source.normal(size=(STEPS, BATCH, 4)).astype(np.float32), "weight": np.ones((STEPS, BATCH))}


def network() -> keras.Model:
    """Weights divided along their first dimension, along their second, and by nothing; and small ones."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, "relu", name="second"),
            keras.layers.Dense(35, "relu", name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(35, "relu", name="nothing"),
            keras.layers.Dense(32, "relu", name="constrained", kernel_constraint=keras.constraints.NonNeg()),
            keras.layers.Dense(4, name="small"),
        ]
    )


def short_network() -> keras.Model:
    """One weight divided along its second dimension and one along its first, for what is the optimizer's alone."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, "relu", name="second"),
            keras.layers.Dense(35, "relu", name="first"),
            keras.layers.Dense(4, name="small"),
        ]
    )


def squared_error(model, batch, training):
    weight = tf.cast(batch["weight"], tf.float32)
    outputs = tf.cast(model(batch["x"], training=training), tf.float32)
    errors = tf.reduce_sum(tf.square(outputs - batch["y"]), -1)
    return tf.reduce_sum(errors * weight), tf.reduce_sum(weight), {}


def built(optimizer, *, shard: bool, replicas: int = 2, microbatches: int = 1, bad_step=None, model=network, **recipe):
    task = GivenTask(batches(bad_step), model, squared_error)
    return build(task, replicas, microbatches, optimizer=optimizer, shard="optimizer" if shard else "none", **recipe)


def run(optimizer, **settings):
    made = built(optimizer, **settings)
    return train(made), made


def assert_same_bits(optimizer, **settings):
    (records, made), (expected, whole) = (run(optimizer, shard=shard, **settings) for shard in (True, False))
    assert made.trainer.optimizer.slot_shards, "nothing is shared out, so nothing is compared"
    for field in ("loss", "gradient_norm", "finite", "non_finite", "loss_scale"):
        np.testing.assert_array_equal(getattr(records, field), getattr(expected, field), err_msg=field)
    state, wanted = made.trainer.state.snapshot(), whole.trainer.state.snapshot()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    assert made.trainer.state.specs() == whole.trainer.state.specs()
    for weight in made.model.weights:
        np.testing.assert_array_equal(*copies(weight)[:2], err_msg=weight.path)
    return records


def adamw():
    return optimizers.adamw(learning_rate=0.01, weight_decay=0.1)


@pytest.mark.nightly  # below, AdamW and one of a user's own are shared out
@pytest.mark.parametrize("name", KERAS)
def test_every_element_wise_optimizer_of_keras_trains_to_the_same_bits(name):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    assert_same_bits(lambda: getattr(keras.optimizers, name)(learning_rate=0.01, **KERAS[name]), model=short_network)


@pytest.mark.parametrize(
    ("replicas", "recipe"),
    [
        pytest.param(4, {"clipping": {"global_norm": 0.5}, "model": short_network}, marks=pytest.mark.nightly),
        (2, {
            "precision": "mixed_float16", "loss_scale": precision.DynamicLossScale(initial_scale=1024.0, hysteresis=1),
            "bad_step": 1, "clipping": {"adaptive": 0.01}, "ema_decay": 0.9, "freeze": ("nothing",),
            "rate_multipliers": {"first/.*": 0.5},
        }),
        pytest.param(2, {"jit_compile": True, "microbatches": 2}, marks=pytest.mark.nightly),
        pytest.param(4, {"bad_step": 1, "bucket_bytes": 1, "clipping": {"layer_norm": 0.1}}, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_whatever_else_a_step_does_stays_the_same(replicas, recipe):
    records = assert_same_bits(adamw, replicas=replicas, **recipe)
    bad = recipe.get("bad_step")
    assert records.finite.tolist() == [step != bad for step in range(STEPS)]
    assert (records.loss_scale[-1] < records.loss_scale[0]) == ("loss_scale" in recipe)


def test_a_step_that_selects_skips_an_update_as_one_that_branches_with_parts_and_without(monkeypatch):
    """It selects on a TPU, where both branches of a conditional are computed."""

    def model():
        """Of each kind of state one: a weight in parts, one that is constrained, statistics."""
        return keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(64, "relu", name="second"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(4, name="small", kernel_constraint=keras.constraints.NonNeg()),
            ]
        )

    settings = {"microbatches": 2, "bad_step": 1, "ema_decay": 0.9, "model": model}
    expected, branching = run(adamw, shard=False, **settings)
    assert expected.finite.tolist() == [1, 0, 1]
    step_config = session.step_config
    monkeypatch.setattr(session, "step_config", lambda *args: dataclasses.replace(step_config(*args), selects=True))
    wanted = branching.trainer.state.snapshot()
    for shard in (False, True):
        records, selecting = run(adamw, shard=shard, **settings)
        np.testing.assert_array_equal(records.loss, expected.loss)
        np.testing.assert_array_equal(records.finite, expected.finite)
        applied = expected.finite > 0
        np.testing.assert_allclose(records.gradient_norm[applied], expected.gradient_norm[applied])
        state = selecting.trainer.state.snapshot()
        for name, value in wanted.items():
            np.testing.assert_array_equal(state[name], value, err_msg=name)
    found = Diagnosis(selecting.trainer, selecting.plan.data).non_finite_gradients(step=2)
    assert "second/kernel" in found and "on replica 0" in found
    assert selecting.trainer.step == STEPS


def test_a_snapshot_goes_on_with_any_number_of_parts_of_which_a_replica_holds_its_own():
    _, first = run(adamw, shard=True, ema_decay=0.9)
    state = first.trainer.state.snapshot()
    whole, parted = (built(adamw, shard=shard, replicas=n, ema_decay=0.9) for shard, n in ((False, 2), (True, 4)))
    for one in (whole, parted):
        one.trainer.state.restore(state)
        for name, value in one.trainer.state.snapshot().items():
            np.testing.assert_array_equal(value, state[name], err_msg=name)
    kernels = [slot for slot in parted.trainer.optimizer.variables if slot.name.endswith("kernel_velocity")]
    assert [tuple(slot.shape) for slot in kernels] == [(33, 16), (16, 35), (35, 35), (35, 32), (32, 4)]
    slot, part = parted.trainer.optimizer.slot_shards[0]
    stored = state[f"optimizer/{slot.path}"]
    assert stored.any() and stored.shape == tuple(part.whole.shape)
    np.testing.assert_array_equal(np.concatenate(copies(slot), part.axis), stored)


def test_weights_that_the_loss_does_not_depend_on_are_left_alone():
    def with_unused():
        inputs = keras.Input((FEATURES,))
        unused = keras.layers.Dense(64, name="unused")(inputs)
        used = keras.layers.Dense(64, name="used")(inputs)
        return keras.Model(inputs, [keras.layers.Dense(4, name="end")(used), unused])

    def loss(model, batch, training):
        errors = tf.reduce_sum(tf.square(model(batch["x"], training=training)[0] - batch["y"]), -1)
        return tf.reduce_sum(errors), tf.reduce_sum(tf.cast(batch["weight"], tf.float32)), {}

    made = build(GivenTask(batches(None), with_unused, loss), 2, optimizer=adamw, shard="optimizer")
    before = made.trainer.state.snapshot()
    train(made)
    after = made.trainer.state.snapshot()
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    assert "model/used/kernel" in changed
    assert not [name for name in changed if "unused" in name]


def test_an_optimizer_that_sees_weights_as_a_whole_is_refused():
    with pytest.raises(UsageError, match=re.escape("Muon")) as refusal:
        run(lambda: keras.optimizers.Muon(learning_rate=0.01), shard=True)
    assert "train.shard" in str(refusal.value)
    assert "element_wise = True" in str(refusal.value)


def deep_network() -> keras.Model:
    """Weights divided along an axis before their matrices', along rows and along columns, and small ones."""
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Reshape((3, 11)),
            keras.layers.Conv1D(64, 2, activation="relu", name="leading"),
            keras.layers.Conv1D(35, 1, activation="relu", name="rows"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, "relu", name="first"),
            keras.layers.Dense(35, "relu", name="rows_too"),
            keras.layers.Dense(32, "relu", name="columns"),
            keras.layers.Dense(4, name="small"),
        ]
    )


@pytest.mark.parametrize("name", repeated_but(["adafactor"], ["lamb", "lars", "adafactor", "nadam", "muon"]))
def test_norms_and_means_of_whole_weights_are_taken_of_their_parts(name):
    def optimizer():
        return getattr(optimizers, name)(learning_rate=0.01, weight_decay=0.1)

    settings = {"bad_step": 1, "clipping": {"layer_norm": 0.5}, "model": deep_network}
    (records, made), (expected, whole) = (run(optimizer, shard=shard, **settings) for shard in (True, False))
    assert records.finite.tolist() == [1, 0, 1]
    np.testing.assert_allclose(records.loss, expected.loss, rtol=1e-6)
    assert {shard.axis for shard in made.trainer.optimizer.shards if shard} == {0, 1}
    assert made.trainer.state.specs() == whole.trainer.state.specs()
    state = made.trainer.state.snapshot()
    for key, value in whole.trainer.state.snapshot().items():
        np.testing.assert_allclose(state[key], value, rtol=1e-5, atol=1e-7, err_msg=key)


class Descent(keras.optimizers.Optimizer):
    """An optimizer of a user's own."""

    element_wise = True

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.sums = [self.add_variable_from_reference(variable, "sum") for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        total = self.sums[self._get_variable_index(variable)]
        self.assign_add(total, gradient)
        self.assign_sub(variable, learning_rate * total)


def test_an_optimizer_of_ones_own_may_say_that_it_is_element_wise():
    assert_same_bits(lambda: Descent(learning_rate=0.01), model=short_network)


def test_parts_that_travel_together_come_out_as_those_that_travel_alone():
    shapes, axes = [(6, 4), (5, 8), (2, 3, 4)], [0, 1, 2]
    source = np.random.default_rng(0)
    whole = [source.normal(size=shape).astype(np.float32) for shape in shapes]
    parts = [[np.split(one, 2, axis)[replica] for one, axis in zip(whole, axes, strict=True)] for replica in (0, 1)]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def replica(bucket_bytes):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        mine = [tf.where(number == 0, *pair) for pair in zip(*parts, strict=True)]
        return gradients.gather(mine, axes, bucket_bytes=bucket_bytes)

    for bucket_bytes in (1, 2**20):
        found = tf.function(lambda size=bucket_bytes: strategy.run(replica, args=(size,)), autograph=False)()
        for one, value in zip(found, whole, strict=True):
            for copy in strategy.experimental_local_results(one):
                np.testing.assert_array_equal(copy, value)


def test_small_weights_and_one_replica_have_no_parts():
    kernel, small = (keras.Variable(np.zeros(shape, np.float32)) for shape in ((64, 64), (8, 8)))
    assert shard_of(kernel, 1) is None
    assert shard_of(small, 2) is None
    assert math.prod(shard_of(kernel, 4).shape) == 64 * 64 / 4

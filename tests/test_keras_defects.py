"""What Keras 3's own machinery does under tf.distribute (K1 to K9 of benchmarks/notes; of K2 its cause), and ours.

Every half about Keras asserts the failure: when a later Keras is right, the test says so by the row's name. Keras runs
on the same reduction as ours here (`ReductionToOneDevice`): its defects do not depend on it.
"""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from graph_walk import collectives
from keras_worker import rows
from places import PYTHONPATH
from small_run import (
    GivenTask,
    assert_replicas_equal,
    build,
    copies,
    descent,
    dropout_masks,
    dropout_task,
    linear_batches,
    linear_model,
    negative_sum,
    train,
)

from launcher.step.precision import DynamicLossScale, FixedLossScale

pytestmark = pytest.mark.slow


@pytest.fixture
def beside(record_property):
    """beside(row, keras=..., ours=...): what each came to, for the table that closes the run (see conftest.py)."""
    return lambda row, *, keras, ours: record_property("beside Keras", [row, str(keras), str(ours)])


def still_broken(row: str, failure: bool, seen: object) -> None:
    """Asserts that Keras still fails as the row says."""
    assert failure, (
        f"{row} no longer shows in Keras {keras.__version__}, TensorFlow {tf.__version__} (seen: {seen}). If it has "
        "been fixed, say so in benchmarks/notes and drop Keras's half of this test; ours must pass all the same."
    )


def mirrored(replicas: int = 2) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(
        [f"CPU:{index}" for index in range(replicas)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


def keras_fit(x, optimizer, *, model=linear_model, policy="float32") -> keras.Model:
    """`Model.fit` for an epoch of batches x [step, example, feature], one example a replica; loss as `negative_sum`."""
    steps, examples, features = x.shape
    keras.config.set_dtype_policy(policy)
    with mirrored(examples).scope():
        made = model(features)
        made.compile(optimizer=optimizer(), loss=lambda y_true, y_pred: -y_pred)
    targets = np.zeros((steps * examples, 1), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x.reshape(-1, features), targets)).batch(examples, drop_remainder=True)
    made.fit(data, shuffle=False, verbose=0)
    return made


def ours_fit(x, model=linear_model, microbatches=1, **recipe):
    """The same by ours: returns the records and the session."""
    x = np.asarray(x, np.float32)
    task = GivenTask(linear_batches(x), lambda: model(x.shape[2]), negative_sum)
    made = build(task, x.shape[1] // microbatches, microbatches, **recipe)
    records = train(made)
    assert_replicas_equal(made)
    return records, made


# ---------------------------------------------------------------------------- K1: finite on replica 0, so it is applied


@pytest.mark.nightly  # of ours, test_train_step_properties.py
@pytest.mark.parametrize("bad", [(0,), (1,), (3,), (0, 1, 2, 3)])
def test_k1_an_overflow_on_any_replica_but_the_first_poisons_keras_and_not_ours(bad, beside):
    x = rows([[], list(bad), []], 4)
    model = keras_fit(x, lambda: keras.optimizers.SGD(1.0), policy="mixed_float16")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    weights = copies(model.weights[0])
    if 0 in bad:
        np.testing.assert_allclose(weights, np.full((4, 1, 1), 2.0))  # Keras looks at replica 0, and is right
    else:
        still_broken("K1", not np.isfinite(weights).any(), weights)

    records, made = ours_fit(x, precision="mixed_float16")
    assert records.finite.tolist() == [1, 0, 1]
    assert records.loss_scale.tolist() == [2.0**15, 2.0**15, 2.0**14]
    np.testing.assert_array_equal(copies(made.model.weights[0]), np.full((4, 1, 1), 2.0))
    beside(
        f"K1: of 4 replicas, {bad} overflow in step 2 of 3; weights after",
        keras=np.ravel(weights),
        ours=f"{np.ravel(copies(made.model.weights[0]))}, step 2 skipped",
    )


# ----------------------------------------------------------- K2, K3: several workers (of K2 the cause is shown by K9)


def start_workers(start_launcher, free_ports, *args):
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def start(rank):
        config = json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": rank}})
        env = {"TF_CONFIG": config, "PYTHONPATH": PYTHONPATH}
        return start_launcher(*args, module="keras_worker", env=env)

    return [start(rank) for rank in range(2)]


def events(prefix: Path, rank: int) -> list[dict]:
    path = Path(f"{prefix}.{rank}")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@pytest.mark.nightly
@pytest.mark.heavy
def test_k3_workers_of_keras_cannot_fit(start_launcher, free_ports, tmp_path, beside):
    for worker in start_workers(start_launcher, free_ports, "keras", str(tmp_path / "keras")):
        finished = worker.wait(120)
        assert finished.returncode == 0, finished.stderr
        assert not psutil.pid_exists(worker.process.pid)
    for rank in (0, 1):
        said = [event["said"] for event in events(tmp_path / "keras", rank)]
        still_broken("K3", all("convert a value (PerReplica" in one for one in said) and len(said) == 2, said)
    beside("K3: Model.fit on 2 workers", keras=said[0].splitlines()[0][:100], ours="trains (next test)")


@pytest.mark.heavy
def test_k2_k3_workers_of_ours_skip_together_whoever_overflows(start_launcher, free_ports, tmp_path):
    pattern = [[], [0], [], [1], [], [0, 1], []]
    workers = start_workers(start_launcher, free_ports, "ours", str(tmp_path / "ours"), json.dumps(pattern))
    for worker in workers:
        finished = worker.wait(120)
        assert finished.returncode == 0, finished.stderr
        assert not psutil.pid_exists(worker.process.pid)
    weight, scale, expected = 0.0, 1024.0, []
    for step, bad in enumerate(pattern):
        weight, scale = (weight, scale / 2) if bad else (weight + 1.0, scale)
        expected.append({"event": "left", "step": step, "weight": weight, "scale": scale, "finite": not bad})
    for rank in (0, 1):
        assert [event for event in events(tmp_path / "ours", rank) if event["event"] == "left"] == expected

    records, made = ours_fit(rows(pattern), loss_scale=DynamicLossScale(initial_scale=1024.0))
    assert records.finite.tolist() == [event["finite"] for event in expected]
    assert made.model.weights[0].numpy() == weight


# ----------------------------------------------------------------------- K4: clipping each replica's share, then adding


CLIPPING = {
    "clipnorm": ({"clipping": {"layer_norm": 1.0}}, np.array([0.5, 4.0]) / np.hypot(0.5, 4.0)),
    "global_clipnorm": ({"clipping": {"global_norm": 1.0}}, np.array([0.5, 4.0]) / np.hypot(0.5, 4.0)),
    "clipvalue": ({"clipping": {"value": 1.0}}, np.array([0.5, 1.0])),
}


@pytest.mark.nightly  # of ours, test_clipping.py
@pytest.mark.parametrize("setting", CLIPPING)
def test_k4_keras_clips_the_shares_of_replicas_and_ours_the_mean(setting, beside):
    x = np.array([[[6.0, 0.0], [-5.0, 8.0]]], np.float32)  # the mean is (0.5, 4)
    ours, expected = CLIPPING[setting]
    model = keras_fit(x, lambda: keras.optimizers.SGD(1.0, **{setting: 1.0}))
    found = model.weights[0].numpy()[:, 0]
    still_broken(f"K4 ({setting})", not np.allclose(found, expected, atol=1e-2), found)
    if setting != "clipvalue":
        shares = x[0] / 2
        shares /= np.maximum(1, np.linalg.norm(shares, axis=1, keepdims=True))
        np.testing.assert_allclose(found, shares.sum(0), rtol=1e-5)

    _, made = ours_fit(x, **ours)
    np.testing.assert_allclose(made.model.weights[0].numpy()[:, 0], expected, rtol=1e-5)
    beside(
        f"K4: {setting} = 1 on the mean (0.5, 4); the update should be {np.round(expected, 3)}",
        keras=np.round(found, 3),
        ours=np.round(made.model.weights[0].numpy()[:, 0], 3),
    )


# ---------------------------------------------------------------------------------------- K5: accumulation of gradients


@pytest.mark.nightly
def test_k5_keras_cannot_accumulate_gradients_on_replicas_and_ours_can(beside):
    x = np.array([[[6.0, 0.0], [-5.0, 8.0]]] * 2, np.float32)
    said = "trained"
    try:
        keras_fit(x, lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    except RuntimeError as error:
        said = str(error)
    still_broken("K5", "merge_call" in said, said)

    _, made = ours_fit(x.reshape(1, 4, 2), microbatches=2)
    np.testing.assert_allclose(made.model.weights[0].numpy()[:, 0], [0.5, 4.0])
    beside(
        "K5: 2 microbatches on 2 replicas, mean gradient (0.5, 4)",
        keras=said[said.index("`merge_call`") :][:58],
        ours=made.model.weights[0].numpy()[:, 0],
    )


# ------------------------------------------------------------------------------------ K6: a scale without floor or roof


def keras_scale_steps(optimizer, variable):
    """A function that takes `count` steps with a gradient of `value` before scaling on two replicas."""
    strategy = tf.distribute.get_strategy()

    @tf.function
    def steps(count, value):
        def replica():
            scaled = optimizer.scale_loss(tf.constant(1.0)) * value
            optimizer.apply_gradients([(tf.reshape(scaled, [1]), variable)])

        for _ in tf.range(count):
            strategy.run(replica)

    return lambda count, value: steps(tf.constant(count), tf.constant(value, tf.float32))


@pytest.mark.nightly  # of ours, test_precision.py
def test_k6_the_scale_of_keras_reaches_infinity_and_nought_and_ours_its_bounds(beside):
    def fresh():
        variable = keras.Variable([1.0], name="weight")
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic_growth_steps=1)
        optimizer.build([variable])
        return optimizer, variable, keras_scale_steps(optimizer, variable)

    with mirrored().scope():
        optimizer, variable, steps = fresh()
        steps(113, 0.0)
        found = optimizer.dynamic_scale.numpy()
        steps(5, 0.0)
        highest = found
        still_broken("K6 (ceiling)", np.isinf(found) and np.isinf(optimizer.dynamic_scale.numpy()), found)
        optimizer, variable, steps = fresh()
        steps(142, np.inf)
        found = optimizer.dynamic_scale.numpy()
        assert copies(variable) == [1.0, 1.0]
        steps(1, 0.0)
        still_broken("K6 (floor)", found == 0 and np.isnan(variable.numpy()).all(), (found, variable.numpy()))

    scale = DynamicLossScale(growth_interval=1)
    records, _ = ours_fit(np.ones((113, 2, 1)), loss_scale=scale)
    assert records.finite.all() and records.loss_scale.max() == records.loss_scale[-1] == scale.max_scale
    beside("K6: the scale after 113 finite steps that double it", keras=highest, ours=records.loss_scale[-1])
    bad = np.full((143, 2, 1), np.inf)
    bad[-1] = 1.0
    records, made = ours_fit(bad, loss_scale=scale)
    assert records.loss_scale.min() == records.loss_scale[-1] == scale.min_scale
    assert records.finite.tolist() == [0.0] * 142 + [1.0]
    assert made.model.weights[0].numpy() == 1.0
    beside(
        "K6: 142 steps that halve the scale, then a finite one: scale, weight",
        keras=f"{found}, {variable.numpy()[0]}",
        ours=f"{records.loss_scale[-1]}, {made.model.weights[0].numpy().item()}",
    )


# ---------------------------------------------------------------------------- K7: every replica's own moving statistics


def normalised(features: int) -> keras.Model:
    norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
    return keras.Sequential([keras.Input((features,)), norm, keras.layers.Dense(1, name="line")])


@pytest.mark.nightly  # of ours, test_moving_statistics.py
def test_k7_moving_statistics_drift_apart_under_keras_and_are_averaged_by_ours(beside):
    x = np.array([[[0.0], [8.0]]] * 3, np.float32)
    moving = keras_fit(x, lambda: keras.optimizers.SGD(0.0), model=normalised).layers[0].moving_mean
    first, second = copies(moving)
    still_broken("K7", (first != second).all() and moving.numpy() == first, (first, second))

    _, made = ours_fit(x, model=normalised)
    expected = 4.0 * (1 - 0.5**3)
    np.testing.assert_array_equal(copies(made.model.layers[0].moving_mean), [[expected], [expected]])
    (saved,) = (value for name, value in made.trainer.state.snapshot().items() if name.endswith("norm/moving_mean"))
    assert saved == [expected]
    beside(
        "K7: moving mean on 2 replicas of inputs 0 and 8, exact 3.5; saved",
        keras=f"{first[0]}, {second[0]}; {moving.numpy()[0]}",
        ours=f"{', '.join(str(copy[0]) for copy in copies(made.model.layers[0].moving_mean))}; {saved[0]}",
    )


# ----------------------------------------------------------------------------------- K8: the same masks on all replicas


@pytest.mark.nightly
@pytest.mark.parametrize("layer", [keras.layers.Dropout, keras.layers.GaussianNoise, keras.layers.SpatialDropout1D])
def test_k8_random_layers_of_keras_draw_the_same_on_every_replica(layer, beside):
    strategy = mirrored()
    with strategy.scope():
        made = layer(0.5)
    ones = tf.ones([1, 1, 64])
    drawn = tf.function(lambda: strategy.run(lambda: made(ones, training=True)))
    for _ in range(2):
        first, second = (copy.numpy() for copy in strategy.experimental_local_results(drawn()))
        assert not np.array_equal(first, ones)
        still_broken(f"K8 ({layer.__name__})", np.array_equal(first, second), (first, second))
    beside(f"K8: {layer.__name__} on 2 replicas", keras="one mask", ours="a mask each (next test)")


def test_k8_dropout_of_ours_differs_between_replicas_and_steps():
    masks = dropout_masks(build(dropout_task(2, 2, 64), 2), 2).reshape(-1, 64)
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert len(np.unique(masks, axis=0)) == len(masks) == 2 * 2 * 2


# ------------------------------------------------------ K9: 32 bits on the wire, inside a conditional; ours 16, outside


@pytest.mark.nightly  # of ours, test_collectives.py
def test_k9_keras_reduces_float32_inside_a_conditional_and_ours_float16_outside(beside):
    x = np.ones((1, 2, 5), np.float32)
    keras.config.set_dtype_policy("mixed_float16")
    strategy = mirrored()
    with strategy.scope():
        model = linear_model(5)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(model.trainable_variables)

    @tf.function
    def step():
        def replica():
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(tf.reduce_sum(tf.cast(model(x[0]), tf.float32)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        strategy.run(replica)

    found = collectives(step.get_concrete_function())
    assert len(found) == 1
    still_broken("K9", (found[0].dtype, found[0].elements) == ("float32", 5), found)
    still_broken("K2 (its cause)", found[0].in_conditional, found)

    _, made = ours_fit(x, precision="mixed_float16", loss_scale=FixedLossScale(scale=8.0), optimizer=descent)
    batches = made.trainer.batches(GivenTask(linear_batches(x), linear_model, negative_sum).data())
    theirs = found
    found = collectives(made.trainer._loop.run.get_concrete_function(batches, tf.constant(1, tf.int32)))
    assert sorted((one.dtype, one.elements) for one in found) == [("float16", 5), ("float32", 2)]
    assert not any(one.in_conditional for one in found)
    beside(
        "K9: mixed_float16, one gradient of 5: the reductions of a step",
        keras=[f"{one.dtype}[{one.elements}]{' in a conditional' * one.in_conditional}" for one in theirs],
        ours=[f"{one.dtype}[{one.elements}]" for one in found],
    )

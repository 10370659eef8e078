"""Properties of the step over batch sizes around the replica count, weights, and overflows in (replica, step, layer).

A run is cheap once its graph is traced, so each topology is built once and fed other batches from its first state.
"""

from __future__ import annotations

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from small_run import GivenBatches, GivenTask, assert_replicas_equal, build

from launcher import optimizers
from launcher.errors import UsageError
from launcher.step.diagnosis import Diagnosis
from launcher.step.precision import DynamicLossScale

pytestmark = pytest.mark.slow

STEPS = 10
LAYERS = ("first", "second")
FEATURES = {"first": 3, "second": 2}
RATE, DECAY, EPSILON = 0.125, 0.5, 0.01
SCALE = DynamicLossScale(initial_scale=64.0, growth_interval=2, hysteresis=2, min_scale=16.0, max_scale=128.0)
# Replicas, microbatches, examples: one example a part, and two; whole numbers of neither two nor four.
TOPOLOGIES = repeated_but([[2, 2, 8]], [[1, 1, 1], [1, 3, 3], [2, 1, 2], [2, 2, 8], [3, 1, 3], [4, 1, 4]])

quickly = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


# ------------------------------------------------------------------------------------------------------ what is trained


def two_layers() -> keras.Model:
    """Two linear layers side by side, so that either can overflow alone, and a normalisation that is only moved."""
    inputs = {name: keras.Input((size,), name=name) for name, size in FEATURES.items()}
    lines = [
        keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=f"{name}_line")(value)
        for name, value in inputs.items()
    ]
    norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
    return keras.Model(inputs, [*lines, norm(inputs["first"])])


def sums(model, batch, training):
    first, second, _ = model({name: batch[name] for name in LAYERS}, training=training)
    outputs = tf.cast(first + second, tf.float32)[:, 0]
    total = tf.reduce_sum(batch["weight"])
    return -tf.reduce_sum(outputs * batch["weight"]), total, {"seen": total}


def optimizer() -> optimizers.Optimizer:
    """AdamW: every part of it (moments, decay, the count of updates) shows whether a step was taken."""
    return optimizers.adamw(learning_rate=RATE, weight_decay=DECAY, epsilon=EPSILON)


def empty(steps: int, batch: int) -> dict[str, np.ndarray]:
    arrays = {name: np.zeros((steps, batch, size), np.float32) for name, size in FEATURES.items()}
    return {**arrays, "weight": np.ones((steps, batch), np.float32)}


@functools.cache
def session(replicas: int, microbatches: int, batch: int, reduce_dtype: str = "float32"):
    task = GivenTask(empty(1, batch), two_layers, sums)
    settings = {"optimizer": optimizer, "loss_scale": SCALE, "reduce_dtype": reduce_dtype, "ema_decay": 0.5}
    made = build(task, replicas, microbatches, **settings)
    return made, made.trainer.state.snapshot()


def run(arrays, topology, **options):
    """Trains from the first state on these batches; returns the records and the state after the last step."""
    made, start = session(*topology, **options)
    made.trainer.state.restore(start)
    data = GivenBatches(arrays)
    records = made.trainer.train(made.trainer.batches(data), data.steps)
    assert_replicas_equal(made)
    return records, made.trainer.state.snapshot()


def filled(batch: int, seed: int) -> dict[str, np.ndarray]:
    """Batches of small whole numbers: their sums are exact in float32, in any order."""
    source = np.random.default_rng(seed)
    arrays = {name: source.integers(-8, 9, (STEPS, batch, size)).astype(np.float32) for name, size in FEATURES.items()}
    return {**arrays, "weight": np.ones((STEPS, batch), np.float32)}


# ----------------------------------------------------------------------------------------------------------- the oracle


@dataclasses.dataclass
class Rule:
    """The dynamic loss scale in plain Python, after Megatron-LM's DynamicGradScaler, with a ceiling."""

    scale: float = SCALE.initial_scale
    good: int = 0
    left: int = SCALE.hysteresis

    def step(self, finite: bool) -> None:
        if finite:
            self.good += 1
            if self.good == SCALE.growth_interval:
                self.good, self.left = 0, SCALE.hysteresis
                self.scale = min(self.scale * SCALE.growth_factor, SCALE.max_scale)
            return
        self.good = 0
        self.left -= 1
        if self.left <= 0:
            self.scale = max(self.scale * SCALE.backoff_factor, SCALE.min_scale)


def adamw(gradients: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The kernels after these mean gradients, in float64."""
    weights = {name: np.zeros(size) for name, size in FEATURES.items()}
    first = {name: np.zeros(size) for name, size in FEATURES.items()}
    second = {name: np.zeros(size) for name, size in FEATURES.items()}
    for count, gradient in enumerate(gradients, start=1):
        for name in LAYERS:
            first[name] = 0.9 * first[name] + 0.1 * gradient[name]
            second[name] = 0.999 * second[name] + 0.001 * gradient[name] ** 2
            correction = np.sqrt(1 - 0.999**count) / (1 - 0.9**count)
            decayed = weights[name] * (1 - RATE * DECAY)
            weights[name] = decayed - RATE * correction * first[name] / (np.sqrt(second[name]) + EPSILON)
    return weights


def mean_gradient(arrays, step: int) -> dict[str, np.ndarray]:
    weight = arrays["weight"][step].astype(np.float64)
    return {name: -(arrays[name][step] * weight[:, np.newaxis]).sum(0) / max(weight.sum(), 1e-30) for name in LAYERS}


def kernels(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: state[f"model/{name}_line/kernel"][:, 0] for name in LAYERS}


# ------------------------------------------------------------------------------------------------------- the properties


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(data=st.data())
@quickly
def test_any_weights_give_the_mean_over_the_weight_that_is_there(topology, data):
    batch = topology[-1]
    arrays = filled(batch, data.draw(st.integers(0, 99), "seed"))
    one = st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.0, 3.0])
    weight = data.draw(st.lists(st.lists(one, min_size=batch, max_size=batch), min_size=STEPS, max_size=STEPS))
    arrays["weight"] = np.array(weight, np.float32)
    records, state = run(arrays, topology)
    np.testing.assert_array_equal(records.weight, arrays["weight"].sum(1))
    np.testing.assert_array_equal(records.metrics["seen"], arrays["weight"].sum(1))
    gradients = [mean_gradient(arrays, step) for step in range(STEPS)]
    norms = [np.sqrt(sum((value**2).sum() for value in gradient.values())) for gradient in gradients]
    np.testing.assert_allclose(records.gradient_norm, norms, rtol=1e-5, atol=1e-30)
    # A batch without weight is as if it had not been there, for the weights and for the loss scale.
    taken = [step for step in range(STEPS) if arrays["weight"][step].any()]
    rule = Rule()
    for _ in taken:
        rule.step(True)
    assert np.flatnonzero(records.finite).tolist() == taken
    assert state["loss_scale/scale"] == rule.scale
    assert state["loss_scale/finite_steps"] == rule.good
    for name, expected in adamw([gradients[step] for step in taken]).items():
        np.testing.assert_allclose(kernels(state)[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


OVERFLOWS = st.lists(
    st.tuples(
        st.integers(0, STEPS - 1),
        st.integers(0, 7),
        st.sampled_from(LAYERS),
        st.sampled_from([np.inf, -np.inf, np.nan]),
    ),
    max_size=STEPS,
)


def poisoned(arrays, overflows):
    arrays = {name: array.copy() for name, array in arrays.items()}
    for step, where, layer, value in overflows:
        arrays[layer][step, where % arrays["weight"].shape[1], -1] = value
    return arrays


@pytest.mark.parametrize("topology", TOPOLOGIES)
@given(overflows=OVERFLOWS, seed=st.integers(0, 99))
@example(overflows=[(step, 0, "first", np.inf) for step in range(STEPS)], seed=0)
@example(overflows=[(1, 0, "first", np.inf), (1, 7, "second", -np.inf), (4, 7, "second", np.nan)], seed=0)
@quickly
def test_overflows_anywhere_move_the_scale_by_the_rule_and_leave_no_other_trace(topology, overflows, seed):
    arrays = filled(topology[-1], seed)
    bad = {step for step, *_ in overflows}
    records, state = run(poisoned(arrays, overflows), topology)

    rule, scales = Rule(), []
    for step in range(STEPS):
        scales.append(rule.scale)
        rule.step(step not in bad)
    assert [step for step in range(STEPS) if not records.finite[step]] == sorted(bad)
    assert records.loss_scale.tolist() == scales
    assert state["loss_scale/scale"] == rule.scale
    assert state["counters/step"] == STEPS
    assert state["counters/skipped"] == len(bad)

    # All numbers of the scale are powers of two, so the good steps alone give the same bits.
    good = [step for step in range(STEPS) if step not in bad]
    if not good:
        expected = session(*topology)[1]
    else:
        _, expected = run({name: array[good] for name, array in arrays.items()}, topology)
    for name, value in state.items():
        if not name.startswith(("counters/", "loss_scale/")):  # moments, averages and the count of updates are in
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize(
    ("example", "layer"),
    repeated_but([(3, "second")], [(example, layer) for example in (0, 3) for layer in LAYERS]),
)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_skipped_step_names_the_layer_and_the_replica_and_nothing_moves(topology, example, layer):
    replicas, _, batch = topology
    arrays = poisoned(filled(batch, 0), [(2, example, layer, np.inf)])
    made, start = session(*topology)
    made.trainer.state.restore(start)
    data = GivenBatches(arrays)
    assert made.trainer.train(made.trainer.batches(data), 3).finite.tolist() == [1, 1, 0]
    before = made.trainer.state.snapshot()
    replica = example % batch // (batch // replicas)
    assert Diagnosis(made.trainer, data).non_finite_gradients() == f"{layer}_line/kernel, on replica {replica}"
    for name, value in made.trainer.state.snapshot().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    assert_replicas_equal(made)


def overflows_on_the_wire(parts: list[float], scale: float, nominal: float) -> bool:
    """Whether a replica's gradient or their sum is too large for float16; from 65520 on, it rounds to infinity."""
    sent = [part * scale / nominal for part in parts]
    return max(*sent, sum(sent)) >= 65520


@pytest.mark.parametrize("topology", repeated_but([[4, 1, 4]], [[1, 1, 1], [2, 1, 2], [4, 1, 4], [2, 2, 4]]))
@given(data=st.data())
@quickly
def test_a_scale_too_large_for_the_float16_wire_falls_until_the_sum_fits(topology, data):
    """Gradients are powers of two: their float16 sums are exact, or far beyond the largest number of float16."""
    replicas, _, batch = topology
    exponents = data.draw(
        st.lists(st.lists(st.integers(8, 15), min_size=batch, max_size=batch), min_size=STEPS, max_size=STEPS)
    )
    arrays = empty(STEPS, batch)
    arrays["second"][..., 0] = 2.0 ** np.array(exponents)
    records, state = run(arrays, topology, reduce_dtype="float16")
    rule, taken = Rule(), []
    for step in range(STEPS):
        assert records.loss_scale[step] == rule.scale
        parts = arrays["second"][step, :, 0].reshape(replicas, -1).sum(1)
        overflow = overflows_on_the_wire(parts.tolist(), rule.scale, batch)
        assert bool(records.finite[step]) == (not overflow), (step, rule.scale, parts)
        rule.step(not overflow)
        if not overflow:
            taken.append(mean_gradient(arrays, step))
    for name, expected in adamw(taken).items():
        np.testing.assert_allclose(kernels(state)[name], expected, rtol=1e-3, atol=1e-5, err_msg=name)


@given(replicas=st.sampled_from([2, 3, 4]), microbatches=st.integers(1, 3), batch=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_a_batch_is_split_evenly_or_refused_with_the_sizes_that_can_be(replicas, microbatches, batch):
    task = GivenTask(empty(1, batch), two_layers, sums)
    parts = replicas * microbatches
    if batch % parts == 0:
        return  # trained above
    below, above = batch // parts * parts, -(-batch // parts) * parts
    with pytest.raises(UsageError) as caught:
        build(task, replicas, microbatches)
    assert f"train.global_batch_size = {batch} " in str(caught.value)
    assert f"such as {below} or {above}" in str(caught.value) or (not below and str(above) in str(caught.value))

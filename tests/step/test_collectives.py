"""One collective a bucket, none in a conditional: a walk through the traced graph under every strategy."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from cases import repeated_but
from collectives_run import BETWEEN_DEVICES, METRICS, SETTINGS, in_evaluation, in_training, planned, session
from graph_walk import Collective, collectives
from places import PYTHONPATH

from launcher.models.normalization import BatchNormalization

pytestmark = pytest.mark.slow

# ----------------------------------------------------------------------------------------------------------- the walker


def reduced(value):
    return tf.raw_ops.CollectiveReduceV2(
        input=value, group_size=2, group_key=1, instance_key=1, ordering_token=[], merge_op="Add", final_op="Id"
    )


def added_on_one_device(value):
    parts = []
    for device in ("CPU:0", "CPU:1"):
        with tf.device(device):
            parts.append(value + 1.0)
    with tf.device("CPU:0"):
        return tf.add_n(parts)


def traced(function) -> list[Collective]:
    signature = [tf.TensorSpec([4], tf.float32), tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.int32)]
    return collectives(tf.function(function, autograph=False).get_concrete_function(*signature))


def in_while(reduce, x, count):
    return tf.while_loop(lambda i, x: i < count, lambda i, x: (i + 1, reduce(x)), (tf.constant(0), x))[1]


FORMS = {
    "straight": (lambda reduce, x, flag, count: reduce(x), False, 0),
    "loop": (lambda reduce, x, flag, count: in_while(reduce, x, count), False, 1),
    "then": (lambda reduce, x, flag, count: tf.cond(flag, lambda: reduce(x), lambda: x), True, 0),
    "else": (lambda reduce, x, flag, count: tf.cond(flag, lambda: x, lambda: reduce(x)), True, 0),
    "case": (
        lambda reduce, x, flag, count: tf.switch_case(count, [lambda: x, lambda: reduce(x), lambda: x + 1.0]),
        True,
        0,
    ),
    "loop in a branch": (
        lambda reduce, x, flag, count: tf.cond(flag, lambda: in_while(reduce, x, count), lambda: x),
        True,
        1,
    ),
    "branch in a loop": (
        lambda reduce, x, flag, count: in_while(lambda x: tf.cond(flag, lambda: reduce(x), lambda: x), x, count),
        True,
        1,
    ),
    "function in a branch in a function": (
        lambda reduce, x, flag, count: tf.function(lambda x: tf.cond(flag, lambda: tf.function(reduce)(x), lambda: x))(
            x
        ),
        True,
        0,
    ),
}


@pytest.mark.parametrize("reduce", [reduced, added_on_one_device])
@pytest.mark.parametrize("form", FORMS)
def test_the_walk_finds_a_collective_wherever_it_stands(form, reduce):
    function, in_conditional, loops = FORMS[form]
    (found,) = traced(lambda x, flag, count: function(reduce, x, flag, count))
    assert found.op == {reduced: "CollectiveReduceV2", added_on_one_device: "AddN"}[reduce]
    assert (found.dtype, found.elements) == ("float32", 4)
    assert (found.in_conditional, found.loops) == (in_conditional, loops), found.path


def test_the_walk_counts_calls_and_not_functions():
    called = tf.function(reduced)
    assert len(traced(lambda x, flag, count: called(called(x)))) == 2


def test_a_sum_on_one_device_is_no_collective():
    assert traced(lambda x, flag, count: tf.add_n([x, x + 1.0, tf.cond(flag, lambda: x, lambda: -x)])) == []


def test_control_flow_of_tensorflow_1_is_not_passed_over():
    with pytest.raises(AssertionError, match="Switch"):
        traced(lambda x, flag, count: tf.raw_ops.Switch(data=x, pred=flag).output_true)


# ------------------------------------------------------------------------------------------------------------ the steps


def assert_as_planned(found: list[Collective], expected: Counter, devices: int, loops: int = 1) -> None:
    """Every device takes part in the planned collectives, straight in the loop over the steps."""
    assert len({collective.device for collective in found}) == devices
    for device in {collective.device for collective in found}:
        assert Counter((one.dtype, one.elements) for one in found if one.device == device) == expected
    for collective in found:
        assert not collective.in_conditional, collective.path
        assert collective.loops == loops, collective.path


@pytest.mark.parametrize(
    "setting", repeated_but(["microbatches"], ["as it is", "float16 in small buckets", "microbatches"])
)
def test_one_device_sends_nothing(setting):
    assert in_training(session(1, **SETTINGS[setting])) == []


@functools.cache
def mirrored(setting):
    return session(2, **SETTINGS[setting])


@pytest.mark.parametrize(
    "setting", repeated_but(["as it is", "float16 in small buckets", "microbatches", "all that is gated"], SETTINGS)
)
def test_mirrored_replicas_add_up_each_bucket_once_on_one_device(setting):
    made = mirrored(setting)
    found = in_training(made)
    assert {collective.op for collective in found} == {"AddN"}
    assert_as_planned(found, planned(made), devices=1)


@pytest.mark.parametrize("setting", repeated_but(["bfloat16 wire", "compiled"], SETTINGS))
def test_mirrored_replicas_join_one_ring_a_bucket_as_on_gpus(setting):
    ring = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])  # TensorFlow's own choice of reduction
    made = session(2, on=ring, **SETTINGS[setting])
    found = in_training(made)
    assert all(collective.op.startswith("CollectiveReduce") for collective in found)
    assert_as_planned(found, planned(made), devices=2)


FEW = ("float16 in small buckets", "all that is gated")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings", [FEW, pytest.param(BETWEEN_DEVICES, marks=pytest.mark.nightly)], ids=["few", "all"]
)
def test_workers_join_one_ring_a_bucket(run_workers, tmp_path, settings):
    given = {"module": "collectives_run", "env": {"PYTHONPATH": PYTHONPATH}, "timeout": 180}
    workers = run_workers(2, f"{tmp_path}/answer", *settings, **given)
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    answers = [json.loads(Path(tmp_path, f"answer.{rank}.json").read_text()) for rank in range(2)]
    for answer in answers:
        assert answer["trained"] == {"replicas": 2, "finite": [1.0, 1.0]}
        for setting in settings:
            found = [Collective(**fields) for fields in answer[setting]["found"]]
            assert all(collective.op.startswith("CollectiveReduce") for collective in found)
            assert_as_planned(found, Counter(map(tuple, answer[setting]["planned"])), devices=1)
        found = [Collective(**fields) for fields in answer["evaluation"]["found"]]
        assert_as_planned(found, Counter({("float32", 2 + METRICS): 1}), devices=1)

    def without_devices(answer):
        return {setting: [{**one, "device": ""} for one in answer[setting]["found"]] for setting in settings}

    assert without_devices(answers[0]) == without_devices(answers[1])  # the same, in the same order: no deadlock


def test_the_plan_tells_the_settings_apart():
    plans = {setting: planned(mirrored(setting)) for setting in SETTINGS}
    kernels, rest = 6 * 5 + 5 + 5 + 5 + 5 * 3 + 3, 5 + 5 + 2 + METRICS
    assert plans["as it is"] == Counter({("float32", kernels + rest): 1})
    assert plans["float16"] == Counter({("float16", kernels): 1, ("float32", rest): 1})
    for setting in ("small buckets", "float16 in small buckets", "bfloat16 wire"):
        assert plans[setting].total() > 3
    assert {dtype for dtype, _ in plans["bfloat16 wire"]} == {"bfloat16", "float32"}


@pytest.mark.parametrize("ring", [False, True])
def test_an_evaluation_sends_one_collective_a_batch(ring):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if ring else None
    found = in_evaluation(session(2, on=strategy) if ring else mirrored("as it is"))
    assert_as_planned(found, Counter({("float32", 2 + METRICS): 1}), devices=2 if ring else 1)
    assert in_evaluation(session(1)) == []


def test_synchronised_normalisation_adds_one_collective_a_layer_and_direction():
    def model():
        layers = [
            keras.Input((6,)),
            keras.layers.Dense(5),
            BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
        return keras.Sequential(layers)

    made = session(2, make_model=model)
    assert_as_planned(in_training(made), planned(made) + Counter({("float32", 2 * 5 + 1): 2}), devices=1)


def test_naming_the_layers_of_a_skipped_step_sends_nothing_inside_a_conditional_either():
    made = session(2, precision="mixed_float16", microbatches=2)
    batch = next(made.trainer.batches(made.plan.data))
    again = tf.function(lambda: made.runtime.strategy.run(made.trainer.replica_step.non_finite, args=(batch,)))
    found = collectives(again.get_concrete_function())
    assert Counter(one.dtype for one in found) == {"float16": 1, "float32": 1}
    assert not any(one.in_conditional or one.loops for one in found)

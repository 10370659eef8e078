"""The state of a run on a TPU, in TensorFlow's own variables for it: made on the host, read from one, put into all."""

from __future__ import annotations

import made_up_tpu
import numpy as np
import pytest
import small_run
import tensorflow as tf
from building import build_session

from launcher.runtime.tensorflow import TfRuntime

pytestmark = pytest.mark.slow

RECIPE = "resnet_cpu.gin"
BINDINGS = ["resnet.depth = 8", "resnet.norm_group_size = 8", "train.global_batch_size = 32", "train.ema_decay = 0.9"]


@pytest.fixture
def made():
    resolved = made_up_tpu.resolve(RECIPE, [*BINDINGS, "train.precision = 'float32'"], 4)
    return made_up_tpu.build(made_up_tpu.with_copies(4), resolved)


def test_weights_begin_as_on_any_other_topology(made):
    state = made.trainer.state.snapshot()
    expected = build_session(RECIPE, BINDINGS).trainer.state.snapshot()
    assert list(state) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(state[name], value, err_msg=name)
    small_run.assert_replicas_equal(made)


def test_a_snapshot_reads_one_replica_and_a_restore_writes_all(made):
    before = made.trainer.state.snapshot()
    for variable in made.trainer.state.variables().values():
        copies = (variable if isinstance(variable, tf.Variable) else variable.value).values
        for copy in copies[1:]:
            copy.assign(tf.ones_like(copy))
    for name, value in made.trainer.state.snapshot().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
    changed = {name: np.asarray(value + 3, value.dtype) for name, value in before.items()}
    made.trainer.state.restore(changed)
    for name, copies in small_run.state_copies(made).items():
        assert len(copies) == 4
        for copy in copies:
            np.testing.assert_array_equal(copy, changed[name], err_msg=name)


def test_state_that_is_shared_out_is_put_together_in_a_snapshot_and_divided_by_a_restore():
    bindings = [*BINDINGS, "train.precision = 'float32'", "train.shard = 'optimizer'"]
    made = made_up_tpu.build(made_up_tpu.with_copies(4), made_up_tpu.resolve(RECIPE, bindings, 4))
    expected = build_session(RECIPE, BINDINGS).trainer.state.snapshot()
    before = made.trainer.state.snapshot()
    assert list(before) == list(expected)
    for name, value in expected.items():  # averages begin as the weights
        np.testing.assert_array_equal(before[name], value, err_msg=name)
    numbers = np.random.default_rng(0)
    changed = {name: numbers.uniform(1, 99, value.shape).astype(value.dtype) for name, value in before.items()}
    made.trainer.state.restore(changed)
    for name, value in made.trainer.state.snapshot().items():
        np.testing.assert_array_equal(value, changed[name], err_msg=name)
    (slot, part), *_ = made.trainer.optimizer.slot_shards
    assert [copy.shape for copy in small_run.copies(slot)] == [part.shape] * 4


def test_first_values_come_from_the_host_for_a_tpu_and_from_the_device_elsewhere():
    computed_on = []

    def first_value():
        value = tf.random.stateless_normal([3], seed=[1, 2]) + 0.0
        computed_on.append(value.device)
        return value

    tpu = made_up_tpu.with_copies(4)
    tpu.extended._tpu_devices[:, 0] = tpu.extended._tpu_devices[::-1, 0]  # the first replica is on the last CPU
    for strategy in (tpu, tf.distribute.OneDeviceStrategy("CPU:3")):
        with TfRuntime(strategy).scope():
            tf.Variable(first_value, aggregation=tf.VariableAggregation.NONE)
    assert [device.rpartition(":")[2] for device in computed_on] == ["0", "3"]

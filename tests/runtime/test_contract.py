"""One contract for all runtimes: TensorFlow's, with strategies of a user's, JAX's, and one that traces nothing."""

from __future__ import annotations

import numpy as np
import pytest
import runtime_contract
import tensorflow as tf
from eager_runtime import EagerRuntime
from places import PYTHONPATH

from launcher.machine.devices import configure_logical_cpus
from launcher.runtime.tensorflow import TfRuntime

pytestmark = pytest.mark.slow

TWO = ["CPU:0", "CPU:1"]


class Mine(tf.distribute.MirroredStrategy):
    """A strategy of a user's, whose sums are made elsewhere."""

    def __init__(self) -> None:
        super().__init__(TWO, cross_device_ops=tf.distribute.ReductionToOneDevice("CPU:1"))


@pytest.fixture(scope="module")
def expected():
    configure_logical_cpus(2)
    return runtime_contract.on(TfRuntime(tf.distribute.OneDeviceStrategy("CPU:0")))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("strategy", [Mine, lambda: tf.distribute.experimental.CentralStorageStrategy(TWO)])
def test_a_strategy_of_ones_own_keeps_the_contract(expected, strategy):
    assert_close(runtime_contract.on(TfRuntime(strategy()), replicas=2), expected)


def test_a_runtime_that_traces_nothing_keeps_the_contract(expected):
    assert_close(runtime_contract.on(EagerRuntime()), expected)


def test_devices_of_jax_keep_the_contract(expected, run_launcher, tmp_path):
    env = {"PYTHONPATH": PYTHONPATH}
    done = run_launcher("2", str(tmp_path / "found.npz"), module="runtime_contract", env=env)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz") as found:
        assert_close(dict(found), expected)

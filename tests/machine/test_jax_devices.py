"""What JAX raises is a peer's failure where there are peers, and JAX names what broke between them."""

from __future__ import annotations

import subprocess
import sys
import types
from unittest import mock

import numpy as np
import pytest

from launcher.errors import PeerError, UsageError
from launcher.machine import installation, jax_devices
from launcher.machine.cluster import Cluster
from launcher.machine.devices import Devices
from launcher.machine.jax_devices import JaxDevices

CHIPS = Devices(tpu_chips=tuple(f"/dev/vfio/{number}" for number in range(4)))
HOSTS = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}
TWO = Cluster(source="TF_CONFIG", workers=("a:1", "b:1"), index=1)
ALONE = Cluster(source="alone", workers=(), index=0)


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    monkeypatch.setattr(jax_devices.nvidia, "visible", lambda environ: [])


@pytest.mark.parametrize(
    ("cluster", "environ", "replicas", "found"),
    [
        (ALONE, {}, None, 4),
        (ALONE, {}, 2, 2),
        (ALONE, {}, 8, 8),  # v2 and v3
        (TWO, HOSTS, None, 4),
        (TWO, HOSTS, 8, 8),
        (ALONE, {**HOSTS, "TPU_PROCESS_BOUNDS": "1,1,1"}, None, 4),
    ],
)
def test_a_tpu_host_has_a_replica_a_chip_or_two(cluster, environ, replicas, found):
    made = jax_devices.plan(replicas, cluster, environ, CHIPS)
    assert (made.accelerator, made.local_replicas, made.num_replicas) == ("tpu", found, found * cluster.num_workers)


@pytest.mark.parametrize(
    ("cluster", "environ", "replicas", "said"),
    [
        (ALONE, HOSTS, None, "host 1 of a TPU slice of 2 hosts, and 1 process"),
        (ALONE, {}, 5, "--replicas=5"),
        (TWO, HOSTS, 2, "--replicas=2"),
    ],
)
def test_what_a_slice_cannot_do_is_said_before_its_hosts_wait_for_each_other(cluster, environ, replicas, said):
    with pytest.raises(UsageError, match=said):
        jax_devices.plan(replicas, cluster, environ, CHIPS)


def test_on_a_tpu_jax_comes_with_its_own_libtpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(UsageError, match=r"\[jax_tpu\]"):
        jax_devices.start(jax_devices.plan(None, ALONE, {}, CHIPS), ALONE)
    monkeypatch.setattr(installation, "_versions", lambda *names: ["tensorflow-tpu 2.20.0"])
    assert "second virtual environment" in installation.jax_command("jax_tpu")
    monkeypatch.setattr(installation, "_PYTHON_OF_JAX", (3, 99))
    with pytest.raises(UsageError, match=r"Python 3.99 or later.*\[cpu,jax_tpu\]"):
        jax_devices.check_jax("jax_tpu")


TELLS = """
import sys
import jax
from launcher.machine import jax_devices
index = int(sys.argv[1])
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, 1 - index)  # JAX counts the other way round
found = jax_devices.in_order_of_workers(jax, jax.devices(), index)
print([device.process_index for device in found])
"""


class Device:
    def __init__(self, number):
        self.id = number


@pytest.mark.parametrize("index", [0, 1])
def test_devices_stand_in_the_order_of_what_their_workers_tell(index):
    devices, told = [Device(number) for number in range(4)], [1, 0, 1, 0]

    def array(shape, spread, of_part):
        assert (shape, of_part(None).tolist()) == ((4,), [index]), "each tells its own number, of its own devices"
        shard = types.SimpleNamespace(data=np.array(told, np.int32))
        return types.SimpleNamespace(is_fully_replicated=True, addressable_shards=[shard])

    sharding = types.SimpleNamespace(Mesh=mock.Mock(), NamedSharding=mock.Mock(), PartitionSpec=mock.Mock())
    jax = types.SimpleNamespace(sharding=sharding, make_array_from_callback=array)
    found = jax_devices.in_order_of_workers(jax, devices, index)
    assert [device.id for device in found] == [1, 3, 0, 2]


@pytest.mark.nightly  # what JAX itself makes of it
@pytest.mark.heavy
def test_devices_stand_in_the_order_of_workers_however_jax_counts_processes(free_ports):
    (port,) = free_ports(1)
    words = [sys.executable, "-c", TELLS]
    both = [subprocess.Popen([*words, str(index), str(port)], stdout=subprocess.PIPE, text=True) for index in (0, 1)]
    try:
        for one in both:
            assert one.communicate(timeout=120)[0].splitlines()[-1] == "[1, 1, 0, 0]"
    finally:
        for one in both:
            one.kill()
            one.wait()


def raised(error, num_processes):
    devices = JaxDevices(jax=None, all=(), local=(), num_processes=num_processes)
    with pytest.raises(Exception) as caught, devices.peer_failures(" in a step"):
        raise error
    return caught.value


def test_a_broken_connection_between_processes_is_a_peers_failure():
    found = raised(RuntimeError("UNAVAILABLE: Gloo all-reduce failed\nmore"), 2)
    assert isinstance(found, PeerError)
    assert str(found) == "another worker went away in a step: UNAVAILABLE: Gloo all-reduce failed"


def test_memory_that_runs_out_is_one_message_with_what_there_is():
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 129 * 2**30})
    devices = JaxDevices(jax=None, all=(device,), local=(device,), num_processes=1)
    said = r"out of memory in a step, of 129.0 GiB .*while trying.*train.microbatches"
    with pytest.raises(UsageError, match=said), devices.peer_failures(" in a step"):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")


@pytest.mark.parametrize(
    ("message", "num_processes"), [("UNAVAILABLE: the device is gone", 1), ("RESOURCE_EXHAUSTED: out of memory", 2)]
)
def test_nobody_else_is_blamed_for_what_is_this_process_own(message, num_processes):
    error = RuntimeError(message)
    assert raised(error, num_processes) is error

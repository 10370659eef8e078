"""Which GPUs a process has: CUDA's own reading of its variable, on the machine that a driver's program lists."""

from __future__ import annotations

import played
import pytest

from launcher.errors import UsageError
from launcher.machine import jax_devices, nvidia, strategy
from launcher.machine.cluster import Cluster
from launcher.machine.devices import Devices

ALONE = Cluster(source="alone", workers=(), index=0)
TWO = Cluster(source="TF_CONFIG", workers=("a:1", "a:2"), index=1)
UUIDS = ("GPU-8932f937", "GPU-46ccb78a", "GPU-8f0a")
THERE = [nvidia.NvidiaGpu(str(number), uuid=uuid) for number, uuid in enumerate(UUIDS)]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    monkeypatch.setenv("PLAYED_GPUS", "2")
    nvidia.listed.cache_clear()
    yield
    nvidia.listed.cache_clear()


# The rules are those of CUDA's programming guide, and of PyTorch where it counts without CUDA.
@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, "012"), ("", ""), ("-1", ""), ("1", "1"), ("0,1", "01"), ("2,0", "20"), ("1,-1,2", "1"), ("0,7,1", "0"),
        ("1, 2", "12"), ("0,GPU-46", "0"), ("1,1", ""), ("NoDevFiles", ""), ("GPU-46ccb78a", "1"),
        ("GPU-4,GPU-8f", "12"), ("GPU-8", ""), ("GPU-4,0", "1"), ("GPU-4,GPU-46", ""), ("GPU-x", ""), (",1", ""),
        ("1x,0", "10"),
    ],
)  # fmt: skip
def test_visible_gpus_are_those_that_cuda_takes(named, found):
    assert "".join(gpu.number for gpu in nvidia.choose(named, THERE).values()) == found


def test_names_are_kept_for_those_who_divide_them_and_a_process_has_one_part_of_a_gpu():
    assert list(nvidia.choose("GPU-4,GPU-8f", THERE)) == ["GPU-4", "GPU-8f"]
    assert list(nvidia.choose("4,5,x,6", None)) == ["4", "5"], "on a machine of which nothing is known"
    parts = "MIG-3a0c,MIG-77b1"
    assert list(nvidia.choose(parts, THERE)) == parts.split(",")
    environ = {name: value for name, value in played.machine(2, CUDA_VISIBLE_DEVICES=parts).items() if value}
    assert len(nvidia.visible(environ)) == 1


@pytest.mark.parametrize(
    ("chosen", "replicas"), [(None, 2), ("1", 1), ("0,1", 2), ("GPU-00000001-play", 1), ("1,-1,0", 1), ("-1", 0)]
)
def test_jax_has_a_replica_on_each_and_16_bits_where_the_driver_says_that_they_pay(chosen, replicas):
    more = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    environ = {name: value for name, value in played.machine(2, **more).items() if value is not None}
    plan = jax_devices.plan(None, ALONE, environ, Devices())
    assert (plan.accelerator, plan.local_replicas) == (("gpu", replicas) if replicas else ("cpu", 1))
    if replicas:
        assert (plan.gpu_model, plan.compute_capability) == ("NVIDIA H200", (9, 0))
        assert strategy.recommended_policy(plan)[0] == "mixed_float16"


def test_workers_of_one_host_do_not_take_each_others_gpus():
    environ = {name: value for name, value in played.machine(2).items() if value is not None}
    with pytest.raises(UsageError, match=r"2 workers share this host.*CUDA_VISIBLE_DEVICES"):
        jax_devices.plan(None, TWO, environ, Devices())
    assert jax_devices.plan(None, TWO, {**environ, "CUDA_VISIBLE_DEVICES": "1"}, Devices()).num_replicas == 2


def test_the_share_of_memory_is_the_bindings_unless_a_variable_of_the_users_says_another():
    environ = {name: value for name, value in played.machine(2).items() if value is not None}
    for given, said in (
        ({}, "gpu.memory_share = 0.92"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, "XLA_CLIENT_MEM_FRACTION = 0.5"),
    ):
        assert said in jax_devices.plan(None, ALONE, environ | given, Devices()).notes[-1]

import dataclasses
import json
import os
import socket
import subprocess
import sys

import gin
import numpy as np
import pytest
import tensorflow as tf
from places import PYTHONPATH

from launcher.errors import UsageError
from launcher.machine import devices as devices_lib
from launcher.machine import strategy, tpu
from launcher.machine.cluster import Cluster
from launcher.machine.devices import Devices, Gpu, GpuOptions

# Doubles for hardware that the machine running the tests does not have.
V100 = Gpu(model="V100", compute_capability=(7, 0))
P100 = Gpu(model="P100", compute_capability=(6, 0))
A100 = Gpu(model="A100", compute_capability=(8, 0))
UNKNOWN = Gpu(model="mystery", compute_capability=None)
NOTHING = Devices()
TPU_8 = Devices(tpus=tuple(f"/physical_device:TPU:{index}" for index in range(8)))
CHIPS = Devices(tpu_chips=("/dev/accel0", "/dev/accel1"))

ALONE = Cluster(source="alone", workers=(), index=0)
ONE = Cluster(source="TF_CONFIG", workers=("a:1",), index=0)
TWO = Cluster(source="TF_CONFIG", workers=("a:1", "b:1"), index=1, to_train_alone="unset TF_CONFIG")
POD = {"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3", "TPU_WORKER_ID": "0"}


def gpus(*models):
    return Devices(gpus=models)


def plan(devices=NOTHING, requested="auto", *, replicas=None, tpu=None, cluster=ALONE, environ=None):
    return strategy.plan(
        requested=requested, replicas=replicas, tpu=tpu, cluster=cluster, environ=environ or {}, devices=devices
    )


@pytest.mark.parametrize(
    ("arguments", "kind", "replicas", "devices", "why"),
    [
        ({}, "one_device", 1, ("CPU:0",), "no accelerator"),
        ({"replicas": 1}, "one_device", 1, ("CPU:0",), "no accelerator"),
        ({"replicas": 3}, "mirrored", 3, ("CPU:0", "CPU:1", "CPU:2"), "--replicas=3"),
        ({"devices": gpus(A100)}, "one_device", 1, ("GPU:0",), "1 of 1 GPU(s)"),
        ({"devices": gpus(A100, A100)}, "mirrored", 2, ("GPU:0", "GPU:1"), "2 of 2 GPU(s)"),
        ({"devices": gpus(A100, A100, A100), "replicas": 2}, "mirrored", 2, ("GPU:0", "GPU:1"), "2 of 3 GPU(s)"),
        ({"devices": gpus(A100, A100), "replicas": 1}, "one_device", 1, ("GPU:0",), "1 of 2 GPU(s)"),
        ({"cluster": ONE}, "one_device", 1, ("CPU:0",), "no accelerator"),
        ({"cluster": TWO}, "multi_worker", 2, ("CPU:0",), "TF_CONFIG names 2 workers"),
        ({"cluster": TWO, "devices": gpus(A100, A100)}, "multi_worker", 4, ("GPU:0", "GPU:1"), "2 workers"),
        ({"devices": TPU_8}, "tpu", 8, TPU_8.tpus, "TPU of 8 cores"),
        ({"devices": TPU_8, "environ": {"TPU_NAME": "local"}}, "tpu", 8, TPU_8.tpus, "TPU_NAME=local"),
        ({"tpu": "node", "replicas": 32}, "tpu", 32, ("node",), "--tpu=node"),
        ({"tpu": "node", "replicas": 32, "devices": gpus(A100)}, "tpu", 32, ("node",), "--tpu=node"),
    ],
)
def test_auto_takes_a_tpu_then_workers_then_gpus_then_one_device(arguments, kind, replicas, devices, why):
    found = plan(**arguments)
    assert (found.kind, found.num_replicas, found.devices) == (kind, replicas, devices)
    assert found.why.startswith("auto: ")
    assert why in found.why


@pytest.mark.parametrize(
    ("requested", "arguments", "replicas", "local", "accelerator"),
    [
        ("one_device", {"devices": gpus(A100, A100)}, 1, 1, "gpu"),
        ("one_device", {"devices": TPU_8}, 1, 1, "cpu"),
        ("one_device", {"environ": {"TPU_NAME": "node"}}, 1, 1, "cpu"),
        ("mirrored", {"replicas": 4}, 4, 4, "cpu"),
        ("mirrored", {"replicas": 1}, 1, 1, "cpu"),
        ("mirrored", {"devices": gpus(A100)}, 1, 1, "gpu"),
        ("mirrored", {"devices": gpus(A100, A100, A100)}, 3, 3, "gpu"),
        ("multi_worker", {"cluster": TWO}, 2, 1, "cpu"),
        ("multi_worker", {"cluster": TWO, "replicas": 1}, 2, 1, "cpu"),
        ("multi_worker", {"cluster": ONE}, 1, 1, "cpu"),
        ("multi_worker", {"cluster": TWO, "devices": gpus(A100, A100, A100), "replicas": 2}, 4, 2, "gpu"),
        ("tpu", {"devices": TPU_8, "tpu": "local"}, 8, 8, "tpu"),
        ("tpu", {"devices": TPU_8, "replicas": 8}, 8, 8, "tpu"),
        ("tpu", {"devices": CHIPS, "replicas": 2}, 2, 2, "tpu"),
        ("tpu", {"tpu": "grpc://10.0.0.2:8470", "replicas": 8}, 8, 8, "tpu"),
        ("tpu", {"environ": {**POD, "TPU_NAME": "node"}, "replicas": 16, "devices": TPU_8}, 16, 16, "tpu"),
    ],
)
def test_a_strategy_that_is_asked_for_is_taken(requested, arguments, replicas, local, accelerator):
    found = plan(requested=requested, **arguments)
    assert (found.kind, found.why) == (requested, "asked for")
    assert (found.num_replicas, found.local_replicas, found.accelerator) == (replicas, local, accelerator)
    assert accelerator == "tpu" or len(found.devices) == local


@pytest.mark.parametrize(
    ("requested", "arguments", "says"),
    [
        ("horovod", {}, "'horovod' is not one of auto, one_device, mirrored, multi_worker, tpu"),
        ("auto", {"replicas": 0}, "--replicas=0: must be 1 or more"),
        ("auto", {"replicas": 3, "devices": gpus(A100, A100)}, "this machine has 2 GPU(s)"),
        ("auto", {"cluster": TWO, "replicas": 2}, "start more workers"),
        ("auto", {"cluster": TWO, "devices": TPU_8}, "TF_CONFIG names 2 workers, but the strategy is tpu"),
        ("auto", {"environ": {"TPU_NAME": "local"}}, "this machine has no TPU"),
        ("one_device", {"cluster": TWO}, "each would train a model of its own"),
        ("one_device", {"replicas": 2}, "not --replicas=2"),
        ("one_device", {"tpu": "local"}, "--tpu=local contradicts --strategy=one_device"),
        ("mirrored", {}, "--replicas=N makes N logical CPU devices"),
        ("mirrored", {"cluster": TWO, "replicas": 2}, "Use --strategy=multi_worker"),
        ("mirrored", {"replicas": 2, "devices": gpus(A100)}, "use --replicas=1"),
        ("multi_worker", {}, 'TF_CONFIG=\'{"cluster"'),
        ("multi_worker", {"cluster": TWO, "replicas": 2}, "a worker has one replica"),
        ("multi_worker", {"cluster": TWO, "replicas": 2, "devices": gpus(A100)}, "this machine has 1 GPU(s)"),
        ("tpu", {}, "no TPU found: neither --tpu nor TPU_NAME"),
        ("tpu", {"environ": {"TPU_NAME": ""}}, "no TPU found"),
        ("tpu", {"devices": gpus(A100)}, "no TPU found"),
        ("tpu", {"tpu": "local"}, "--tpu=local"),
        ("tpu", {"devices": CHIPS}, "/dev/accel0, /dev/accel1"),
        ("tpu", {"devices": TPU_8, "replicas": 4}, "--replicas=4, but the TPU of this machine has 8 cores"),
        ("tpu", {"tpu": "node"}, "--replicas=N"),
        ("tpu", {"tpu": "a node", "replicas": 8}, "'a node' is neither"),
        ("tpu", {"tpu": "http://node", "replicas": 8}, "'http://node' is neither"),
        ("tpu", {"devices": TPU_8, "tpu": "local", "environ": POD}, "TPU pod of 4 hosts"),
        ("tpu", {"devices": TPU_8, "environ": POD}, "--tpu=NODE_NAME"),
        ("tpu", {"tpu": "node", "replicas": 16, "environ": {**POD, "TPU_WORKER_ID": "2"}}, "host 2 of the TPU pod"),
        ("tpu", {"cluster": TWO, "devices": TPU_8}, "unset TF_CONFIG"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(requested, arguments, says):
    with pytest.raises(UsageError) as caught:
        plan(requested=requested, **arguments)
    assert says in str(caught.value)


def test_the_network_is_not_asked_for_a_plan(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a plan went to the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert plan(requested="tpu", tpu="node", replicas=8).num_replicas == 8
    with pytest.raises(UsageError):
        plan(requested="tpu")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"devices": gpus(P100)}, "P100 (compute capability 6.0): no Tensor Cores"),
        ({"devices": gpus(V100)}, "mixed_bfloat16 only from 8.0"),
        ({"devices": gpus(A100)}, "gpu.tf32 = False"),
        ({"devices": gpus(A100, A100), "replicas": 1}, "1 GPU(s) of this machine stay unused"),
        ({"replicas": 2}, "for trying out, not for speed"),
        ({"cluster": TWO}, "each of the 2 workers is assumed to have no GPU"),
        ({"cluster": TWO, "devices": gpus(A100, A100)}, "each of the 2 workers is assumed to have 2 GPU(s)"),
        ({"devices": CHIPS}, "[tpu]"),
        ({"tpu": "node", "replicas": 8}, "TPU_LOAD_LIBRARY=0"),
    ],
)
def test_notes_say_what_to_know_before_starting(arguments, says):
    assert says in " | ".join(plan(**arguments).notes)


def test_equal_gpus_are_noted_once_and_float32_is_full_without_tf32():
    assert len(plan(gpus(A100, A100, A100)).notes) == 1
    assert "TF32" not in devices_lib.gpu_notes((A100,), GpuOptions(tf32=False))[0]


@pytest.mark.parametrize(("environ", "warned"), [({}, True), ({"CUDA_VISIBLE_DEVICES": "0"}, False)])
def test_workers_that_share_a_host_are_told_to_share_out_its_gpus(environ, warned):
    same_host = Cluster(source="TF_CONFIG", workers=("a:1", "a:2", "b:1"), index=0)
    notes = " | ".join(plan(gpus(A100), cluster=same_host, environ=environ).notes)
    assert ("2 workers share the host a" in notes) == warned


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        ({}, "float32"),
        ({"cluster": TWO}, "float32"),
        ({"devices": gpus(P100)}, "float32"),
        ({"devices": gpus(V100)}, "mixed_float16"),
        ({"devices": gpus(A100, A100)}, "mixed_float16"),
        ({"devices": gpus(A100, P100)}, "float32"),
        ({"devices": gpus(A100, P100), "replicas": 1}, "mixed_float16"),
        ({"devices": gpus(A100, UNKNOWN)}, "float32"),
        ({"cluster": TWO, "devices": gpus(A100)}, "mixed_float16"),
        ({"devices": TPU_8}, "mixed_bfloat16"),
    ],
)
def test_the_recommended_policy_is_what_all_devices_gain_from(arguments, policy):
    found, why = strategy.recommended_policy(plan(**arguments))
    assert found == policy
    assert why.startswith("auto: ")


def test_gpu_options_are_bound_by_recipes_and_travel_with_the_plan():
    gin.clear_config()
    try:
        gin.parse_config("gpu.tf32 = False\ngpu.private_threads = 0")
        found = plan(gpus(A100)).gpu_options
    finally:
        gin.clear_config()
    assert (found.tf32, found.private_threads, found.memory_growth) == (False, 0, True)


def test_private_threads_below_zero_are_refused():
    with pytest.raises(UsageError, match=r"gpu\.private_threads = -1"):
        GpuOptions(private_threads=-1)


def test_looking_at_this_machine_finds_what_tensorflow_lists():
    found = devices_lib.discover()
    assert len(found.gpus) == len(tf.config.list_physical_devices("GPU"))
    assert len(found.tpus) == len(tf.config.list_physical_devices("TPU"))


@pytest.mark.parametrize(
    ("requested", "replicas", "kind"),
    [
        ("one_device", None, tf.distribute.OneDeviceStrategy),
        ("mirrored", 1, tf.distribute.MirroredStrategy),
        ("mirrored", 2, tf.distribute.MirroredStrategy),
        ("mirrored", 4, tf.distribute.MirroredStrategy),
    ],
)
def test_the_strategy_built_has_the_planned_replicas_and_sums_over_them(requested, replicas, kind):
    decided = plan(requested=requested, replicas=replicas)
    built = strategy.build(decided, ALONE)
    assert isinstance(built, kind)
    assert built.num_replicas_in_sync == decided.num_replicas

    @tf.function
    def total():
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0)

        return built.experimental_local_results(built.run(replica))

    expected = sum(range(1, decided.num_replicas + 1))
    assert [float(value) for value in total()] == [expected] * decided.num_replicas


@pytest.mark.nightly  # test_keras_defects.py: workers of ours skip together
# Two real processes on loopback, a chief and a worker, and an update that one worker's gradient decides about.
@pytest.mark.heavy
def test_two_workers_take_and_skip_updates_together_with_the_ranks_of_the_cluster(free_ports, start_launcher):
    chief, worker = (f"127.0.0.1:{port}" for port in free_ports(2))
    started = []
    for kind in ("chief", "worker"):
        config = {"cluster": {"chief": [chief], "worker": [worker]}, "task": {"type": kind, "index": 0}}
        environ = {"TF_CONFIG": json.dumps(config), "PYTHONPATH": PYTHONPATH}
        started.append(start_launcher(module="strategy_run", env=environ))
    finished = [process.wait() for process in started]
    assert [one.returncode for one in finished] == [0, 0], finished[0].stderr + finished[1].stderr
    results = [json.loads(one.stdout.split("RESULT ")[1]) for one in finished]

    for index, result in enumerate(results):
        assert (result["kind"], result["replicas"], result["planned"]) == ("multi_worker", 2, 2)
        assert result["index"] == result["rank"] == index
    assert results[0]["state"] == results[1]["state"]
    weight, count, first, second = results[0]["state"]
    assert count == 2  # steps 0 and 2; step 1 was not finite
    w, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, step in ((1, 0), (2, 2)):
        g = np.array([1.0 + 2.0, 2.0 + 2.0, -6.0 * step])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.1 * 0.1 * w - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(weight, w, rtol=1e-5)
    np.testing.assert_allclose(first, m, rtol=1e-5)
    np.testing.assert_allclose(second, v, rtol=1e-4)


# A TPU that does not answer. Refusals come from loopback: nothing leaves the machine.


def test_a_tpu_address_that_nobody_listens_on_is_refused(free_ports):
    (port,) = free_ports(1)
    with pytest.raises(UsageError) as caught:
        tpu.connect(f"grpc://127.0.0.1:{port}", 8)
    assert f"127.0.0.1:{port} does not answer" in str(caught.value)


def test_a_tpu_name_that_cannot_be_looked_up_is_refused_with_the_cause(monkeypatch, free_ports):
    (port,) = free_ports(1)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")
    before = socket.getdefaulttimeout()
    with pytest.raises(UsageError) as caught:
        tpu.connect("my-node", 8)
    assert "--tpu=my-node: cannot look up this TPU (URLError" in str(caught.value)
    assert socket.getdefaulttimeout() == before


def test_a_local_tpu_that_tensorflow_cannot_drive_is_refused_with_the_cause():
    decided = plan(CHIPS, "tpu", replicas=2)
    with pytest.raises(UsageError) as caught:
        strategy.build(decided, ALONE)
    assert "TPU 'local' cannot be initialised (NotFoundError" in str(caught.value)


@pytest.mark.parametrize(("growth", "notes"), [(None, 1), (True, 0)])
def test_gpus_that_tensorflow_has_used_are_taken_as_they_are_with_a_note(growth, notes, monkeypatch):
    def too_late(*_):
        raise RuntimeError("Visible devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: ["GPU:0", "GPU:1"])
    monkeypatch.setattr(tf.config, "set_visible_devices", too_late)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: growth)
    found = plan(gpus(A100, A100))
    monkeypatch.setenv("TF_GPU_THREAD_MODE", "global")  # it is not set then
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    strategy.configure(found)
    told = devices_lib.settings_left(found)
    assert len(told) == notes and all("gpu.memory_growth = True" in note for note in told)
    with pytest.raises(RuntimeError, match="after being initialized"):
        strategy.configure(dataclasses.replace(found, local_replicas=3))


@pytest.mark.parametrize("given", ["", "--xla_dump_max_hlo_modules=1", f"--{devices_lib._NCCL_TIMEOUT}=60"])
def test_on_gpus_xla_is_told_how_long_a_step_waits_for_its_peers_unless_somebody_has(given, monkeypatch):
    """By flags that this TensorFlow knows: it ends a process that has another one, when it first compiles."""
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [])
    monkeypatch.setenv("TF_GPU_THREAD_MODE", "global")
    monkeypatch.setenv("XLA_FLAGS", given)
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    devices_lib.configure_gpus(0, devices_lib.GpuOptions(tf32=tf32))
    ours = "" if devices_lib._NCCL_TIMEOUT in given else f"--{devices_lib._NCCL_TIMEOUT}=1800"
    told = os.environ["XLA_FLAGS"]
    assert told == " ".join(filter(None, [given, ours]))
    if not given:
        compiles = "import tensorflow as tf; print(int(tf.function(lambda x: 2 * x, jit_compile=True)(21)))"
        done = subprocess.run([sys.executable, "-c", compiles], capture_output=True, text=True, check=False)
        assert done.stdout == "42\n", done.stderr

"""What a TPU's hosts and their software must be, and what is told of them: no TPU and no cloud is asked."""

from __future__ import annotations

import http.server
import threading

import made_up_tpu
import numpy as np
import pytest
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import strategy, tpu
from launcher.machine.devices import Devices
from launcher.run import loading

NEWER = f"{tf.__version__.split('.')[0]}.{int(tf.__version__.split('.')[1]) + 1}.0"


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server of a TPU VM: its attributes, to be filled."""
    attributes: dict[str, str] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            if self.headers["Metadata-Flavor"] != "Google" or name not in attributes:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(attributes[name].encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield attributes
    server.shutdown()
    server.server_close()
    thread.join()


def test_local_on_a_host_of_a_pod_is_refused_by_what_the_machine_itself_knows(metadata):
    metadata.update({
        "worker-network-endpoints": "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3",
        "agent-worker-number": "1",
    })  # fmt: skip
    with pytest.raises(UsageError, match=r"host 1 of the TPU pod of 2 hosts, which 'local' cannot reach.*--tpu=NODE"):
        tpu.connect("local", 4)
    with pytest.raises(UsageError, match="host 1 of the TPU pod of 2 hosts: run it on host 0 only"):
        tpu.connect("my-pod", 8)


@pytest.mark.parametrize("endpoints", [None, "unknown:unknown:10.0.0.2"])
def test_the_only_host_of_a_slice_may_be_driven_from_within(endpoints, metadata):
    if endpoints:
        metadata["worker-network-endpoints"] = endpoints
    with pytest.raises(UsageError, match="cannot be initialised"):  # so far it got, without a TPU
        tpu.connect("local", 4)


@pytest.mark.parametrize(
    ("runtime", "named"),
    [
        (f"tpu-vm-tf-{NEWER}-pod-pjrt", NEWER),
        ("tpu-vm-tf-2.8.0-pod", "2.8.0"),
        ("2.11.1", "2.11.1"),
        ("tpu-vm-tf-2.15.0-rc1-pod-pjrt", "2.15.0"),
    ],
)
def test_another_version_of_tensorflow_on_the_tpu_is_refused_with_what_to_install(runtime, named):
    with pytest.raises(UsageError) as caught:
        tpu.check_version("my-pod", runtime)
    said = str(caught.value)
    assert f"TPU 'my-pod' runs TensorFlow {named}" in said and f"this program {tf.__version__}" in said
    assert f"'tensorflow-tpu=={named}'" in said and f"--version=tpu-vm-tf-{tf.__version__}-pod-pjrt" in said


@pytest.mark.parametrize(
    "runtime",
    [None, "", "nightly", "tpu-ubuntu2204-base", f"tpu-vm-tf-{tf.__version__}-pod-pjrt", tf.__version__],
)
def test_the_same_version_or_one_that_is_not_known_is_let_through(runtime):
    tpu.check_version("my-pod", runtime)


class _Cloud:
    """The part of the cloud's client for Python that TensorFlow's resolver uses, for one node."""

    def __init__(self, **node):
        self._node = node

    def projects(self):
        return self

    locations = nodes = projects

    def get(self, name):
        assert name == "projects/mine/locations/here/nodes/my-pod"
        return self

    def execute(self):
        return self._node


def test_the_version_is_what_the_cloud_says_of_the_node(monkeypatch):
    node = {"state": "READY", "networkEndpoints": [{"ipAddress": "10.0.0.2", "port": "8470"}]}
    cloud = _Cloud(tensorflowVersion=f"tpu-vm-tf-{NEWER}-pod-pjrt", **node)
    resolver = tpu.Resolver("my-pod", project="mine", zone="here", service=cloud)
    assert tpu.runtime_version(resolver) == f"tpu-vm-tf-{NEWER}-pod-pjrt"
    monkeypatch.setattr(tpu, "Resolver", lambda name: resolver)
    with pytest.raises(UsageError, match=f"runs TensorFlow {NEWER}"):
        tpu.connect("my-pod", 4)


def test_a_cloud_that_does_not_answer_says_no_version(monkeypatch):
    assert tpu.runtime_version(tpu.Resolver("local")) is None

    class Broken(_Cloud):
        def execute(self):
            raise RuntimeError("quota exceeded")

    resolver = tpu.Resolver("my-pod", project="mine", zone="here", service=Broken())
    assert tpu.runtime_version(resolver) is None


@pytest.mark.parametrize(
    ("recipe", "policy", "note"),
    [
        ("resnet_cpu.gin", "mixed_bfloat16", None),
        ("lm_tpu.gin", "mixed_bfloat16", None),
        ("transformer_big_wmt.gin", "mixed_float16", "multiplies in bfloat16"),
    ],
)
def test_on_a_tpu_the_default_is_bfloat16_and_nothing_is_compiled_by_itself(recipe, policy, note):
    resolved = made_up_tpu.resolve(recipe, ["train.global_batch_size = 64", "train.jit_compile = True"], 8)
    assert (resolved.policy, resolved.jit_compile, resolved.recipe.jit_compile) == (policy, False, True)
    assert any(note in line for line in resolved.notes) if note else not resolved.notes


def topology(hosts: int, cores: int) -> tf.tpu.experimental.Topology:
    """A row of chips of one core each."""
    places = np.array([[[host, core, 0, 0] for core in range(cores)] for host in range(hosts)], np.int32)
    return tf.tpu.experimental.Topology(mesh_shape=[hosts, cores, 1, 1], device_coordinates=places)


def test_the_topology_and_every_replicas_place_are_told_by_host():
    resolver = made_up_tpu.MadeUpTpu(8)
    resolver.topology = topology(2, 4)
    assert tpu.describe(tf.distribute.TPUStrategy(resolver)) == {
        "topology": "2x4x1x1 (x, y, z, core), 2 hosts of 4 cores",
        "host 0": "replicas 0 to 3 at (0,0,0,0) (0,1,0,0) (0,2,0,0) (0,3,0,0)",
        "host 1": "replicas 4 to 7 at (1,0,0,0) (1,1,0,0) (1,2,0,0) (1,3,0,0)",
    }


def test_without_a_tpu_there_is_nothing_to_tell():
    assert tpu.describe(tf.distribute.get_strategy()) == {}


def connected(monkeypatch, num_cores: int, replicas: int) -> tf.distribute.Strategy:
    """`tpu.connect` where TensorFlow initialises a TPU of so many cores on hosts of four."""
    resolver = made_up_tpu.MadeUpTpu(num_cores)
    initialised = []

    def initialize(given):
        initialised.append(given)
        return topology(num_cores // 4, 4)

    monkeypatch.setattr(tpu, "Resolver", lambda name: resolver)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", initialize)
    strategy = tpu.connect("local", replicas)
    assert initialised == [resolver]
    return strategy


def test_a_tpu_that_is_initialised_gives_its_strategy(monkeypatch):
    strategy = connected(monkeypatch, 8, replicas=8)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert "2 hosts of 4 cores" in tpu.describe(strategy)["topology"]


def test_a_tpu_with_another_number_of_cores_than_planned_is_refused(monkeypatch):
    with pytest.raises(UsageError, match="has 8 cores, the plan has 4: pass --replicas=8"):
        connected(monkeypatch, 8, replicas=4)


@pytest.mark.parametrize(
    "environ",
    [{}, {"TPU_NAME": ""}, {"TPU_NAME": "local", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}],
)
def test_the_tpu_of_a_notebooks_machine_is_found_and_initialised_once(environ, monkeypatch):
    resolver, initialised = made_up_tpu.MadeUpTpu(8), []
    monkeypatch.setattr(tpu, "Resolver", lambda name: resolver)
    monkeypatch.setattr(
        tf.tpu.experimental, "initialize_tpu_system", lambda given: initialised.append(given) or topology(2, 4)
    )
    monkeypatch.setattr(strategy, "discover", lambda: Devices(tpus=tuple(f"TPU:{index}" for index in range(8))))
    monkeypatch.setattr(loading, "_made", {})
    made = []
    for _ in range(2):  # to initialise it again would clear the first model
        machine = loading.Machine(environ=environ, strategy="tpu")
        machine.set_up()
        made.append(machine.made)
    assert isinstance(made[0].strategy, tf.distribute.TPUStrategy) and made[0] is made[1] and initialised == [resolver]

"""Finding a TPU, connecting to it, and its runtime: how many hosts, their version of TensorFlow, where the cores are.

Everything that can be known without the network is checked first: off the cloud, TensorFlow's own resolver asks a
metadata server that is not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Mapping

import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import gce, installation, ports
from launcher.machine.devices import Devices, StrategyPlan

_ANSWER_SECONDS = 10.0
_ENDPOINTS = "attributes/worker-network-endpoints"
_HOST_NUMBER = "attributes/agent-worker-number"


class NoTpuError(UsageError):
    """A TPU is asked for, and this machine neither has nor names one."""


def named(tpu: str | None, environ: Mapping[str, str]) -> str | None:
    """The TPU that `--tpu`, or else the variable TPU_NAME, names."""
    return tpu or environ.get("TPU_NAME") or None


def on_cores(
    count: int, *, why: str, devices: tuple[str, ...], name: str | None = None, notes: tuple[str, ...] = ()
) -> StrategyPlan:
    """A plan for all cores of a TPU: one program drives them, also those of a pod's other hosts."""
    return StrategyPlan(
        kind="tpu",
        num_replicas=count,
        local_replicas=count,
        why=why,
        devices=devices,
        accelerator="tpu",
        notes=notes,
        tpu=name,
    )


def plan(
    *, tpu: str | None, replicas: int | None, devices: Devices, environ: Mapping[str, str], why: str
) -> StrategyPlan:
    """Checks the request against this machine, at once and without the network; NoTpuError where there is no TPU.

    Args:
      tpu: node name, grpc:// address or "local"; None for TPU_NAME or else the TPU of this machine.
      replicas: number of TPU cores, which cannot be known before a remote TPU is connected to.
    """
    name = named(tpu, environ)
    if name is None and not devices.tpus and not devices.tpu_chips:
        raise NoTpuError(
            "no TPU found: neither --tpu nor TPU_NAME names one and TensorFlow lists no TPU device. On a TPU VM, "
            f"{installation.command('tpu')}; for a pod, pass --tpu=NODE_NAME; without a TPU, use --strategy=auto"
        )
    name = name or "local"
    if environ.get("TPU_WORKER_HOSTNAMES"):
        check_host(name, hosts_of_this_slice(environ))
    return _plan_local(replicas, devices, why) if name == "local" else _plan_remote(name, replicas, environ, why)


def _plan_local(replicas: int | None, devices: Devices, why: str) -> StrategyPlan:
    if not devices.tpus and not devices.tpu_chips:
        raise NoTpuError("--tpu=local: this machine has no TPU. Run on a TPU VM, or use --strategy=auto")
    # A TensorFlow that lists no core may still find them when it connects; somebody has to say how many.
    count = len(devices.tpus) or replicas
    if count is None:
        raise UsageError(
            f"TPU chips are here ({', '.join(devices.tpu_chips)}), but TensorFlow lists no TPU device: "
            f"{installation.command('tpu')} and end other programs that hold them, or say --replicas=N (cores) to try "
            "all the same"
        )
    if replicas not in (None, count):
        raise UsageError(f"--replicas={replicas}, but the TPU of this machine has {count} cores; leave --replicas out")
    return on_cores(count, why=why, devices=devices.tpus or devices.tpu_chips, name="local")


def _plan_remote(name: str, replicas: int | None, environ: Mapping[str, str], why: str) -> StrategyPlan:
    if not re.fullmatch(r"(grpc://)?[^\s/]+", name):
        raise UsageError(f"--tpu={name!r} is neither a node name, a grpc://host:port address nor 'local'")
    if replicas is None:
        raise UsageError(
            f"--tpu={name}: say how many cores this TPU has with --replicas=N (as many as TensorFlow lists on it), so "
            "that the batch can be checked before it is connected to. On a single TPU VM, --tpu=local counts them"
        )
    notes: tuple[str, ...] = ()
    if environ.get("TPU_LOAD_LIBRARY") != "0":
        notes = ("on a pod's own host 0, set TPU_LOAD_LIBRARY=0, or this process takes the chips from the TPU runtime",)
    return on_cores(replicas, why=why, devices=(name,), name=name, notes=notes)


def connect(name: str, num_replicas: int, environ: Mapping[str, str] = os.environ) -> tf.distribute.Strategy:
    """Connects to a TPU, initialises it, which clears its memory, and makes the strategy.

    Replicas are in the order of hosts and of cores on a host, as each host feeds its own; see `describe`. Raises
    UsageError where the TPU cannot be found or driven from here, does not answer, or is another than planned.
    """
    check_host(name, hosts_of_this_slice(environ))
    resolver, hosts = _look_up(name)
    if hosts:
        with _network_deadline(_ANSWER_SECONDS):
            check_version(name, runtime_version(resolver))
    for host in hosts:
        _check_answers(name, host)
    try:
        if hosts:
            tf.config.experimental_connect_to_cluster(resolver)
        resolver.topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise UsageError(
            f"TPU {name!r} cannot be initialised ({type(error).__name__}: {cause}). Check that the TPU's TensorFlow is "
            f"{tf.__version__} as here, that {installation.command('tpu')} was run and that no other program holds the "
            "TPU"
        ) from error
    strategy = tf.distribute.TPUStrategy(resolver)
    if strategy.num_replicas_in_sync != num_replicas:
        raise UsageError(
            f"TPU {name!r} has {strategy.num_replicas_in_sync} cores, the plan has {num_replicas}: "
            f"pass --replicas={strategy.num_replicas_in_sync}"
        )
    return strategy


def _look_up(name: str) -> tuple[Resolver, list[str]]:
    """The TPU's resolver and the addresses of its hosts, none for the TPU of this machine."""
    try:
        with _network_deadline(_ANSWER_SECONDS):
            resolver = Resolver(name)
            return resolver, resolver.cluster_spec().as_dict().get("worker", [])
    # The resolver lets through whatever its HTTP client and the cloud's API raise.
    except Exception as error:
        raise UsageError(
            f"--tpu={name}: cannot look up this TPU ({type(error).__name__}: {error}). Check its name and that it is "
            "READY; the lookup needs a Google Cloud VM in the TPU's project and zone, or give grpc://host:port"
        ) from error


def _check_answers(name: str, address: str) -> None:
    """TensorFlow would wait without end for a host that is not there."""
    try:
        ports.call(address, _ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--tpu={name}: {address} does not answer ({error}). Check the address, the firewall, and that the TPU "
            "runtime runs on every host"
        ) from error


@contextlib.contextmanager
def _network_deadline(seconds: float) -> Iterator[None]:
    """Bounds connections made inside, for libraries that offer no timeout of their own."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """TensorFlow's own, which remembers the topology of the TPU that was initialised with it."""

    topology: tf.tpu.experimental.Topology | None = None


def hosts_of_this_slice(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """The number of hosts of this TPU VM's slice, and the place of this one; None where this cannot be known.

    On GKE variables say so. Elsewhere the metadata server does, on the machines of Google's cloud, in the attributes
    that JAX goes by, too (jax/_src/clusters/cloud_tpu_cluster.py).
    """
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host.strip()]
    if hosts:
        return len(hosts), environ.get("TPU_WORKER_ID", "0") or "0"
    endpoints = gce.ask(environ, _ENDPOINTS)
    if not endpoints:
        return None
    return len(endpoints.split(",")), gce.ask(environ, _HOST_NUMBER) or "0"


def check_host(name: str, slice_hosts: tuple[int, str] | None) -> None:
    """Refuses to drive a pod, of `hosts_of_this_slice`, from within one of its hosts, or from another than host 0."""
    if slice_hosts is None or slice_hosts[0] <= 1:
        return
    count, host = slice_hosts
    if name == "local":
        raise UsageError(
            f"this is host {host} of the TPU pod of {count} hosts, which 'local' cannot reach: run on host 0 only, "
            "with --tpu=NODE_NAME and the variable TPU_LOAD_LIBRARY=0"
        )
    if host != "0":
        raise UsageError(f"this is host {host} of the TPU pod of {count} hosts: run it on host 0 only")


def check_version(name: str, runtime: str | None) -> None:
    """Refuses a TPU whose TensorFlow is not this program's: the two exchange graphs, handles and kernels by name.

    `runtime` is what it runs, "tpu-vm-tf-2.20.0-pod-pjrt" or "2.20.0"; None where it does not say.
    """
    version = re.search(r"(?:^|tf-)((\d+)\.(\d+)[\w.]*)", runtime or "")
    if version is None or (version[2], version[3]) == tuple(tf.__version__.split(".")[:2]):
        return
    raise UsageError(
        f"TPU {name!r} runs TensorFlow {version[1]} ({runtime}) and this program {tf.__version__}: both must be of one "
        f"version. Install 'tensorflow-tpu=={version[1]}' here (docs/tpu.md says from where), or create the TPU with "
        f"--version=tpu-vm-tf-{tf.__version__}-pod-pjrt"
    )


def runtime_version(resolver: tf.distribute.cluster_resolver.TPUClusterResolver) -> str | None:
    """The software that a remote TPU was created with, if it can be found out.

    The resolver keeps the client that asks the cloud to itself; tried with TensorFlow 2.20 and 2.21. Where another
    version has none, or the cloud does not answer, the check is left out and TensorFlow's own errors remain.
    """
    # Leans on TensorFlow: TPUClusterResolver keeps its client in `_cloud_tpu_client`. Noticed by
    # tests/tpu/test_tpu_runtime.py. Then: nothing breaks, the check of versions is left out; find the client.
    ask = getattr(getattr(resolver, "_cloud_tpu_client", None), "runtime_version", None)
    try:
        return ask() if ask else None
    except Exception:  # It lets through whatever its HTTP client and the cloud's API raise.
        return None


def describe(strategy: tf.distribute.Strategy) -> dict[str, str]:
    """The topology and the place of every replica, by host, for people; empty without a TPU.

    Replicas stand in the order of hosts and of cores on a host: each host feeds replicas that follow each other.
    """
    topology = getattr(getattr(strategy, "cluster_resolver", None), "topology", None)
    if topology is None:
        return {}
    mesh = "x".join(map(str, topology.mesh_shape))
    lines = {"topology": f"{mesh} (x, y, z, core), {topology.num_tasks} hosts of {topology.num_tpus_per_task} cores"}
    by_host: dict[int, list[tuple[int, int]]] = {}
    for replica, device in enumerate(strategy.extended.worker_devices):
        spec = tf.DeviceSpec.from_string(device)
        by_host.setdefault(spec.task or 0, []).append((replica, spec.device_index or 0))
    for host, cores in by_host.items():
        places = (topology.device_coordinates[host][core] for _, core in cores)
        shown = " ".join(f"({','.join(map(str, place))})" for place in places)
        lines[f"host {host}"] = f"replicas {cores[0][0]} to {cores[-1][0]} at {shown}"
    return lines

"""The TPU runtime on a slice's hosts: how many hosts there are, their version of TensorFlow, where their cores are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import gce

_ENDPOINTS = "attributes/worker-network-endpoints"
_HOST_NUMBER = "attributes/agent-worker-number"


class Resolver(tf.distribute.cluster_resolver.TPUClusterResolver):
    """TensorFlow's own, which remembers the topology of the TPU that was initialised with it."""

    topology: tf.tpu.experimental.Topology | None = None


def hosts_of_this_slice(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """How many hosts the slice of this TPU VM has, and the number of this one; None where this cannot be known.

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
    """Refuses to drive a pod from within one of its hosts, or from another one than the first.

    Args:
      name: the TPU, or "local".
      slice_hosts: as `hosts_of_this_slice`.

    Raises:
      UsageError: saying where and how to start instead.
    """
    if slice_hosts is None or slice_hosts[0] <= 1:
        return
    count, host = slice_hosts
    if name == "local":
        raise UsageError(
            f"this is host {host} of the TPU pod of {count} hosts, which 'local' cannot reach: run on host 0 only, "
            "with --tpu=NODE_NAME and the variable TPU_LOAD_LIBRARY=0"
        )
    if host != "0":
        raise UsageError(
            f"this is host {host} of the TPU pod of {count} hosts: run the program on host 0 only, it drives all"
        )


def check_version(name: str, runtime: str | None) -> None:
    """Refuses a TPU whose TensorFlow is not this program's: the two exchange graphs, handles and kernels by name.

    Args:
      name: the TPU.
      runtime: what it runs, "tpu-vm-tf-2.20.0-pod-pjrt" or "2.20.0"; None where it does not say.

    Raises:
      UsageError: naming both versions, and what to do.
    """
    found = re.search(r"(?:^|tf-)((\d+)\.(\d+)[\w.]*)", runtime or "")
    if found is None or (found[2], found[3]) == tuple(tf.__version__.split(".")[:2]):
        return
    raise UsageError(
        f"TPU {name!r} runs TensorFlow {found[1]} ({runtime}) and this program {tf.__version__}: both must be of one "
        f"version. Install 'tensorflow-tpu=={found[1]}' here, or create the TPU with "
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
    if ask is None:
        return None
    try:
        return ask()
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
        places = " ".join(_place(topology.device_coordinates[host][core]) for _, core in cores)
        lines[f"host {host}"] = f"replicas {cores[0][0]} to {cores[-1][0]} at {places}"
    return lines


def _place(coordinates: Sequence[int]) -> str:
    return f"({','.join(map(str, coordinates))})"

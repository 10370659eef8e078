"""JAX's devices for `--engine=pjrt`: how many there will be, and their start, once a process and with its peers.

Tried with JAX 0.10.2. JAX reads its settings when its devices are first asked for, so nothing else may do so before.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from launcher.errors import PeerError, UsageError
from launcher.machine import compile_cache, exit_barrier, installation, nvidia, peers, ports, tpu
from launcher.machine.cluster import Cluster
from launcher.machine.devices import Devices, Gpu, GpuOptions, StrategyPlan, discover, gpu_notes, names, of_gpus
from launcher.machine.runtime_kinds import PJRT
from launcher.machine.tensorflow_import import without_early_log

NEEDS_MORE = "of each device's memory"  # in the message on a compiled step that does not fit
_FLAG = PJRT.flag
# How much of a GPU JAX takes, where the user says it; the first is the name that newer versions know alone.
_MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# JAX ends a process whose peer has been silent for so long; the error of a broken connection comes much earlier.
_HEARTBEAT_SECONDS = 20
_found: list[Any] = []  # all devices, once JAX was started here
# What JAX 0.10.2 says where another process is gone: of Gloo (CPUs), NCCL (GPUs) and its own coordination.
_PEER_WORDS = ("gloo", "nccl", "unavailable", "deadline_exceeded", "heartbeat", "connection", "coordination", "aborted")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxDevices:
    """One device a replica, in the order of replicas; `local` are those of this process, which stand together."""

    jax: Any
    all: tuple[Any, ...]
    local: tuple[Any, ...]
    num_processes: int

    @property
    def first(self) -> int:
        """The number of this process's first replica."""
        return self.all.index(self.local[0])

    @property
    def memory_bytes(self) -> int:
        """Bytes that each device of this process offers to programs; 0 where JAX does not say, as of CPUs."""
        return min((one.memory_stats() or {}).get("bytes_limit", 0) for one in self.local)

    @contextlib.contextmanager
    def peer_failures(self, when: str) -> Iterator[None]:
        """PeerError for what JAX raises in the block where another process went away; there has to be one.

        And UsageError where a device's memory ran out.
        """
        try:
            yield
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error) and self.local and self.memory_bytes:
                raise UsageError(
                    f"out of memory{when}, of {self.memory_bytes / 2**30:.1f} GiB that JAX has on each device "
                    f"({_first_line(error)}): give a larger train.microbatches or a smaller train.global_batch_size, "
                    f"such as --mode=preflight {_FLAG} finds"
                ) from error
            if self.num_processes == 1 or not is_peer_failure(error):
                raise
            raise PeerError(f"another worker went away{when}: {_first_line(error)}") from error


def plan(
    replicas: int | None, cluster: Cluster, environ: Mapping[str, str], devices: Devices | None = None
) -> StrategyPlan:
    """As many local devices as `--replicas` says, else all accelerators, else one CPU device; JAX is not asked."""
    devices = discover() if devices is None else devices
    asked = environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if asked not in ("", "cpu", "tpu", "gpu", "cuda"):
        raise UsageError(f"JAX_PLATFORMS={asked}: {_FLAG} trains on CPUs, NVIDIA's GPUs and TPUs; unset it, or say cpu")
    gpus = [Gpu(model=one.name, compute_capability=one.compute_capability) for one in nvidia.visible(environ)]
    counts = {"gpu": len(gpus), "tpu": len(devices.tpu_chips)}
    accelerator, there = next(((name, count) for name, count in counts.items() if count and asked != "cpu"), ("cpu", 0))
    if accelerator == "gpu" and cluster.on_this_host > 1 and nvidia.VARIABLE not in environ:
        raise UsageError(
            f"{cluster.on_this_host} workers share this host, and each would take all of its {there} GPU(s): give each "
            f"its own with {nvidia.VARIABLE}, as python -m launcher.launch does"
        )
    whole = {there, 2 * there} if accelerator == "tpu" else {there}  # a chip of v2 and v3 is two devices
    some = range(1, 1 if cluster.num_workers > 1 else there)
    if there and replicas is not None and replicas not in {*whole, *some}:
        raise UsageError(f"--replicas={replicas}, but this machine has {there} {accelerator.upper()} device(s)")
    # With TPU_PROCESS_BOUNDS, a part of a slice is used.
    asks = accelerator == "tpu" and "TPU_PROCESS_BOUNDS" not in environ
    hosts, host = (asks and tpu.hosts_of_this_slice(environ)) or (1, "0")
    if hosts not in (1, cluster.num_workers):
        raise UsageError(
            f"this is host {host} of a TPU slice of {hosts} hosts, and {cluster.num_workers} process(es) are to train: "
            f"with {_FLAG} every host runs the program, which scripts/tpu_pod_train.sh starts, or "
            "python -m launcher.launch --backend=tpu_vm with all --hosts"
        )
    count, notes = replicas or there or 1, list[str]()
    if accelerator == "cpu" and count > 1:
        notes.append(f"{count} devices of JAX share this machine's cores: for trying out, not for speed")
    gpus = gpus[:count] if accelerator == "gpu" else []
    options = GpuOptions()
    notes += gpu_notes(tuple(gpus), options)
    if gpus:
        named = next((f"{name} = {environ[name]}" for name in _MEMORY_VARIABLES if name in environ), None)
        share = named or f"gpu.memory_share = {options.memory_share}"
        notes.append(f"JAX takes its share of each GPU's memory at the start: {share}")
    return StrategyPlan(
        kind=PJRT.name,
        runtime=PJRT,
        num_replicas=count * cluster.num_workers,
        local_replicas=count,
        why=f"{_FLAG}: the step runs by JAX on {accelerator.upper()} devices",
        devices=names(accelerator, count),
        accelerator=accelerator,
        notes=(*notes, *ports.public_address_notes(cluster.workers)),
        **of_gpus(gpus),
    )


def plan_instead(
    gpus: Sequence[nvidia.NvidiaGpu], replicas: int | None, cluster: Cluster, environ: Mapping[str, str]
) -> StrategyPlan:
    """The plan on GPUs that JAX can use and TensorFlow cannot, as where it was built for CPUs; a run on the CPU would
    take a day for what they do in an hour.

    Raises:
      UsageError: JAX cannot use them either.
    """
    lacks = f"TensorFlow cannot use this machine's {len(gpus)} GPU(s) {gpus[0].name}".rstrip()
    otherwise = (
        f"{lacks}: {installation.command('cuda')} brings what it needs; --strategy=one_device, or "
        f"{nvidia.VARIABLE}=-1, trains on the CPU"
    )
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UsageError(f"{otherwise}, and {installation.jax_command('jax_cuda12')} has JAX train on them, {_FLAG}")
    return dataclasses.replace(
        plan(replicas, cluster, environ), why=f"{lacks}, and JAX can, as with {_FLAG}", otherwise=otherwise
    )


def check_jax(extra: str = "preflight") -> None:
    """Raises UsageError where JAX is missing, which an extra of setup.py brings; imports nothing else of it."""
    try:
        import jax  # noqa: F401
    except ImportError:
        installation.require_python_of_jax(_FLAG, extra)
        raise UsageError(f"{_FLAG} needs JAX: {installation.jax_command(extra)}") from None


def start(wanted: StrategyPlan, cluster: Cluster) -> JaxDevices:
    """Starts JAX on the devices of a plan, and waits for the peers.

    Raises:
      UsageError: JAX is missing, or does not have these devices.
      PeerError: a peer did not come.
      PortTakenError: another process listens on this worker's port.
    """
    extra = {"tpu": "jax_tpu", "gpu": "jax_cuda12"}.get(wanted.accelerator, "preflight")
    check_jax(extra)
    with without_early_log():
        return _started(wanted, cluster, extra)


def _started(wanted: StrategyPlan, cluster: Cluster, extra: str) -> JaxDevices:
    import jax

    platforms = {"gpu": "cuda,cpu", "tpu": "tpu,cpu", "cpu": "cpu"}[wanted.accelerator]
    for of_other_devices in ("jax._src.xla_bridge", "jax_plugins"):  # whose plugins are there, and cannot be used
        logging.getLogger(of_other_devices).setLevel(logging.ERROR)
    if wanted.accelerator == "gpu" and not any(name in os.environ for name in _MEMORY_VARIABLES):
        os.environ[_MEMORY_VARIABLES[0]] = str(wanted.gpu_options.memory_share)
    if _found:  # by an earlier run of this process, as in a notebook
        return _of_plan(wanted, cluster, jax)
    try:
        jax.config.update("jax_platforms", platforms)
        jax.config.update("jax_enable_x64", True)  # counters have 64 bits
        if wanted.accelerator == "cpu":
            jax.config.update("jax_num_cpu_devices", wanted.local_replicas)
        if compile_cache.folder_in_use is not None:
            jax.config.update("jax_compilation_cache_dir", compile_cache.folder_in_use)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        if cluster.num_workers > 1:
            _join(jax, cluster)
        _found[:] = jax.devices()
    except (AttributeError, RuntimeError) as error:
        if cluster.num_workers > 1 and is_peer_failure(error):
            raise PeerError(f"JAX could not connect the {cluster.num_workers} workers: {_first_line(error)}") from error
        raise UsageError(
            f"{_FLAG}: JAX {jax.__version__} cannot start on {platforms.split(',')[0]} devices "
            f"({_first_line(error)}); tried with JAX 0.10.2: {installation.jax_command(extra)}"
        ) from None
    return _of_plan(wanted, cluster, jax)


def _of_plan(wanted: StrategyPlan, cluster: Cluster, jax: Any) -> JaxDevices:
    """Those of the devices that were found which a plan names."""
    found, local = list(_found), jax.local_devices()
    if cluster.num_workers == 1:
        found = local = found[: wanted.local_replicas]
    if len(found) < wanted.local_replicas and wanted.accelerator == "cpu":
        raise UsageError(
            f"{wanted.local_replicas} replicas are wanted, and JAX was started with {len(found)} device(s) in this "
            "process: restart the kernel and begin with the largest number, or give workers=N"
        )
    if (len(found), len(local)) != (wanted.num_replicas, wanted.local_replicas):
        raise UsageError(
            f"{_FLAG}: {wanted.local_replicas} replica(s) on this worker and {wanted.num_replicas} in all are "
            f"planned, and JAX sees {len(local)} and {len(found)} device(s): say how many with --replicas, the same "
            "number on every worker"
        )
    devices = JaxDevices(jax=jax, all=tuple(found), local=tuple(local), num_processes=cluster.num_workers)
    if cluster.num_workers == 1 or wanted.accelerator != "tpu":
        return devices
    with devices.peer_failures(" at the start"):
        found = in_order_of_workers(jax, found, cluster.index)
    return dataclasses.replace(devices, all=tuple(found), local=tuple(one for one in found if one in local))


def spread(jax: Any, devices: Sequence[Any]) -> Any:
    """The sharding of an array whose first axis is divided among the devices."""
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "x"), jax.sharding.PartitionSpec("x"))


def in_order_of_workers(jax: Any, devices: Sequence[Any], index: int) -> list[Any]:
    """One worker's devices after the other's; `index` is this one's, and all ask at once.

    A TPU counts processes by its topology, so that each worker has to tell its own.
    """
    told = jax.make_array_from_callback((len(devices),), spread(jax, devices), lambda _: np.array([index], np.int32))
    workers = dict(zip(devices, whole(told).tolist(), strict=True))
    return sorted(devices, key=lambda device: (workers[device], device.id))


def _join(jax: Any, cluster: Cluster) -> None:
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    with peers.all_there(cluster):
        jax.distributed.initialize(
            cluster.workers[0], cluster.num_workers, cluster.index, heartbeat_timeout_seconds=_HEARTBEAT_SECONDS
        )
    exit_barrier.end_first()  # JAX's own function waits for a peer that is gone, and aborts
    if not cluster.is_chief:
        # As TensorFlow's server would: by this port the chief knows how long this process is there.
        kept = ports.listener(ports.port_of(cluster.workers[cluster.index]), backlog=128)
        atexit.register(kept.close)


def is_peer_failure(error: BaseException) -> bool:
    """Whether JAX says that another process went away."""
    return type(error).__module__.partition(".")[0] in ("jax", "jaxlib", "builtins") and any(
        word in str(error).lower() for word in _PEER_WORDS
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def whole(array: Any) -> np.ndarray:
    """A copy of a global array's value: of one that is divided over processes, put together by all of them."""
    if array.is_fully_replicated:
        return np.array(array.addressable_shards[0].data)
    if array.is_fully_addressable:
        return np.array(array)
    from jax.experimental import multihost_utils

    return np.array(multihost_utils.process_allgather(array, tiled=True))

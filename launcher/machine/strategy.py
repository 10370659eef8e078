"""The devices that train, and the tf.distribute strategy over them.

`plan` decides from flags, environment and the devices that are there, and touches none of them; `configure` sets up
those of this process, and `build` makes the strategy over them.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping

import tensorflow as tf

from launcher.errors import UsageError, listed
from launcher.machine import installation, nvidia, peers
from launcher.machine import tpu as tpu_lib
from launcher.machine.accelerators import FLOAT8_CAPABILITY, FLOAT16_CAPABILITY, WITHOUT_TRITON
from launcher.machine.cluster import Cluster, tf_config
from launcher.machine.devices import (
    Devices,
    GpuOptions,
    StrategyPlan,
    configure_gpus,
    configure_logical_cpus,
    discover,
    gpu_notes,
    names,
    of_gpus,
)
from launcher.machine.ports import public_address_notes
from launcher.machine.runtime_kinds import PJRT

FLOAT8_ON_CPU = "LAUNCHER_FLOAT8_ON_CPU"
KINDS = ("auto", "one_device", "mirrored", "multi_worker", "tpu")
# What TensorFlow says when its runtime has been started: of logical devices and GPUs, and of workers.
_TOO_LATE = ("after being initialized", "at program startup")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """A request for a strategy, and what is there."""

    replicas: int | None
    tpu: str | None
    cluster: Cluster
    environ: Mapping[str, str]
    devices: Devices


def plan(
    *,
    requested: str,
    replicas: int | None,
    tpu: str | None,
    cluster: Cluster,
    environ: Mapping[str, str],
    devices: Devices | None = None,
) -> StrategyPlan:
    """Chooses a strategy, at once and without the network.

    Args:
      requested: one of `KINDS`. "auto" takes a TPU, else several workers, else all local GPUs, else one device.
      replicas: replicas on this machine: GPUs, or logical CPU devices where there is no GPU; None for all GPUs. For a
        remote TPU, its cores.
      tpu: node name, grpc:// address or "local", as given by `--tpu`.
      devices: what this machine has; None to look.

    Raises:
      UsageError: the devices are not there, or flags and environment contradict each other.
    """
    if requested not in KINDS:
        raise UsageError(f"strategy {requested!r} is not one of {', '.join(KINDS)}")
    if replicas is not None and replicas < 1:
        raise UsageError(f"--replicas={replicas}: must be 1 or more")
    if tpu and requested not in ("auto", "tpu"):
        raise UsageError(f"--tpu={tpu} contradicts --strategy={requested}: leave one of them out")
    devices = discover() if devices is None else devices
    request = _Request(replicas=replicas, tpu=tpu, cluster=cluster, environ=environ, devices=devices)
    kind, why = _choose(request) if requested == "auto" else (requested, "asked for")
    if kind != "multi_worker" and cluster.num_workers > 1:
        raise UsageError(
            f"{cluster.source} names {cluster.num_workers} workers, but the strategy is {kind} ({why}): each would "
            f"train a model of its own. Use --strategy=multi_worker, or {cluster.to_train_alone}"
        )
    match kind:
        case "tpu":
            return tpu_lib.plan(tpu=tpu, replicas=replicas, devices=devices, environ=environ, why=why)
        case "multi_worker":
            return _plan_multi_worker(request, why)
        case "one_device" if replicas not in (None, 1):
            raise UsageError(f"--strategy=one_device has one replica, not --replicas={replicas}; use mirrored")
        case "mirrored" if replicas is None and not devices.gpus:
            raise UsageError(
                "--strategy=mirrored: this machine has no GPU TensorFlow can use (a GPU needs a driver and "
                f"{installation.command('cuda')}). --replicas=N makes N logical CPU devices to mirror over; "
                "--strategy=one_device needs nothing"
            )
    return _on_this_machine(kind, 1 if kind == "one_device" else replicas, request, why)


def _choose(request: _Request) -> tuple[str, str]:
    """The kind that "auto" means, and why."""
    devices, replicas = request.devices, request.replicas
    name = tpu_lib.named(request.tpu, request.environ)
    if name:
        return "tpu", f"auto: {'--tpu' if request.tpu else 'TPU_NAME'}={name}"
    if devices.tpus:
        return "tpu", f"auto: this machine has a TPU of {len(devices.tpus)} cores"
    if request.cluster.num_workers > 1:
        return "multi_worker", f"auto: {request.cluster.source} names {request.cluster.num_workers} workers"
    if devices.gpus:
        count = replicas or len(devices.gpus)
        return ("mirrored" if count > 1 else "one_device"), f"auto: {count} of {len(devices.gpus)} GPU(s) here"
    if replicas is not None and replicas > 1:
        return "mirrored", f"auto: no accelerator, --replicas={replicas}"
    return "one_device", "auto: no accelerator, no other workers"


def _plan_multi_worker(request: _Request, why: str) -> StrategyPlan:
    cluster = request.cluster
    if not cluster.workers:
        raise UsageError(
            "--strategy=multi_worker: no workers are named. Start one process a worker, each with the same cluster and "
            f"an index of its own, from 0: {tf_config.EXAMPLE}"
        )
    if not request.devices.gpus and request.replicas not in (None, 1):
        raise UsageError(
            f"--strategy=multi_worker --replicas={request.replicas}: without GPUs a worker has one replica "
            "(a limit of MultiWorkerMirroredStrategy); start more workers"
        )
    local = _on_this_machine("multi_worker", request.replicas, request, why)
    has = f"{local.local_replicas} GPU(s)" if request.devices.gpus else "no GPU"
    notes = [f"each of the {cluster.num_workers} workers is assumed to have {has}, as this one"]
    if request.devices.gpus and cluster.on_this_host > 1 and nvidia.VARIABLE not in request.environ:
        host = cluster.workers[cluster.index].rpartition(":")[0]
        share = f"{cluster.on_this_host} workers share the host {host}"
        notes.append(f"{share}: give each GPUs of its own with {nvidia.VARIABLE}")
    notes += [*public_address_notes(cluster.workers), *local.notes]
    return dataclasses.replace(local, num_replicas=cluster.num_workers * local.local_replicas, notes=tuple(notes))


def absent_tpu(replicas: int | None, *, why: str) -> StrategyPlan:
    """A plan for a TPU that is not here, of `replicas` cores or one: it can be shown, not built."""
    count = replicas or 1
    return tpu_lib.on_cores(count, why=why, devices=names("tpu", count))


def _on_this_machine(kind: str, replicas: int | None, request: _Request, why: str) -> StrategyPlan:
    """On the first GPUs, None for all, or on as many logical CPU devices, None for one, where there is no GPU."""
    gpus = request.devices.gpus
    notes: list[str] = []
    if gpus and (replicas or 0) > len(gpus):
        raise UsageError(
            f"--replicas={replicas}, but this machine has {len(gpus)} GPU(s): use --replicas={len(gpus)} or leave it "
            "out; for logical CPU devices instead, hide the GPUs with CUDA_VISIBLE_DEVICES=-1"
        )
    count = replicas or len(gpus) or 1
    if gpus:
        notes += gpu_notes(gpus[:count], GpuOptions())
        if len(gpus) > count:
            notes.append(f"{len(gpus) - count} GPU(s) of this machine stay unused")
    else:
        if count > 1:
            notes.append(f"{count} logical CPU devices share this machine's cores: for trying out, not for speed")
        if request.devices.tpu_chips and not request.devices.tpus:
            chips, extra = ", ".join(request.devices.tpu_chips), installation.command("tpu")
            notes.append(f"if this is a TPU VM ({chips}): TensorFlow lists no TPU device, {extra}")
    accelerator = "gpu" if gpus else "cpu"
    return StrategyPlan(
        kind=kind,
        num_replicas=count,
        local_replicas=count,
        why=why,
        devices=names(accelerator, count),
        accelerator=accelerator,
        notes=tuple(notes),
        **of_gpus(gpus[:count]),
    )


def describe(strategy: tf.distribute.Strategy) -> StrategyPlan:
    """The plan that a strategy which exists already would have come from."""
    kinds = {
        tf.distribute.MultiWorkerMirroredStrategy: "multi_worker",
        tf.distribute.MirroredStrategy: "mirrored",
        tf.distribute.TPUStrategy: "tpu",
    }
    otherwise = "one_device" if strategy.num_replicas_in_sync == 1 else type(strategy).__name__
    kind = next((kind for made, kind in kinds.items() if isinstance(strategy, made)), otherwise)
    devices = tuple(strategy.extended.worker_devices)
    there = [one.name for one in tf.config.list_logical_devices()]
    asked, found_here = ([name.partition("device:")[2] for name in names] for names in (devices, there))
    if kind != "tpu" and not set(asked) <= set(found_here):
        raise UsageError(
            f"the {type(strategy).__name__} that was given is of {listed(asked)}; TensorFlow finds {listed(found_here)}"
        )
    return StrategyPlan(
        kind=kind,
        num_replicas=strategy.num_replicas_in_sync,
        local_replicas=len(devices),
        why=f"the {type(strategy).__name__} that was given",
        devices=devices,
        accelerator=str(tf.DeviceSpec.from_string(devices[0]).device_type or "cpu").lower(),
    )


def recommended_policy(plan: StrategyPlan) -> tuple[str, str]:
    """The Keras dtype policy that is fastest on these devices without loss of accuracy, and why."""
    if plan.accelerator == "tpu":
        return "mixed_bfloat16", "auto: TPUs multiply in bfloat16"
    if plan.accelerator == "cpu":
        return "float32", "auto: no accelerator"
    capability = plan.compute_capability
    if capability is None:
        return "float32", "auto: the GPU's compute capability is not known"
    found = f"compute capability {capability[0]}.{capability[1]}"
    if capability < FLOAT16_CAPABILITY:
        return "float32", f"auto: {found}, mixed_float16 pays from 7.0"
    return "mixed_float16", f"auto: {found}, Tensor Cores from 7.0"


def set_up_float8(plan: StrategyPlan, environ: MutableMapping[str, str], *, compiles: bool) -> None:
    """Has TensorFlow's XLA multiply in 8 bits what is rounded to them; before it is used.

    Args:
      compiles: whether XLA compiles the model.

    Raises:
      UsageError: the devices have no such products, but for CPUs that are to compute as those would.
    """
    if plan.accelerator == "cpu" and environ.get(FLOAT8_ON_CPU) == "1":
        return
    had, needed = (".".join(map(str, one or ())) for one in (plan.compute_capability, FLOAT8_CAPABILITY))
    if plan.accelerator != "gpu" or (plan.compute_capability or (0, 0)) < FLOAT8_CAPABILITY:
        here = f"a {plan.accelerator.upper()}" + (f" of {had}" if had else "")
        raise UsageError(
            f"mixed_float8 needs GPUs of compute capability {needed} or more, which multiply 8-bit floats, and this is "
            f"{here}: take 'mixed_bfloat16'. {FLOAT8_ON_CPU}=1 in the environment has CPUs compute the same in wider "
            "numbers, to test or to evaluate"
        )
    if not compiles:
        raise UsageError(
            f"mixed_float8 needs XLA, which multiplies in 8 bits: train.jit_compile = True, or {PJRT.flag}"
        )
    (name, value), flags = WITHOUT_TRITON, environ.get("XLA_FLAGS", "")
    if name not in flags:
        environ["XLA_FLAGS"] = f"{flags} --{name}={str(value).lower()}".strip()


def configure(plan: StrategyPlan) -> None:
    """Sets this process's devices up; before anything else uses TensorFlow's devices."""
    if plan.runtime.has_devices:
        tf.config.set_visible_devices([], "GPU")  # they are its own
        # In the program, too, that TensorFlow makes for them.
        tf.config.experimental.enable_tensor_float_32_execution(plan.gpu_options.tf32 or plan.accelerator != "gpu")
    elif plan.accelerator == "gpu" and not plan.absent:
        configure_gpus(plan.local_replicas, plan.gpu_options)
    if plan.accelerator == "cpu" and plan.kind == "mirrored":
        configure_logical_cpus(plan.local_replicas)


def build(plan: StrategyPlan, cluster: Cluster) -> tf.distribute.Strategy:
    """Sets this process's devices up and makes the strategy; before anything else uses TensorFlow's devices.

    Under several workers, waits until all of them are there, and says for whom.

    Raises:
      UsageError: the TPU cannot be connected to, or TensorFlow was used before.
      PeerError: a worker did not come in time.
      PortTakenError: another process listens on this worker's port.
    """
    if plan.kind == "tpu":
        assert plan.tpu is not None
        return tpu_lib.connect(plan.tpu, plan.num_replicas)
    try:
        configure(plan)
        if plan.runtime.has_devices:
            return tf.distribute.OneDeviceStrategy("/CPU:0")
        if plan.kind == "one_device":
            return tf.distribute.OneDeviceStrategy(f"/{plan.devices[0]}")
        if plan.kind == "mirrored":
            # Logical devices share memory: one adds up what TensorFlow's default, a ring of collectives, would pass
            # around in up to five times the time. Nor can collectives of two strategies in one process get into each
            # other's way.
            across = tf.distribute.ReductionToOneDevice() if plan.accelerator == "cpu" else None
            return tf.distribute.MirroredStrategy(list(plan.devices), cross_device_ops=across)
        return _build_multi_worker(plan, cluster)
    except RuntimeError as error:
        if not any(words in str(error) for words in _TOO_LATE):
            raise
        raise UsageError(
            f"TensorFlow was used before its devices were set up for {plan.kind} on {plan.num_replicas} replicas "
            f"({error}). In a notebook, restart the kernel and call launcher.fit before anything of TensorFlow, with "
            "functions that return the data; or give workers=N in the place of replicas=N. Run a program as python -m "
            "launcher.main --gin_file=PROGRAM.py, which sets them up first"
        ) from error


def _build_multi_worker(plan: StrategyPlan, cluster: Cluster) -> tf.distribute.Strategy:
    # A resolver of our own, with chief and workers as one job, so that TensorFlow sees the ranks that `cluster` has,
    # whoever named them, and does not read TF_CONFIG a second time.
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(cluster.workers)}),
        task_type="worker",
        task_id=cluster.index,
        num_accelerators={"GPU": plan.local_replicas} if plan.accelerator == "gpu" else {},
        rpc_layer="grpc",
    )
    communication = tf.distribute.experimental.CommunicationImplementation
    implementation = communication.NCCL if plan.accelerator == "gpu" else communication.AUTO
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    try:
        with peers.all_there(cluster):
            return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, communication_options=options)
    except tf.errors.UnknownError as error:
        # All it says of a port that was free when it was chosen and is not any more.
        if "Could not start gRPC server" not in error.message:
            raise
        raise peers.port_taken(cluster) from None

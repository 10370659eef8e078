"""Devices of this machine, those of them that train, and their setting up before TensorFlow starts to use them."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from launcher.config import gin_bindings
from launcher.config.bound_types import check_value
from launcher.machine import versions
from launcher.machine.accelerators import BFLOAT16_CAPABILITY, FLOAT16_CAPABILITY
from launcher.machine.runtime_kinds import TENSORFLOW, RuntimeKind

# A compiled step waits for ever for a replica that is gone, unless XLA is told how long. One that does not know the
# flag ends the process: TensorFlow 2.16, 2.18 and 2.21 know it, and jaxlib 0.10.2.
_NCCL_TIMEOUT, _NCCL_SECONDS = "xla_gpu_nccl_termination_timeout_seconds", 1800
_KNOWS_NCCL_TIMEOUT = (2, 21)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: the maker's name for it, and (major, minor), or None when the driver does not say."""

    model: str
    compute_capability: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """The accelerators of this machine, as TensorFlow names and orders them.

    `tpu_chips` are device files of TPU chips, which are there also when this TensorFlow cannot drive them.
    """

    gpus: tuple[Gpu, ...] = ()
    tpus: tuple[str, ...] = ()
    tpu_chips: tuple[str, ...] = ()


@gin_bindings.settings("gpu")
@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """Settings of GPUs.

    Attributes:
      memory_growth: take memory as it is needed, not all of it at the start.
      tf32: multiply float32 matrices in TF32 (10-bit mantissa) where the GPU can; off for full float32.
      private_threads: threads that launch kernels, for each GPU alone, so that input work does not delay them;
        0 for TensorFlow's shared pool. The variable TF_GPU_THREAD_MODE, when set, wins.
      memory_share: of each GPU's memory, what --engine=pjrt takes at its start; the rest is for CUDA, cuDNN and NCCL.
        The variable XLA_CLIENT_MEM_FRACTION, when set, wins.
    """

    memory_growth: bool = True
    tf32: bool = True
    private_threads: int = 2
    memory_share: float = 0.92

    def __post_init__(self) -> None:
        check_value("gpu.private_threads", self.private_threads, self.private_threads >= 0, "0 (shared) or more")
        check_value("gpu.memory_share", self.memory_share, 0 < self.memory_share <= 1, "above 0 and at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """A strategy that has been decided on and not yet made.

    Attributes:
      kind: "one_device", "mirrored", "multi_worker" or "tpu"; of devices of its own, the name of the runtime.
      num_replicas: replicas in sync over all processes, of which this process drives `local_replicas`.
      why: the reason for the kind, for people.
      devices: this process's devices, such as "GPU:0".
      accelerator: "cpu", "gpu" or "tpu".
      notes: what a person should know before starting.
      compute_capability: least (major, minor) of the GPUs used; None without GPUs or when unknown.
      gpu_model: the maker's name of the first GPU; empty without one.
      tpu: name or address of the TPU, or "local"; None without one.
      absent: whether it is on devices that this machine need not have, and none is set up.
      runtime: what runs the steps.
      otherwise: what else there is to do where a runtime that nobody has asked for cannot run them.
    """

    kind: str
    num_replicas: int
    local_replicas: int
    why: str
    devices: tuple[str, ...]
    accelerator: str
    notes: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    gpu_model: str = ""
    tpu: str | None = None
    gpu_options: GpuOptions = dataclasses.field(default_factory=GpuOptions)
    absent: bool = False
    runtime: RuntimeKind = TENSORFLOW
    otherwise: str = ""

    @property
    def is_absent(self) -> bool:
        """Whether it is on a TPU that this machine does not have."""
        return self.kind == "tpu" and self.tpu is None


def names(accelerator: str, count: int) -> tuple[str, ...]:
    """ "GPU:0", "GPU:1" and so on."""
    return tuple(f"{accelerator.upper()}:{index}" for index in range(count))


def of_gpus(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Fields of a plan on the GPUs that it uses."""
    capabilities: list[Any] = [gpu.compute_capability for gpu in gpus]
    least = None if None in capabilities else min(capabilities, default=None)
    return {"compute_capability": least, "gpu_model": gpus[0].model if gpus else ""}


def discover() -> Devices:
    """Lists what is attached to this machine and initialises none of it."""
    gpus = []
    for device in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        model = details.get("device_name", device.name)
        gpus.append(Gpu(model=model, compute_capability=details.get("compute_capability")))
    return Devices(
        gpus=tuple(gpus),
        tpus=tuple(device.name for device in tf.config.list_physical_devices("TPU")),
        tpu_chips=tuple(sorted(glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"))),
    )


def gpu_notes(gpus: tuple[Gpu, ...], options: GpuOptions) -> tuple[str, ...]:
    """Notes on the precision of these GPUs, a line for each model."""
    notes = []
    for gpu in dict.fromkeys(gpus):
        capability = gpu.compute_capability
        if capability is None:
            continue
        name = f"{gpu.model} (compute capability {capability[0]}.{capability[1]})"
        if capability < FLOAT16_CAPABILITY:
            notes.append(f"{name}: no Tensor Cores; mixed_float16 pays from 7.0, float32 is the faster choice here")
        elif capability < BFLOAT16_CAPABILITY:
            notes.append(f"{name}: mixed_float16 pays; mixed_bfloat16 only from 8.0")
        else:
            tf32 = "; float32 runs as TF32, gpu.tf32 = False for full float32" if options.tf32 else ""
            notes.append(f"{name}: mixed_float16 and mixed_bfloat16 pay{tf32}")
    return tuple(notes)


def configure_gpus(count: int, options: GpuOptions) -> None:
    """Sets up the first `count` GPUs and leaves the others to other programs; before TensorFlow uses any."""
    gpus = tf.config.list_physical_devices("GPU")
    try:
        tf.config.set_visible_devices(gpus[:count], "GPU")
        for gpu in gpus[:count]:
            tf.config.experimental.set_memory_growth(gpu, options.memory_growth)
    except RuntimeError:  # TensorFlow has been used, as in a notebook: the GPUs stay as they are
        if len(tf.config.list_logical_devices("GPU")) < count:
            raise
    tf.config.experimental.enable_tensor_float_32_execution(options.tf32)
    given = os.environ.get("XLA_FLAGS", "")
    if versions.of(tf.__version__) <= _KNOWS_NCCL_TIMEOUT and _NCCL_TIMEOUT not in given:
        os.environ["XLA_FLAGS"] = f"{given} --{_NCCL_TIMEOUT}={_NCCL_SECONDS}".strip()
    if options.private_threads and "TF_GPU_THREAD_MODE" not in os.environ:
        # Read when TensorFlow creates the GPU devices.
        os.environ["TF_GPU_THREAD_MODE"] = "gpu_private"
        os.environ["TF_GPU_THREAD_COUNT"] = str(options.private_threads)


def settings_left(plan: StrategyPlan) -> tuple[str, ...]:
    """Notes on GPUs that TensorFlow had used before they could be set up, as in a notebook."""
    wanted, gpus = plan.gpu_options.memory_growth, tf.config.list_physical_devices("GPU")
    if plan.accelerator != "gpu" or all(tf.config.experimental.get_memory_growth(gpu) == wanted for gpu in gpus):
        return ()
    return (
        f"TensorFlow was used before: its GPUs stay as they were set up, without gpu.memory_growth = {wanted}; to have "
        "that, restart the kernel and call launcher.fit first",
    )


def configure_logical_cpus(count: int) -> None:
    """Makes at least `count` logical devices of this machine's CPU; before TensorFlow uses it."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(configured) < count:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)

"""GPU machines: so many NVIDIA GPUs on so many hosts, as `--gpu_type` names them, and what XLA is to be told of them.

"h100:8" is one host of eight, "a100-80:8x8" eight hosts of eight.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import tensorflow as tf

from launcher.errors import UsageError, nearest
from launcher.machine.accelerators import CARDS, Card, Constant, constants_of
from launcher.machine.devices import GpuOptions
from launcher.machine.runtime_kinds import PJRT, TENSORFLOW, RuntimeKind
from launcher.machine.strategy import StrategyPlan
from launcher.preflight import advice
from launcher.preflight.compile_child import DUMP_BEFORE_LIBRARIES
from launcher.preflight.compiled import gpu_program
from launcher.preflight.compiled.costs import Collective, Costs
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.compiled.hlo import Module
from launcher.preflight.targets import Target
from launcher.reporting.units import amount, milliseconds, plural
from launcher.run import layer_settings

_MOST_HOSTS = 1024
_JIT = "train.jit_compile = True"
_FIGURES_OF = (
    f"the whole step as one program of XLA. That of {PJRT.flag} is this very one, but for what is tuned on the GPU "
    "itself; without it, train.jit_compile has TensorFlow's own XLA compile the forward and the backward pass, and the "
    "rest runs as kernels, so its figures are near these"
)
_OF_ENGINE = (
    f"a run with {PJRT.flag}, which compiles the step as it is, but for what is tuned on the GPU itself. Of TensorFlow "
    "nothing can be told, as train.jit_compile is off: it runs the step kernel by kernel, which no compiler sees "
    f'whole; with --gin_param="{_JIT}" its figures are near these (of batch normalisation on several GPUs, with '
    f"--gin_param=\"{layer_settings.BATCH_NORM} = 'local'\", too)"
)

# What TensorFlow leaves of a GPU to everything but its own tensors, by the major compute capability.
_SYSTEM_MIB = {7: 1050, 8: 1536}
_SYSTEM_MIB_FROM_9 = 1800
_TF_SOURCE = "what TensorFlow leaves free for them: MinSystemMemory in its common_runtime/gpu/gpu_device.cc"
_SHARE = f"the rest of gpu.memory_share, which {PJRT.flag} takes at its start"
_NCCL_BYTES = 2 * 32 * 4 * 2**20
_NCCL_SOURCE = "to send and to receive, 32 channels of 4 MiB; NCCL's documentation: NCCL_BUFFSIZE, NCCL_MAX_NCHANNELS"
_NCCL_LATENCY = Constant(
    value=6.6,
    unit="µs",
    source="the least that NCCL reckons with, whatever the size: baseLat in its src/graph/tuning.cc",
)
_CUDNN_MOST = 4 * 2**30
_CUDNN_SOURCE = (
    "chosen, not measured: room to turn the tensors of the biggest convolution into another layout, 4 GiB at most as "
    "xla_gpu_redzone_scratch_max_megabytes has it; the algorithm, and so its workspace, is chosen on the GPU"
)
_FRAGMENTATION = 0.05
_FRAGMENTATION_SOURCE = "chosen, not measured: 5% of the program's own"

# What all cards of a compute capability have in common, from the CUDA C++ Programming Guide: threads of a core, KiB of
# shared memory of a core and of a block, lanes.
_ARCHITECTURES = {
    (7, 0): (2048, 96, 96, 64),
    (7, 5): (1024, 64, 64, 64),
    (8, 0): (2048, 164, 163, 64),
    (8, 6): (1536, 100, 99, 128),
    (8, 9): (1536, 100, 99, 128),
    (9, 0): (2048, 228, 227, 128),
    (10, 0): (2048, 228, 227, 128),
    (12, 0): (1536, 100, 99, 128),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuMachines(Target):
    """Hosts with GPUs of one model, `gpus` on each."""

    accelerator: ClassVar[str] = "gpu"
    xla_flags: ClassVar[tuple[str, ...]] = (
        # Its kernels are thrown away: they need not be good.
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        DUMP_BEFORE_LIBRARIES,
    )
    memory_name: ClassVar[str] = "memory"

    card: Card
    gpus: int
    runtime: RuntimeKind  # that the memory left to a step is of
    instead: bool = False  # nobody has asked for this runtime, but it compiles the step

    def describe(self) -> str:
        hosts = plural(self.num_hosts, "host")
        return f"{self.name}: {plural(self.num_replicas, 'GPU')} NVIDIA {self.card.model}, {hosts}"

    @property
    def local_replicas(self) -> int:
        return self.gpus

    def strategy(self) -> StrategyPlan:
        kind = "multi_worker" if self.num_hosts > 1 else "mirrored" if self.gpus > 1 else "one_device"
        return dataclasses.replace(
            super().strategy(),
            kind=self.runtime.name if self.runtime.has_devices else kind,
            runtime=self.runtime,
            compute_capability=self.card.capability,
            gpu_model=self.card.model,
            absent=True,
        )

    @property
    def words(self) -> str:
        return f"{self.name} with {PJRT.flag}" if self.instead else self.name

    @property
    def figures_of(self) -> str:
        return _OF_ENGINE if self.instead else _FIGURES_OF

    def seen_whole(self) -> GpuMachines:
        return dataclasses.replace(self, runtime=PJRT, instead=True)

    def configure(self) -> None:
        tf.config.experimental.enable_tensor_float_32_execution(GpuOptions().tf32)

    def compile_request(self) -> dict[str, Any]:
        return {
            "platform": "cuda",
            "topology": {"topology": self.topology_name, "target_config": _target_config(self.card)},
            "num_replicas": self.num_replicas,
        }

    def count(self, optimised: Module, before_libraries: Module | None) -> Costs:
        return gpu_program.count(optimised, before_libraries)

    def reserved(self, costs: Costs | None, needed: float) -> Mapping[str, Constant]:
        system = _SYSTEM_MIB.get(self.card.capability[0], _SYSTEM_MIB_FROM_9) * 2**20
        if self.runtime.uses_jax:
            parts = {
                "what JAX leaves to CUDA": (round((1 - GpuOptions().memory_share) * self.memory_bytes.value), _SHARE)
            }
        else:
            parts = {"CUDA context, cuDNN, cuBLAS": (system, _TF_SOURCE)}
        convolution = costs.biggest_convolution if costs is not None else 0
        if convolution:
            parts["workspace of convolutions"] = (min(convolution, _CUDNN_MOST), _CUDNN_SOURCE)
        if self.num_replicas > 1 and not self.runtime.uses_jax:
            parts["buffers of NCCL"] = (_NCCL_BYTES, _NCCL_SOURCE)
        parts["fragmentation"] = (round(_FRAGMENTATION * needed), _FRAGMENTATION_SOURCE)
        return {name: Constant(value=size, unit="B", source=source) for name, (size, source) in parts.items()}

    def compute_seconds(self, costs: Costs) -> float:
        return sum(seconds for _, seconds, _ in gpu_program.shares(costs, self.card))

    def compute_words(self, costs: Costs) -> str:
        shares = gpu_program.shares(costs, self.card)
        words = "; ".join(f"{amount(flops)}FLOP of {name}" for name, _, flops in shares) + " a device"
        as_16_bits = gpu_program.seconds_in_16_bits(costs, self.card)
        return words if as_16_bits is None else f"{words}; in bfloat16 {milliseconds(as_16_bits)}"

    def link_seconds(self, collective: Collective) -> float:
        """Within hosts and between them at the same time: the longer of the two."""
        total, crossings = collective.times * collective.bytes, collective.crossings
        inside = outside = 0.0
        if self.gpus > 1:
            in_switch = self.card.reduces_in_switch and collective.kind == "all-reduce"
            inside = total * (1 if in_switch else crossings * (self.gpus - 1) / self.gpus)
        if self.num_hosts > 1:
            outside = total * crossings * (self.num_hosts - 1) / self.num_hosts
        network = self.card.network.value if self.card.network else float("inf")
        return max(inside / self.card.link_bandwidth.value, outside / network)

    def link_words(self) -> str:
        words = f"over {self.card.link} at {self.card.link_bandwidth.value / 1e9:g} GB/s a GPU"
        if self.num_hosts == 1 or self.card.network is None:
            return words
        return f"{words} and a network of {self.card.network.value / 1e9:g} GB/s a host"

    def latency_seconds(self, collective: Collective) -> float:
        return collective.times * _NCCL_LATENCY.value * 1e-6 if self.num_replicas > 1 else 0.0

    def larger(self) -> Iterator[GpuMachines]:
        """More GPUs on one host, then more hosts."""
        gpus = self.gpus
        while self.num_hosts == 1 and gpus < self.card.most_on_a_host:
            gpus = min(2 * gpus, self.card.most_on_a_host)
            yield _machines(self.card, 1, gpus, self.runtime)
        hosts = 2 * self.num_hosts
        while self.card.network is not None and hosts <= _MOST_HOSTS:
            yield _machines(self.card, hosts, gpus, self.runtime)
            hosts *= 2

    def advice(self, costs: Costs, hbm: HbmUse) -> Iterator[str]:
        return advice.tensor_cores(costs, self.card)


def find(gpu_type: str, runtime: RuntimeKind = TENSORFLOW) -> GpuMachines:
    """The machines that a type such as "h100", "h100:8" or "a100-80:8x8" names.

    Raises:
      UsageError: the card is not known or no such machines can be; the message lists what there is.
    """
    match = re.fullmatch(r"([^:]+)(?::(?:(\d+)x)?(\d+))?", gpu_type.strip().lower())
    if match is None:
        raise UsageError(f"--gpu_type={gpu_type}: write CARD:GPUS or CARD:HOSTSxGPUS; cards: {', '.join(CARDS)}")
    name, hosts, gpus = match[1], int(match[2] or 1), int(match[3] or 1)
    if name not in CARDS:
        close = [one for one in CARDS if one.startswith(f"{name}-")] or [one for one in [nearest(name, CARDS)] if one]
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise UsageError(f"--gpu_type={gpu_type}: no such card; {hint}known: {', '.join(CARDS)}")
    card = CARDS[name]
    if not 1 <= gpus <= card.most_on_a_host or not 1 <= hosts <= _MOST_HOSTS:
        raise UsageError(
            f"--gpu_type={gpu_type}: a host has 1 to {card.most_on_a_host} GPUs, and there are 1 to {_MOST_HOSTS} "
            f"hosts; write several hosts as {name}:HOSTSxGPUS, such as {name}:2x{card.most_on_a_host}"
        )
    if hosts > 1 and card.network is None:
        raise UsageError(f"--gpu_type={gpu_type}: no known host of {name} has a network; ask for {name}:{gpus}")
    return _machines(card, hosts, gpus, runtime)


def _machines(card: Card, hosts: int, gpus: int, runtime: RuntimeKind) -> GpuMachines:
    name = f"{card.name}:{f'{hosts}x' if hosts > 1 else ''}{gpus}"
    of_card = {what: one for what, one in constants_of(card).items() if what != "network" or hosts > 1}
    return GpuMachines(
        name=name,
        device_name=card.name,
        link_name="network" if hosts > 1 else card.link,
        topology_name=f"1x{hosts}x{gpus}",
        num_chips=hosts * gpus,
        num_replicas=hosts * gpus,
        num_hosts=hosts,
        memory_bytes=card.memory_bytes,
        memory_bandwidth=card.memory_bandwidth.value,
        peak_flops=card.tensor_flops.value,
        constants={**of_card, "collective_latency": _NCCL_LATENCY},
        # No clock: XLA's own cost model for GPUs gives hours for some kernels and nothing for cuDNN's.
        card=card,
        gpus=gpus,
        runtime=runtime,
    )


def _target_config(card: Card) -> str:
    """XLA's description of the card, a GpuTargetConfigProto as text.

    Only fields that old versions of XLA know as well. A cuDNN and a CUDA runtime must be named for XLA to use
    them; those here are recent ones, and neither need be there.
    """
    threads, core_kib, block_kib, lanes = _ARCHITECTURES[card.capability]
    major, minor = card.capability
    # Instructions that run on this very generation only, which kernels of these generations are made of.
    extension = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": block_kib * 1024,
        "shared_memory_per_core": core_kib * 1024,
        "threads_per_core_limit": threads,
        "core_count": card.cores,
        "fpus_per_core": lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": round(card.memory_bandwidth.value),
        "l2_cache_size": card.l2_bytes,
        "clock_rate_ghz": card.clock_ghz,
        "device_memory_size": round(card.memory_bytes.value),
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    return "\n".join(
        [
            "gpu_device_info {",
            *(f"  {name}: {value}" for name, value in numbers.items()),
            f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 8 }",
            "runtime_version { major: 12 minor: 8 patch: 0 }",
            f'device_description_str: "NVIDIA {card.model}"',
        ]
    )

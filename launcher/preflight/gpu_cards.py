"""NVIDIA GPUs: what one of each can do at most, the constants of every estimate, each with its source.

Peaks are dense, without sparsity, as the maker states them, so times computed from them are bounds from below. Memory
is what a program is told that the card has, which is less than its name says.
"""

from __future__ import annotations

import dataclasses
import re

from launcher.machine.devices import BFLOAT16_CAPABILITY
from launcher.preflight.constants import Constant
from launcher.reporting.units import GIB

_XLA = "XLA's own description of the card, xla/backends/gpu/target_config/specs"
_TORCH = "PyTorch's 'total capacity' in published reports of lacking memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Architecture:
    """What all cards of a compute capability have in common, from the CUDA C++ Programming Guide."""

    threads_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    lanes: int


_ARCHITECTURES = {
    (major, minor): _Architecture(
        threads_per_core=threads,
        shared_memory_per_core=core * 1024,
        shared_memory_per_block=block * 1024,
        lanes=lanes,
    )
    for major, minor, threads, core, block, lanes in (
        (7, 0, 2048, 96, 96, 64),
        (7, 5, 1024, 64, 64, 64),
        (8, 0, 2048, 164, 163, 64),
        (8, 6, 1536, 100, 99, 128),
        (8, 9, 1536, 100, 99, 128),
        (9, 0, 2048, 228, 227, 128),
        (10, 0, 2048, 228, 227, 128),
        (12, 0, 1536, 100, 99, 128),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One model of GPU.

    Attributes:
      name: as `--gpu_type` has it, such as "a100-80".
      model: the maker's name; the driver's has it as words.
      capability: compute capability.
      cores: streaming multiprocessors.
      clock_ghz: at most.
      l2_bytes: of its second cache.
      memory_bytes: that a program is told of.
      memory_bandwidth: bytes/s.
      tensor_flops: 16-bit FLOP/s of the Tensor Cores, sums in float32.
      tf32_flops: FLOP/s of the Tensor Cores on float32 rounded to TF32; None where they cannot.
      float32_flops: FLOP/s of the CUDA cores in float32.
      link: "NVLink", or "PCIe" where no NVLink connects all GPUs of a host.
      link_bandwidth: bytes/s of all links of one GPU, in one direction.
      reduces_in_switch: whether the switch between the GPUs adds up, so that each sends a sum's bytes once.
      network: bytes/s of a host with as many of them as it has, in one direction; None where no such host is published.
      most_on_a_host: how many a host has at most.
    """

    name: str
    model: str
    capability: tuple[int, int]
    cores: int
    clock_ghz: float
    l2_bytes: int
    memory_bytes: Constant
    memory_bandwidth: Constant
    tensor_flops: Constant
    tf32_flops: Constant | None
    float32_flops: Constant
    link: str
    link_bandwidth: Constant
    reduces_in_switch: bool = False
    network: Constant | None = None
    most_on_a_host: int = 8

    @property
    def constants(self) -> dict[str, Constant]:
        """All that are known, by name."""
        names = (
            "memory_bytes", "memory_bandwidth", "tensor_flops", "tf32_flops", "float32_flops", "link_bandwidth",
            "network",
        )  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= BFLOAT16_CAPABILITY

    def target_config(self) -> str:
        """XLA's description of the card, a GpuTargetConfigProto as text.

        Only fields that old versions of XLA know as well. A cuDNN and a CUDA runtime must be named for XLA to use
        them; those here are recent ones, and neither need be there.
        """
        architecture = _ARCHITECTURES[self.capability]
        major, minor = self.capability
        # Instructions that run on this very generation only, which kernels of these generations are made of.
        extension = " feature_extension: ACCELERATED_FEATURES" if major in (9, 10) else ""
        numbers = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_block_optin": architecture.shared_memory_per_block,
            "shared_memory_per_core": architecture.shared_memory_per_core,
            "threads_per_core_limit": architecture.threads_per_core,
            "core_count": self.cores,
            "fpus_per_core": architecture.lanes,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": round(self.memory_bandwidth.value),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": round(self.memory_bytes.value),
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
        }
        lines = [f"  {name}: {value}" for name, value in numbers.items()]
        return "\n".join(
            [
                "gpu_device_info {",
                *lines,
                f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}",
                "}",
                'platform_name: "CUDA"',
                "dnn_version_info { major: 9 minor: 8 }",
                "runtime_version { major: 12 minor: 8 patch: 0 }",
                f'device_description_str: "NVIDIA {self.model}"',
            ]
        )


def _card(
    name: str, model: str, capability: tuple[int, int], cores: int, clock_ghz: float, l2_bytes: int,
    memory: tuple[float, str], sheet: str, *, bandwidth: float, tensor: float, tf32: float | None, float32: float,
    link: tuple[str, int], link_note: str = "", network: tuple[float, str] | None = None, most_on_a_host: int = 8,
) -> Card:  # fmt: skip
    """A card, with numbers as data sheets have them: GB/s, TFLOP/s, and Gbit/s of a network; a link's in one direction.

    Args:
      memory, network: each with its source.
      sheet: where all others stand.
    """

    def flops(tera: float) -> Constant:
        return Constant(value=tera * 1e12, unit="FLOP/s", source=sheet)

    def per_second(giga: float, source: str) -> Constant:
        return Constant(value=giga * 1e9, unit="B/s", source=source)

    kind, speed = link
    slot = f"{kind} x16, " if kind.startswith("PCIe") else ""
    unit = "B/s a host and direction"
    return Card(
        name=name,
        model=model,
        capability=capability,
        cores=cores,
        clock_ghz=clock_ghz,
        l2_bytes=l2_bytes,
        memory_bytes=Constant(value=round(memory[0]), unit="B", source=memory[1]),
        memory_bandwidth=per_second(bandwidth, sheet),
        tensor_flops=flops(tensor),
        tf32_flops=None if tf32 is None else flops(tf32),
        float32_flops=flops(float32),
        link=kind.split()[0],
        link_bandwidth=per_second(speed, f"{slot}{2 * speed:,} GB/s in both directions; {sheet}{link_note}"),
        reduces_in_switch=kind == "NVLink" and capability >= (9, 0),
        network=network
        and Constant(value=network[0] / 8 * 1e9, unit=unit, source=f"{network[0]:g} Gbit/s; {network[1]}"),
        most_on_a_host=most_on_a_host,
    )


_HALF = "of a peak with sparsity the half"
_V100 = "NVIDIA V100 data sheet, SXM2"
_A100, _A100_PCIE = "NVIDIA A100 data sheet, SXM4", "NVIDIA A100 data sheet, PCIe"
_BLACKWELL = f"NVIDIA Blackwell data sheet; {_HALF}"
_PAIRS = "; NVLink joins pairs only"
_RENTED = "rented hosts may have less"
_DGX_1 = (400, f"four ConnectX-4, NVIDIA DGX-1 data sheet; {_RENTED}")
_DGX_A100 = (1600, f"eight ConnectX-6, NVIDIA DGX A100 data sheet; {_RENTED}")
_DGX_H100 = (3200, f"eight ConnectX-7, NVIDIA DGX H100 data sheet; {_RENTED}")
_DGX_B200 = (3200, f"eight ConnectX-7, NVIDIA DGX B200 data sheet; {_RENTED}")
_MIB = 2**20

_CARDS = (
    _card("h100", "H100 80GB HBM3", (9, 0), 132, 1.98, 50 * _MIB, (84_942_979_072, _XLA),
          f"NVIDIA H100 data sheet, SXM5; {_HALF}", bandwidth=3352, tensor=989, tf32=494, float32=67,
          link=("NVLink", 450), network=_DGX_H100),
    _card("h100-pcie", "H100 PCIe", (9, 0), 114, 1.755, 50 * _MIB, (84_942_979_072, _XLA),
          f"NVIDIA H100 data sheet, PCIe; {_HALF}", bandwidth=2039, tensor=756, tf32=378, float32=51,
          link=("PCIe 5.0", 64)),
    _card("h200", "H200", (9, 0), 132, 1.98, 50 * _MIB, (139.72 * GIB, f"the least of {_TORCH}"),
          f"NVIDIA H200 data sheet, SXM; {_HALF}", bandwidth=4800, tensor=989, tf32=494, float32=67,
          link=("NVLink", 450), network=_DGX_H100),
    _card("b200", "B200", (10, 0), 148, 1.965, 132_644_864, (191_514_411_008, _XLA), _BLACKWELL,
          bandwidth=7700, tensor=2250, tf32=1100, float32=75, link=("NVLink", 900), network=_DGX_B200),
    # NVLink connects up to 18 hosts of them: another shape than is reckoned with here.
    _card("gb200", "GB200", (10, 0), 152, 2.062, 135_528_448, (197_897_748_480, _XLA), _BLACKWELL,
          bandwidth=8000, tensor=2500, tf32=1250, float32=80, link=("NVLink", 900), most_on_a_host=4),
    _card("a100-80", "A100-SXM4-80GB", (8, 0), 108, 1.41, 40 * _MIB, (85_100_068_864, _XLA), _A100,
          bandwidth=2039, tensor=312, tf32=156, float32=19.5, link=("NVLink", 300), network=_DGX_A100),
    _card("a100-40", "A100-SXM4-40GB", (8, 0), 108, 1.41, 40 * _MIB, (42_331_013_120, _XLA), _A100,
          bandwidth=1555, tensor=312, tf32=156, float32=19.5, link=("NVLink", 300), network=_DGX_A100),
    _card("a100-pcie-80", "A100 80GB PCIe", (8, 0), 108, 1.41, 40 * _MIB, (79_050_250_240, _XLA), _A100_PCIE,
          bandwidth=1935, tensor=312, tf32=156, float32=19.5, link=("PCIe 4.0", 32), link_note=_PAIRS),
    _card("a100-pcie-40", "A100-PCIE-40GB", (8, 0), 108, 1.41, 40 * _MIB, (42_331_013_120, f"as the SXM4; {_XLA}"),
          _A100_PCIE, bandwidth=1555, tensor=312, tf32=156, float32=19.5, link=("PCIe 4.0", 32), link_note=_PAIRS),
    _card("a10g", "A10G", (8, 6), 80, 1.71, 6 * _MIB, (22.06 * GIB, f"the least of {_TORCH}"),
          f"NVIDIA A10G data sheet, of AWS's G5; {_HALF}", bandwidth=600, tensor=70, tf32=35, float32=31.52,
          link=("PCIe 4.0", 32), network=(100, "AWS's g5.48xlarge, of eight")),
    _card("l40s", "L40S", (8, 9), 142, 2.52, 96 * _MIB, (44.39 * GIB, f"the least of {_TORCH}"),
          f"NVIDIA L40S data sheet; {_HALF}", bandwidth=864, tensor=362.05, tf32=183, float32=91.6,
          link=("PCIe 4.0", 32), network=(400, "AWS's g6e.48xlarge, of eight; others may have less")),
    _card("l4", "L4", (8, 9), 58, 2.04, 48 * _MIB, (22.03 * GIB, _TORCH), f"NVIDIA L4 data sheet; {_HALF}",
          bandwidth=300, tensor=121, tf32=60, float32=30.3, link=("PCIe 4.0", 32),
          network=(100, "Google Cloud's g2-standard-96, of eight; others may have less")),
    _card("v100", "V100-SXM2-16GB", (7, 0), 80, 1.53, 6 * _MIB, (16_935_682_048, _XLA), _V100,
          bandwidth=900, tensor=125, tf32=None, float32=15.7, link=("NVLink", 150), network=_DGX_1),
    _card("v100-32", "V100-SXM2-32GB", (7, 0), 80, 1.53, 6 * _MIB, (31.73 * GIB, f"the least of {_TORCH}"), _V100,
          bandwidth=900, tensor=125, tf32=None, float32=15.7, link=("NVLink", 150), network=_DGX_1),
    _card("t4", "T4", (7, 5), 40, 1.59, 4 * _MIB,
          (15_843_721_216, "CUDA's sample deviceQuery on a T4, as published"), "NVIDIA T4 data sheet",
          bandwidth=320, tensor=65, tf32=None, float32=8.1, link=("PCIe 3.0", 16),
          network=(100, "AWS's g4dn.metal, of eight; others may have less")),
    _card("rtx-a6000", "RTX A6000", (8, 6), 84, 1.8, 6 * _MIB, (51_041_271_808, _XLA),
          f"NVIDIA RTX A6000 data sheet; {_HALF}", bandwidth=768, tensor=154.8, tf32=77.4, float32=38.7,
          link=("PCIe 4.0", 32), link_note=_PAIRS),
    _card("rtx-pro-6000", "RTX PRO 6000", (12, 0), 188, 2.6, 128 * _MIB, (94.97 * GIB, _TORCH),
          f"NVIDIA RTX Blackwell PRO architecture paper; {_HALF}", bandwidth=1792, tensor=503.8, tf32=251.9,
          float32=126, link=("PCIe 5.0", 64)),
)  # fmt: skip

CARDS = {card.name: card for card in _CARDS}

# Words that the driver's name of a card has, and its card; the longest one counts.
_DRIVER_NAMES = {
    "V100": "v100", "T4": "t4", "A100": "a100-80", "A10G": "a10g", "L4": "l4", "L40S": "l40s", "H100 PCIe": "h100-pcie",
    "H100": "h100", "H200": "h200", "B200": "b200", "GB200": "gb200", "RTX A6000": "rtx-a6000",
    "RTX PRO 6000": "rtx-pro-6000",
}  # fmt: skip


def gpu_peak(name: str) -> Constant | None:
    """The 16-bit peak of a GPU, such as "NVIDIA A100-SXM4-80GB"; None where it is not known."""
    found = [words for words in _DRIVER_NAMES if re.search(rf"\b{words}\b", name)]
    return CARDS[_DRIVER_NAMES[max(found, key=len)]].tensor_flops if found else None

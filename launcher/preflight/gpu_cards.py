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


def _memory(size: float, source: str) -> Constant:
    return Constant(value=round(size), unit="B", source=source)


def _bandwidth(giga: float, source: str) -> Constant:
    return Constant(value=giga * 1e9, unit="B/s", source=source)


def _flops(tera: float, source: str) -> Constant:
    return Constant(value=tera * 1e12, unit="FLOP/s", source=source)


def _network(gigabits: float, source: str) -> Constant:
    return Constant(value=gigabits / 8 * 1e9, unit="B/s a host and direction", source=f"{gigabits:g} Gbit/s; {source}")


_V100 = "NVIDIA V100 data sheet, SXM2"
_T4 = "NVIDIA T4 data sheet"
_A100 = "NVIDIA A100 data sheet, SXM4"
_A100_PCIE = "NVIDIA A100 data sheet, PCIe"
_A10G = "NVIDIA A10G data sheet, of AWS's G5; of a peak with sparsity the half"
_L40S = "NVIDIA L40S data sheet; of a peak with sparsity the half"
_L4 = "NVIDIA L4 data sheet; of a peak with sparsity the half"
_H100 = "NVIDIA H100 data sheet, SXM5; of a peak with sparsity the half"
_H100_PCIE = "NVIDIA H100 data sheet, PCIe; of a peak with sparsity the half"
_H200 = "NVIDIA H200 data sheet, SXM; of a peak with sparsity the half"
_BLACKWELL = "NVIDIA Blackwell data sheet; of a peak with sparsity the half"
_A6000 = "NVIDIA RTX A6000 data sheet; of a peak with sparsity the half"
_PRO_6000 = "NVIDIA RTX Blackwell PRO architecture paper; of a peak with sparsity the half"
_DGX_H100 = _network(3200, "eight ConnectX-7, NVIDIA DGX H100 data sheet; rented hosts may have less")

_A100_80 = Card(
    name="a100-80",
    model="A100-SXM4-80GB",
    capability=(8, 0),
    cores=108,
    clock_ghz=1.41,
    l2_bytes=40 * 2**20,
    memory_bytes=_memory(85_100_068_864, _XLA),
    memory_bandwidth=_bandwidth(2039, _A100),
    tensor_flops=_flops(312, _A100),
    tf32_flops=_flops(156, _A100),
    float32_flops=_flops(19.5, _A100),
    link="NVLink",
    link_bandwidth=_bandwidth(300, f"600 GB/s in both directions; {_A100}"),
    network=_network(1600, "eight ConnectX-6, NVIDIA DGX A100 data sheet; rented hosts may have less"),
)
_A100_PCIE_80 = dataclasses.replace(
    _A100_80,
    name="a100-pcie-80",
    model="A100 80GB PCIe",
    memory_bytes=_memory(79_050_250_240, _XLA),
    memory_bandwidth=_bandwidth(1935, _A100_PCIE),
    link="PCIe",
    link_bandwidth=_bandwidth(32, f"PCIe 4.0 x16, 64 GB/s in both directions; {_A100_PCIE}; NVLink joins pairs only"),
    network=None,
)
_V100_16 = Card(
    name="v100",
    model="V100-SXM2-16GB",
    capability=(7, 0),
    cores=80,
    clock_ghz=1.53,
    l2_bytes=6 * 2**20,
    memory_bytes=_memory(16_935_682_048, _XLA),
    memory_bandwidth=_bandwidth(900, _V100),
    tensor_flops=_flops(125, _V100),
    tf32_flops=None,
    float32_flops=_flops(15.7, _V100),
    link="NVLink",
    link_bandwidth=_bandwidth(150, f"300 GB/s in both directions; {_V100}"),
    network=_network(400, "four ConnectX-4, NVIDIA DGX-1 data sheet; rented hosts may have less"),
)
_H100_SXM = Card(
    name="h100",
    model="H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    clock_ghz=1.98,
    l2_bytes=50 * 2**20,
    memory_bytes=_memory(84_942_979_072, _XLA),
    memory_bandwidth=_bandwidth(3352, _H100),
    tensor_flops=_flops(989, _H100),
    tf32_flops=_flops(494, _H100),
    float32_flops=_flops(67, _H100),
    link="NVLink",
    link_bandwidth=_bandwidth(450, f"900 GB/s in both directions; {_H100}"),
    reduces_in_switch=True,
    network=_DGX_H100,
)
_B200 = Card(
    name="b200",
    model="B200",
    capability=(10, 0),
    cores=148,
    clock_ghz=1.965,
    l2_bytes=132_644_864,
    memory_bytes=_memory(191_514_411_008, _XLA),
    memory_bandwidth=_bandwidth(7700, _BLACKWELL),
    tensor_flops=_flops(2250, _BLACKWELL),
    tf32_flops=_flops(1100, _BLACKWELL),
    float32_flops=_flops(75, _BLACKWELL),
    link="NVLink",
    link_bandwidth=_bandwidth(900, f"1,800 GB/s in both directions; {_BLACKWELL}"),
    reduces_in_switch=True,
    network=_network(3200, "eight ConnectX-7, NVIDIA DGX B200 data sheet; rented hosts may have less"),
)
_CARDS = (
    _H100_SXM,
    Card(
        name="h100-pcie",
        model="H100 PCIe",
        capability=(9, 0),
        cores=114,
        clock_ghz=1.755,
        l2_bytes=50 * 2**20,
        memory_bytes=_memory(84_942_979_072, _XLA),
        memory_bandwidth=_bandwidth(2039, _H100_PCIE),
        tensor_flops=_flops(756, _H100_PCIE),
        tf32_flops=_flops(378, _H100_PCIE),
        float32_flops=_flops(51, _H100_PCIE),
        link="PCIe",
        link_bandwidth=_bandwidth(64, f"PCIe 5.0 x16, 128 GB/s in both directions; {_H100_PCIE}"),
    ),
    dataclasses.replace(
        _H100_SXM,
        name="h200",
        model="H200",
        memory_bytes=_memory(139.72 * GIB, f"the least of {_TORCH}"),
        memory_bandwidth=_bandwidth(4800, _H200),
        tensor_flops=_flops(989, _H200),
        tf32_flops=_flops(494, _H200),
        float32_flops=_flops(67, _H200),
        link_bandwidth=_bandwidth(450, f"900 GB/s in both directions; {_H200}"),
    ),
    _B200,
    dataclasses.replace(
        _B200,
        name="gb200",
        model="GB200",
        cores=152,
        clock_ghz=2.062,
        l2_bytes=135_528_448,
        memory_bytes=_memory(197_897_748_480, _XLA),
        memory_bandwidth=_bandwidth(8000, _BLACKWELL),
        tensor_flops=_flops(2500, _BLACKWELL),
        tf32_flops=_flops(1250, _BLACKWELL),
        float32_flops=_flops(80, _BLACKWELL),
        network=None,  # NVLink connects up to 18 hosts: another shape than is reckoned with here
        most_on_a_host=4,
    ),
    _A100_80,
    dataclasses.replace(
        _A100_80,
        name="a100-40",
        model="A100-SXM4-40GB",
        memory_bytes=_memory(42_331_013_120, _XLA),
        memory_bandwidth=_bandwidth(1555, _A100),
    ),
    _A100_PCIE_80,
    dataclasses.replace(
        _A100_PCIE_80,
        name="a100-pcie-40",
        model="A100-PCIE-40GB",
        memory_bytes=_memory(42_331_013_120, f"as the SXM4; {_XLA}"),
        memory_bandwidth=_bandwidth(1555, _A100_PCIE),
    ),
    Card(
        name="a10g",
        model="A10G",
        capability=(8, 6),
        cores=80,
        clock_ghz=1.71,
        l2_bytes=6 * 2**20,
        memory_bytes=_memory(22.06 * GIB, f"the least of {_TORCH}"),
        memory_bandwidth=_bandwidth(600, _A10G),
        tensor_flops=_flops(70, _A10G),
        tf32_flops=_flops(35, _A10G),
        float32_flops=_flops(31.52, _A10G),
        link="PCIe",
        link_bandwidth=_bandwidth(32, f"PCIe 4.0 x16, 64 GB/s in both directions; {_A10G}"),
        network=_network(100, "AWS's g5.48xlarge, of eight"),
    ),
    Card(
        name="l40s",
        model="L40S",
        capability=(8, 9),
        cores=142,
        clock_ghz=2.52,
        l2_bytes=96 * 2**20,
        memory_bytes=_memory(44.39 * GIB, f"the least of {_TORCH}"),
        memory_bandwidth=_bandwidth(864, _L40S),
        tensor_flops=_flops(362.05, _L40S),
        tf32_flops=_flops(183, _L40S),
        float32_flops=_flops(91.6, _L40S),
        link="PCIe",
        link_bandwidth=_bandwidth(32, f"PCIe 4.0 x16, 64 GB/s in both directions; {_L40S}"),
        network=_network(400, "AWS's g6e.48xlarge, of eight; others may have less"),
    ),
    Card(
        name="l4",
        model="L4",
        capability=(8, 9),
        cores=58,
        clock_ghz=2.04,
        l2_bytes=48 * 2**20,
        memory_bytes=_memory(22.03 * GIB, _TORCH),
        memory_bandwidth=_bandwidth(300, _L4),
        tensor_flops=_flops(121, _L4),
        tf32_flops=_flops(60, _L4),
        float32_flops=_flops(30.3, _L4),
        link="PCIe",
        link_bandwidth=_bandwidth(32, f"PCIe 4.0 x16, 64 GB/s in both directions; {_L4}"),
        network=_network(100, "Google Cloud's g2-standard-96, of eight; others may have less"),
    ),
    _V100_16,
    dataclasses.replace(
        _V100_16, name="v100-32", model="V100-SXM2-32GB", memory_bytes=_memory(31.73 * GIB, f"the least of {_TORCH}")
    ),
    Card(
        name="t4",
        model="T4",
        capability=(7, 5),
        cores=40,
        clock_ghz=1.59,
        l2_bytes=4 * 2**20,
        memory_bytes=_memory(15_843_721_216, "CUDA's sample deviceQuery on a T4, as published"),
        memory_bandwidth=_bandwidth(320, _T4),
        tensor_flops=_flops(65, _T4),
        tf32_flops=None,
        float32_flops=_flops(8.1, _T4),
        link="PCIe",
        link_bandwidth=_bandwidth(16, f"PCIe 3.0 x16, 32 GB/s in both directions; {_T4}"),
        network=_network(100, "AWS's g4dn.metal, of eight; others may have less"),
    ),
    Card(
        name="rtx-a6000",
        model="RTX A6000",
        capability=(8, 6),
        cores=84,
        clock_ghz=1.8,
        l2_bytes=6 * 2**20,
        memory_bytes=_memory(51_041_271_808, _XLA),
        memory_bandwidth=_bandwidth(768, _A6000),
        tensor_flops=_flops(154.8, _A6000),
        tf32_flops=_flops(77.4, _A6000),
        float32_flops=_flops(38.7, _A6000),
        link="PCIe",
        link_bandwidth=_bandwidth(32, f"PCIe 4.0 x16, 64 GB/s in both directions; {_A6000}; NVLink joins pairs only"),
    ),
    Card(
        name="rtx-pro-6000",
        model="RTX PRO 6000",
        capability=(12, 0),
        cores=188,
        clock_ghz=2.6,
        l2_bytes=128 * 2**20,
        memory_bytes=_memory(94.97 * GIB, _TORCH),
        memory_bandwidth=_bandwidth(1792, _PRO_6000),
        tensor_flops=_flops(503.8, _PRO_6000),
        tf32_flops=_flops(251.9, _PRO_6000),
        float32_flops=_flops(126, _PRO_6000),
        link="PCIe",
        link_bandwidth=_bandwidth(64, f"PCIe 5.0 x16, 128 GB/s in both directions; {_PRO_6000}"),
    ),
)

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

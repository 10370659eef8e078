"""Accelerators: what a TPU chip or an NVIDIA GPU can do at most, each number with its source.

Peaks are dense, without sparsity, as the maker states them, so times computed from them are bounds from below. Memory
is what a program may use, which is less than the device has. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

FLOAT16_CAPABILITY = (7, 0)
"""From this compute capability on (Volta), Tensor Cores multiply float16."""
BFLOAT16_CAPABILITY = (8, 0)
"""From this one on (Ampere), bfloat16 and TF32 as well."""

_GIB, _MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A number that estimates stand on, its unit and where it is from."""

    value: float
    unit: str
    source: str


def _constants_of(device: Chip | Card) -> dict[str, Constant]:
    found = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return {name: value for name, value in found.items() if isinstance(value, Constant)}


# --------------------------------------------------------------------------------------------------------------- TPUs

_DOCS = "https://cloud.google.com/tpu/docs"
_JOUPPI_2020 = "Jouppi et al. 2020, A Domain-Specific Supercomputer for Training Deep Neural Networks, CACM 63(7)"
_JOUPPI_2023 = "Jouppi et al. 2023, TPU v4, arXiv 2304.01433"
_COMPILER = "libtpu 0.0.51, as its compiler says when a program does not fit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of TPU.

    Attributes:
      family: as accelerator types begin, such as "v5litepod".
      generation: as people call it, such as "v5e".
      devices: devices a chip shows to a program, which are the replicas of TPUStrategy: the two cores of a v2 or v3
        each, else one, of one core or of two that work as one ("megacore").
      hbm_bytes: memory of one device that a program may use, less than the chip has.
      peak_flops: bfloat16 FLOP/s of one chip.
      hbm_bandwidth: bytes/s of one chip.
      link_bandwidth: bytes/s of one link between chips, in one direction.
      mxus: matrix units of one chip, each of `mxu` rows and columns.
      fewest_mxus: where the maker's pages do not agree on their number, the other one; then the clock may be higher.
    """

    family: str
    generation: str
    devices: int = 1
    hbm_bytes: Constant
    peak_flops: Constant
    hbm_bandwidth: Constant
    link_bandwidth: Constant
    mxus: int
    mxu: int = 128
    fewest_mxus: int | None = None

    @property
    def device_peak_flops(self) -> float:
        return self.peak_flops.value / self.devices

    @property
    def device_hbm_bandwidth(self) -> float:
        return self.hbm_bandwidth.value / self.devices

    @property
    def clock(self) -> float:
        """Hertz, at which the matrix units reach the peak: each does mxu x mxu multiply-adds a cycle."""
        return self.peak_flops.value / (2 * self.mxus * self.mxu**2)

    @property
    def clock_words(self) -> str:
        """The clock, and how sure it is."""
        words = f"{self.clock / 1e9:.2f} GHz"
        if self.fewest_mxus is None:
            return words
        other = f"{self.fewest_mxus}, as {_DOCS} has it, {self.mxus / self.fewest_mxus:g} times that"
        return f"{words} (with {self.mxus} matrix units; with {other})"

    @property
    def constants(self) -> dict[str, Constant]:
        return _constants_of(self)


def _chip(
    generation: str, *, family: str | None = None, hbm: float, flops: tuple[float, str], bandwidth: tuple[float, str],
    link: tuple[float, str], **counts: int,
) -> Chip:  # fmt: skip
    """A chip, with numbers as its maker has them: GiB, TFLOP/s and GB/s, each but the memory with its source."""

    def constant(number: tuple[float, str], factor: float, unit: str) -> Constant:
        return Constant(value=number[0] * factor, unit=unit, source=number[1])

    return Chip(
        family=family or generation,
        generation=generation,
        hbm_bytes=constant((hbm, _COMPILER), _GIB, "B a device"),
        peak_flops=constant(flops, 1e12, "FLOP/s a chip"),
        hbm_bandwidth=constant(bandwidth, 1e9, "B/s a chip"),
        link_bandwidth=constant(link, 1e9, "B/s a link and direction"),
        **counts,
    )


V2 = _chip(
    "v2", devices=2, hbm=7.48, flops=(46, f"{_DOCS}/v2; {_JOUPPI_2020}"),
    bandwidth=(700, f"{_DOCS}/v2; {_JOUPPI_2020}"), link=(62, f"496 Gbit/s; {_JOUPPI_2020}"), mxus=2,
)  # fmt: skip
V3 = _chip(
    "v3", devices=2, hbm=15.48, flops=(123, f"{_DOCS}/v3; {_JOUPPI_2020}"),
    bandwidth=(900, f"{_DOCS}/v3; {_JOUPPI_2020}"), link=(82, f"656 Gbit/s; {_JOUPPI_2020}"), mxus=4,
)  # fmt: skip
V4 = _chip(
    "v4", hbm=30.75, flops=(275, f"{_DOCS}/v4"), bandwidth=(1200, f"{_DOCS}/v4; {_JOUPPI_2023}"),
    link=(50, f"6 links of 50 GB/s; {_JOUPPI_2023}"), mxus=8,
)  # fmt: skip
V5E = _chip(
    "v5e", family="v5litepod", hbm=15.75, flops=(197, f"{_DOCS}/v5e"), bandwidth=(819, f"{_DOCS}/v5e"),
    link=(50, f"400 GB/s a chip, over 4 links and both directions; {_DOCS}/v5e"), mxus=4,
)  # fmt: skip
V5P = _chip(
    "v5p", hbm=95.73, flops=(459, f"{_DOCS}/v5p"), bandwidth=(2765, f"{_DOCS}/v5p"),
    link=(100, f"1200 GB/s a chip, over 6 links and both directions; {_DOCS}/v5p"), mxus=8,
)  # fmt: skip
V6E = _chip(
    "v6e", hbm=31.24, flops=(918, f"{_DOCS}/v6e"), bandwidth=(1638, f"{_DOCS}/v6e"),
    link=(100, f"800 GB/s a chip, over 4 links and both directions; {_DOCS}/v6e"), mxus=4, mxu=256, fewest_mxus=2,
)  # fmt: skip

CHIPS = {chip.family: chip for chip in (V2, V3, V4, V5E, V5P, V6E)}

# --------------------------------------------------------------------------------------------------------------- GPUs

_XLA = "XLA's own description of the card, xla/backends/gpu/target_config/specs"
_TORCH = "PyTorch's 'total capacity' in published reports of lacking memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """One model of GPU.

    Attributes:
      name: as `--gpu_type` has it, such as "a100-80".
      model: the maker's name; the driver's has it as words.
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
        return _constants_of(self)

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= BFLOAT16_CAPABILITY


def _card(
    name: str, model: str, capability: tuple[int, int], cores: int, clock_ghz: float, l2_bytes: int,
    memory: tuple[float, str], sheet: str, *, bandwidth: float, tensor: float, tf32: float | None, float32: float,
    link: tuple[str, int], link_note: str = "", network: tuple[float, str] | None = None, most_on_a_host: int = 8,
) -> Card:  # fmt: skip
    """A card, with numbers as data sheets have them: GB/s, TFLOP/s, and Gbit/s of a network; a link's in one direction.

    Memory and network have a source each; all others stand in `sheet`.
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

_CARDS = (
    _card("h100", "H100 80GB HBM3", (9, 0), 132, 1.98, 50 * _MIB, (84_942_979_072, _XLA),
          f"NVIDIA H100 data sheet, SXM5; {_HALF}", bandwidth=3352, tensor=989, tf32=494, float32=67,
          link=("NVLink", 450), network=_DGX_H100),
    _card("h100-pcie", "H100 PCIe", (9, 0), 114, 1.755, 50 * _MIB, (84_942_979_072, _XLA),
          f"NVIDIA H100 data sheet, PCIe; {_HALF}", bandwidth=2039, tensor=756, tf32=378, float32=51,
          link=("PCIe 5.0", 64)),
    _card("h200", "H200", (9, 0), 132, 1.98, 50 * _MIB, (139.72 * _GIB, f"the least of {_TORCH}"),
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
    _card("a10g", "A10G", (8, 6), 80, 1.71, 6 * _MIB, (22.06 * _GIB, f"the least of {_TORCH}"),
          f"NVIDIA A10G data sheet, of AWS's G5; {_HALF}", bandwidth=600, tensor=70, tf32=35, float32=31.52,
          link=("PCIe 4.0", 32), network=(100, "AWS's g5.48xlarge, of eight")),
    _card("l40s", "L40S", (8, 9), 142, 2.52, 96 * _MIB, (44.39 * _GIB, f"the least of {_TORCH}"),
          f"NVIDIA L40S data sheet; {_HALF}", bandwidth=864, tensor=362.05, tf32=183, float32=91.6,
          link=("PCIe 4.0", 32), network=(400, "AWS's g6e.48xlarge, of eight; others may have less")),
    _card("l4", "L4", (8, 9), 58, 2.04, 48 * _MIB, (22.03 * _GIB, _TORCH), f"NVIDIA L4 data sheet; {_HALF}",
          bandwidth=300, tensor=121, tf32=60, float32=30.3, link=("PCIe 4.0", 32),
          network=(100, "Google Cloud's g2-standard-96, of eight; others may have less")),
    _card("v100", "V100-SXM2-16GB", (7, 0), 80, 1.53, 6 * _MIB, (16_935_682_048, _XLA), _V100,
          bandwidth=900, tensor=125, tf32=None, float32=15.7, link=("NVLink", 150), network=_DGX_1),
    _card("v100-32", "V100-SXM2-32GB", (7, 0), 80, 1.53, 6 * _MIB, (31.73 * _GIB, f"the least of {_TORCH}"), _V100,
          bandwidth=900, tensor=125, tf32=None, float32=15.7, link=("NVLink", 150), network=_DGX_1),
    _card("t4", "T4", (7, 5), 40, 1.59, 4 * _MIB,
          (15_843_721_216, "CUDA's sample deviceQuery on a T4, as published"), "NVIDIA T4 data sheet",
          bandwidth=320, tensor=65, tf32=None, float32=8.1, link=("PCIe 3.0", 16),
          network=(100, "AWS's g4dn.metal, of eight; others may have less")),
    _card("rtx-a6000", "RTX A6000", (8, 6), 84, 1.8, 6 * _MIB, (51_041_271_808, _XLA),
          f"NVIDIA RTX A6000 data sheet; {_HALF}", bandwidth=768, tensor=154.8, tf32=77.4, float32=38.7,
          link=("PCIe 4.0", 32), link_note=_PAIRS),
    _card("rtx-pro-6000", "RTX PRO 6000", (12, 0), 188, 2.6, 128 * _MIB, (94.97 * _GIB, _TORCH),
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


# --------------------------------------------------------------------------------------- TensorFlow's wheels for GPUs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaWheels:
    """What TensorFlow's own wheels of one version are built for; docs/install.md shows the table.

    Attributes:
      cuda, cudnn: versions, as the wheels' `[and-cuda]` requires them at least.
      kernels: as `tf.sysconfig.get_build_info()["cuda_compute_capabilities"]` of the wheel has it.
    """

    cuda: str
    cudnn: str
    kernels: tuple[str, ...]


_SINCE_2_17 = ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90")
_SINCE_2_18 = CudaWheels(cuda="12.5", cudnn="9.3", kernels=_SINCE_2_17)

CUDA_WHEELS = {
    "2.16": CudaWheels(cuda="12.3", cudnn="8.9", kernels=("sm_50", "sm_60", "sm_70", "sm_80", "compute_90")),
    "2.17": CudaWheels(cuda="12.3", cudnn="8.9", kernels=_SINCE_2_17),
    **dict.fromkeys(("2.18", "2.19", "2.20", "2.21"), _SINCE_2_18),
}
"""By X.Y, read in the wheels of 2.16.2, 2.17.1, 2.18.1, 2.19.1, 2.20.0 and 2.21.0 for Python 3.11."""

OLDEST_DRIVERS = {12: "525.60.13", 13: "580"}
"""By CUDA's major version: NVIDIA, CUDA Compatibility, "Minor Version Compatibility"; CUDA Toolkit Release Notes."""

KERNELS, PTX = "kernels", "PTX"


def how_it_runs(kernels: Iterable[str], capability: tuple[int, int]) -> str | None:
    """How a build runs on a GPU: by KERNELS of it, by PTX that the driver compiles first, or, None, not at all.

    A kernel runs on the GPUs of its major version from its minor one on; "compute_90" is kernels and PTX, which any
    later GPU can compile (CUDA C++ Programming Guide, "Compute Capabilities").
    """
    numbered = re.findall(r"(sm|compute)_(\d+)", " ".join(kernels))
    built = [(name == "compute", divmod(int(number), 10)) for name, number in numbered]
    if any(found[0] == capability[0] and found[1] <= capability[1] for _, found in built):
        return KERNELS
    return PTX if any(is_ptx and found <= capability for is_ptx, found in built) else None


def older(version: str, than: str) -> bool:
    """Whether a dotted version, as of a driver or cuDNN, is below another one."""
    one, other = (tuple(map(int, re.findall(r"\d+", text))) for text in (version, than))
    return one[: len(other)] < other

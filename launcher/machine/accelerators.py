"""Accelerators: what a TPU chip or an NVIDIA GPU can do at most.

The numbers are in accelerators.json beside this file, each with its source.

Peaks are dense, without sparsity, as the maker states them, so times computed from them are bounds from below. Memory
is what a program may use, which is less than the device has. Imports no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FLOAT16_CAPABILITY = (7, 0)
"""From this compute capability on (Volta), Tensor Cores multiply float16."""
BFLOAT16_CAPABILITY = (8, 0)
"""From this one on (Ampere), bfloat16 and TF32 as well."""
FLOAT8_CAPABILITY = (8, 9)
"""From this one on (Ada, Hopper), 8-bit floats."""
WITHOUT_TRITON = "xla_gpu_enable_triton_gemm", False


def xla_options(stablehlo: str) -> dict[str, bool]:
    """XLA's options for GPUs that a program needs, as MLIR text.

    Products of what was rounded to 8 bits are cuBLAS's 8-bit ones only without Triton's: where those are allowed, XLA
    of JAX 0.10.2 multiplies in 16 bits, and leaves the rounding out, too.
    """
    return dict([WITHOUT_TRITON]) if "f8E4M3FN" in stablehlo else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A number that estimates stand on, its unit and where it is from."""

    value: float
    unit: str
    source: str


def constants_of(device: Chip | Card) -> dict[str, Constant]:
    """The numbers of a device that estimates stand on, by name."""
    fields = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    return {name: value for name, value in fields.items() if isinstance(value, Constant)}


# --------------------------------------------------------------------------------------------------------------- TPUs

_DOCS = "https://cloud.google.com/tpu/docs"


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


# --------------------------------------------------------------------------------------------------------------- GPUs


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
      network: bytes/s of a host with as many of them as it has, in one direction; None where no such host is
        published, or where NVLink connects hosts, as those of GB200: another shape than is reckoned with here.
      attention_kernel: the run in which cuDNN's attention gave plain attention's losses and gradients on it.
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
    attention_kernel: str = ""

    @property
    def has_bfloat16(self) -> bool:
        return self.capability >= BFLOAT16_CAPABILITY

    @property
    def float8_flops(self) -> float:
        """FLOP/s of the Tensor Cores on 8-bit floats: the data sheets of all that have them state twice 16-bit ones."""
        return 2 * self.tensor_flops.value


_KNOWN = json.loads(Path(__file__).with_name("accelerators.json").read_text("utf-8"))


def _read(row: dict[str, Any]) -> dict[str, Any]:
    def field(value: Any) -> Any:
        if isinstance(value, dict):
            number = value["value"] if "value" in value else value["gib"] * 2**30
            return Constant(value=number, unit=value["unit"], source=value["source"])
        return tuple(value) if isinstance(value, list) else value

    return {name: field(value) for name, value in row.items()}


CHIPS = {row["family"]: Chip(**_read(row)) for row in _KNOWN["chips"]}
V2, V3, V4, V5E, V5P, V6E = CHIPS.values()
CARDS = {row["name"]: Card(**_read(row)) for row in _KNOWN["cards"]}

ATTENTION_KERNEL = {card.capability for card in CARDS.values() if card.attention_kernel}
"""Compute capabilities, for which cuDNN's kernels are compiled, of the cards on which its attention has been right."""

# Words that the driver's name of a card has, and its card; the longest one counts.
_DRIVER_NAMES: dict[str, str] = _KNOWN["driver_names"]


def card_of(name: str) -> Card | None:
    """The card of a GPU by the driver's name, such as "NVIDIA A100-SXM4-80GB"; None where it is not known."""
    known = [words for words in _DRIVER_NAMES if re.search(rf"\b{words}\b", name)]
    return CARDS[_DRIVER_NAMES[max(known, key=len)]] if known else None


# --------------------------------------------------------------------------------------- TensorFlow's wheels for GPUs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaWheels:
    """GPUs and libraries that TensorFlow's own wheels of one version are built for; docs/install.md shows the table.

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
    """The way a build runs on a GPU: by KERNELS of it, by PTX that the driver compiles first, or, None, not at all.

    A kernel runs on the GPUs of its major version from its minor one on; "compute_90" is kernels and PTX, which any
    later GPU can compile (CUDA C++ Programming Guide, "Compute Capabilities").
    """
    numbered = re.findall(r"(sm|compute)_(\d+)", " ".join(kernels))
    built = [(name == "compute", divmod(int(number), 10)) for name, number in numbered]
    if any(version[0] == capability[0] and version[1] <= capability[1] for _, version in built):
        return KERNELS
    return PTX if any(is_ptx and version <= capability for is_ptx, version in built) else None


def older(version: str, than: str) -> bool:
    """Whether a dotted version, as of a driver or cuDNN, is below another one."""
    mine, theirs = (tuple(map(int, re.findall(r"\d+", text))) for text in (version, than))
    return mine[: len(theirs)] < theirs

"""TPU chips: what one of each generation can do at most: the constants of every estimate, each with its source.

All are ceilings that the maker states, so times computed from them are bounds from below.
"""

from __future__ import annotations

import dataclasses

from launcher.preflight.constants import Constant
from launcher.reporting.units import GIB

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
      mxus: matrix units of one chip.
      mxu: rows and columns of each.
      fewest_mxus: where the maker's pages do not agree on their number, the other one; then the clock may be higher.
    """

    family: str
    generation: str
    devices: int
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
        times = self.mxus / self.fewest_mxus
        return (
            f"{words} (with {self.mxus} matrix units; with {self.fewest_mxus}, as {_DOCS} has it, {times:g} times that)"
        )

    @property
    def constants(self) -> dict[str, Constant]:
        """All of them, by name."""
        names = ("hbm_bytes", "peak_flops", "hbm_bandwidth", "link_bandwidth")
        return {name: getattr(self, name) for name in names}


def _hbm(gib: float) -> Constant:
    return Constant(value=gib * GIB, unit="B a device", source=_COMPILER)


def _flops(tera: float, source: str) -> Constant:
    return Constant(value=tera * 1e12, unit="FLOP/s a chip", source=source)


def _bandwidth(giga: float, source: str) -> Constant:
    return Constant(value=giga * 1e9, unit="B/s a chip", source=source)


def _link(giga: float, source: str) -> Constant:
    return Constant(value=giga * 1e9, unit="B/s a link and direction", source=source)


V2 = Chip(
    family="v2",
    generation="v2",
    devices=2,
    hbm_bytes=_hbm(7.48),
    peak_flops=_flops(46, f"{_DOCS}/v2; {_JOUPPI_2020}"),
    hbm_bandwidth=_bandwidth(700, f"{_DOCS}/v2; {_JOUPPI_2020}"),
    link_bandwidth=_link(62, f"496 Gbit/s; {_JOUPPI_2020}"),
    mxus=2,
)
V3 = Chip(
    family="v3",
    generation="v3",
    devices=2,
    hbm_bytes=_hbm(15.48),
    peak_flops=_flops(123, f"{_DOCS}/v3; {_JOUPPI_2020}"),
    hbm_bandwidth=_bandwidth(900, f"{_DOCS}/v3; {_JOUPPI_2020}"),
    link_bandwidth=_link(82, f"656 Gbit/s; {_JOUPPI_2020}"),
    mxus=4,
)
V4 = Chip(
    family="v4",
    generation="v4",
    devices=1,
    hbm_bytes=_hbm(30.75),
    peak_flops=_flops(275, f"{_DOCS}/v4"),
    hbm_bandwidth=_bandwidth(1200, f"{_DOCS}/v4; {_JOUPPI_2023}"),
    link_bandwidth=_link(50, f"6 links of 50 GB/s; {_JOUPPI_2023}"),
    mxus=8,
)
V5E = Chip(
    family="v5litepod",
    generation="v5e",
    devices=1,
    hbm_bytes=_hbm(15.75),
    peak_flops=_flops(197, f"{_DOCS}/v5e"),
    hbm_bandwidth=_bandwidth(819, f"{_DOCS}/v5e"),
    link_bandwidth=_link(50, f"400 GB/s a chip, over 4 links and both directions; {_DOCS}/v5e"),
    mxus=4,
)
V5P = Chip(
    family="v5p",
    generation="v5p",
    devices=1,
    hbm_bytes=_hbm(95.73),
    peak_flops=_flops(459, f"{_DOCS}/v5p"),
    hbm_bandwidth=_bandwidth(2765, f"{_DOCS}/v5p"),
    link_bandwidth=_link(100, f"1200 GB/s a chip, over 6 links and both directions; {_DOCS}/v5p"),
    mxus=8,
)
V6E = Chip(
    family="v6e",
    generation="v6e",
    devices=1,
    hbm_bytes=_hbm(31.24),
    peak_flops=_flops(918, f"{_DOCS}/v6e"),
    hbm_bandwidth=_bandwidth(1638, f"{_DOCS}/v6e"),
    link_bandwidth=_link(100, f"800 GB/s a chip, over 4 links and both directions; {_DOCS}/v6e"),
    mxus=4,
    mxu=256,
    fewest_mxus=2,
)

CHIPS = {chip.family: chip for chip in (V2, V3, V4, V5E, V5P, V6E)}

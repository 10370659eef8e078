"""TPU slices: as gcloud's `--accelerator-type` names them, and how the compiler names and lays out the same.

Their shapes are in tpu_slices.txt. v2 to v4 and v5p count cores, two a chip; v5litepod and v6e chips.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from launcher.errors import UsageError, advice
from launcher.machine.accelerators import CHIPS, V2, V3, V4, V5E, V5P, V6E, Chip, Constant, constants_of
from launcher.preflight.advice import padding
from launcher.preflight.compiled.costs import Collective, Costs
from launcher.preflight.compiled.hbm import HbmUse
from launcher.preflight.targets import Target
from launcher.reporting.units import amount, first, plural

_FILE = Path(__file__).with_name("tpu_slices.txt")
_CHIPS_A_HOST = 4
_SHOWN = 24

# The name that libtpu has for a family, where it is another one.
_LIBTPU = {V5E.family: "v5e", V5P.family: "v5"}
# An axis is closed to a ring when it is as long as the pod's; slices of v4 and v5p are cubes of 4x4x4 whose optical
# switches close every axis.
_RING = {V2.family: 16, V3.family: 32, V5E.family: 16, V6E.family: 16}
_CUBE = 4
_HOP = Constant(
    value=1.0,
    unit="µs",
    source="about, whatever the size; Austin et al. 2025, How To Scale Your Model, jax-ml.github.io/scaling-book",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice(Target):
    """A slice of a TPU pod; its devices are those of the compiler and the replicas of TPUStrategy."""

    accelerator: ClassVar[str] = "tpu"
    memory_name: ClassVar[str] = "HBM"
    link_name: str = "ICI"

    chip: Chip
    shape: tuple[int, ...]  # chips along each axis
    host_shape: tuple[int, int, int]  # chips of one host along each axis

    @property
    def links(self) -> int:
        """Links of the chip that has the fewest, a corner: two along a closed axis, one along an open one."""
        return sum((2 if self._closed(length) else 1) for length in self.shape if length > 1)

    def _closed(self, length: int) -> bool:
        if self.chip.family in _RING:
            return length >= _RING[self.chip.family]
        return all(axis % _CUBE == 0 for axis in self.shape)

    def describe(self) -> str:
        """For people: "v5litepod-256: 256 chips (16x16), 256 replicas, 64 hosts"."""
        shape, hosts = "x".join(map(str, self.shape)), plural(self.num_hosts, "host")
        return f"{self.name}: {plural(self.num_chips, 'chip')} ({shape}), {self.num_replicas} replicas, {hosts}"

    def compile_request(self) -> dict[str, Any]:
        topology: dict[str, str | list[int]] = {"topology_name": self.topology_name}
        if math.prod(self.host_shape) != _CHIPS_A_HOST:
            topology["chips_per_host_bounds"] = [*self.host_shape]
        if self.chip is V4:  # else a device for each of the two cores of a chip
            topology["chip_config_name"] = "megacore"
        return {"platform": "tpu", "topology": topology, "num_replicas": self.num_replicas}

    def compute_seconds(self, costs: Costs) -> float:
        return costs.flops / self.peak_flops

    def compute_words(self, costs: Costs) -> str:
        return f"{amount(costs.flops)}FLOP a device"

    def link_seconds(self, collective: Collective) -> float:
        """Over the links of a corner chip; all cores of a chip are taken to add up on the chip first."""
        chips = self.num_chips
        if chips == 1 or not self.links:
            return 0.0
        crossings = collective.crossings * (chips - 1) / chips
        return collective.times * collective.bytes * crossings / (self.links * self.chip.link_bandwidth.value)

    def link_words(self) -> str:
        return f"over the {self.links} {'link' if self.links == 1 else 'links'} of a corner chip"

    def latency_seconds(self, collective: Collective) -> float:
        """Along the longest way through the slice, for a sum of all there and back."""
        hops = sum(length // 2 if self._closed(length) else length - 1 for length in self.shape)
        return collective.times * collective.crossings * hops * _HOP.value * 1e-6

    def larger(self) -> Iterator[Slice]:
        """Slices of the family."""
        return (one for one in SLICES.values() if one.chip is self.chip and one.num_replicas > self.num_replicas)

    def advice(self, costs: Costs, hbm: HbmUse) -> Iterator[str]:
        return padding(costs, hbm, self.chip)


def _slices() -> Iterator[Slice]:
    for line in _FILE.read_text("utf-8").splitlines():
        if not line.startswith("#"):
            family, counts, _, *shapes = line.split()
            for text in shapes:
                yield _slice(CHIPS[family], counts == "cores", tuple(map(int, text.split("x"))))


def _slice(chip: Chip, counts_cores: bool, shape: tuple[int, ...]) -> Slice:
    num_chips = math.prod(shape)
    host_shape = (2, 2, 1)
    if num_chips == 1:
        host_shape = (1, 1, 1)
    elif chip in (V5E, V6E) and num_chips == 8:
        host_shape = (2, 4, 1)
    return Slice(
        name=f"{chip.family}-{num_chips * (2 if counts_cores else 1)}",
        device_name=chip.generation,
        topology_name=f"{_LIBTPU.get(chip.family, chip.family)}:{'x'.join(map(str, shape))}",
        num_chips=num_chips,
        num_replicas=num_chips * chip.devices,
        num_hosts=num_chips // math.prod(host_shape),
        memory_bytes=chip.hbm_bytes,
        memory_bandwidth=chip.device_hbm_bandwidth,
        peak_flops=chip.device_peak_flops,
        constants={**constants_of(chip), "hop_latency": _HOP},
        clock=chip.clock,
        clock_words=chip.clock_words,
        chip=chip,
        shape=shape,
        host_shape=host_shape,
    )


SLICES = {one.name: one for one in _slices()}

# Names of a family that are in use elsewhere, as in Kubernetes and in what people say.
_ALIASES = {"v5e": V5E.family, "v5lite": V5E.family, "v5litepods": V5E.family, "v5": V5P.family, "v6": V6E.family}

_WITHOUT_TENSORFLOW = ("7x", "v7x", "v7", "7", "ironwood")


def find(accelerator_type: str) -> Slice:
    """The slice that an accelerator type names, or what it is called elsewhere, such as "v5e-8" or "tpu-v4-32".

    Raises:
      UsageError: no such generation, or no slice of that size; the message offers the nearest.
    """
    name = accelerator_type.strip()
    family, _, size = name.lower().removeprefix("tpu").removeprefix("-").partition("-")
    family = _ALIASES.get(family, family)
    if f"{family}-{size}" in SLICES:
        return SLICES[f"{family}-{size}"]
    if family in _WITHOUT_TENSORFLOW:
        raise UsageError(f"--tpu_type={name}: TensorFlow does not support TPU7x (Ironwood); known: {', '.join(CHIPS)}")
    if family not in CHIPS:
        raise UsageError(f"--tpu_type={name}: no such accelerator type{advice(family, CHIPS)}")
    names, hint = [one for one, found in SLICES.items() if found.chip.family == family], ""
    if size.isdecimal():
        close = min(names, key=lambda one: abs(int(one.rpartition("-")[2]) - int(size)))
        hint = f"; the nearest is {close}"
    raise UsageError(f"--tpu_type={name}: there is no such slice of {family}{hint}. Listed: {first(names, _SHOWN)}")

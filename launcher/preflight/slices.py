"""TPU slices: as gcloud's `--accelerator-type` names them, and how the compiler names and lays out the same.

The sizes are those that Google lists (https://cloud.google.com/tpu/docs, a page for each generation) and, for v4 and
v5p, the shapes that its tools give them by default. v2 to v4 and v5p count cores, two a chip; v5litepod and v6e chips.
"""

from __future__ import annotations

import dataclasses
import math
import re

from launcher.errors import UsageError, nearest
from launcher.preflight.chips import CHIPS, V2, V3, V4, V5E, V5P, V6E, Chip

_CHIPS_A_HOST = 4
_SHOWN = 24

_SHAPES: dict[str, str] = {
    V2.family: "2x2 4x4 8x8 8x16 16x16",
    V3.family: "2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32",
    V4.family: "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 8x8x8 8x8x12 8x8x16 8x16x16",
    V5E.family: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    V5P.family: """2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 4x4x20 4x8x12 4x4x28 8x8x8 4x12x12 4x8x20 4x4x44
        8x8x12 4x4x52 4x8x28 4x12x20 8x8x16 4x4x68 8x12x12 4x4x76 8x8x20 4x12x28 4x8x44 4x4x92 8x12x16 4x20x20 4x8x52
        12x12x12 8x8x28 4x4x116 8x12x20 4x4x124 8x16x16 4x12x44 4x8x68 4x20x28 12x12x16 4x4x148 4x8x76 4x12x52 8x16x20
        4x4x164 8x12x28 4x4x172 8x8x44 12x12x20 4x8x92 4x4x188 12x16x16 4x28x28 8x20x20 4x12x68 8x8x52 4x4x212 12x12x24
        4x20x44 8x16x28 4x12x76 4x8x116 4x4x236 12x16x20 4x4x244 4x8x124 12x12x28 16x16x16 4x20x52 8x12x44 8x8x68
        4x12x92 8x20x28 12x16x24 4x8x148 12x20x20 8x8x76 4x28x44 8x12x52 16x16x20 12x12x36 4x8x164 12x16x28 4x20x68
        4x8x172 4x12x116 8x16x44 12x20x24 4x28x52 8x8x92 4x12x124 4x8x188 4x20x76 16x16x24 12x24x24 16x20x28""",
    V6E.family: "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
}
_COUNTS_CORES = (V2.family, V3.family, V4.family, V5P.family)
# The name that libtpu has for a family, where it is another one.
_LIBTPU = {V5E.family: "v5e", V5P.family: "v5"}
# An axis is closed to a ring when it is as long as the pod's; slices of v4 and v5p are cubes of 4x4x4 whose optical
# switches close every axis.
_RING = {V2.family: 16, V3.family: 32, V5E.family: 16, V6E.family: 16}
_CUBE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """A slice of a TPU pod, as it can be asked for.

    Attributes:
      accelerator_type: such as "v5litepod-256".
      chip: its generation.
      shape: chips along each axis.
    """

    accelerator_type: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_replicas(self) -> int:
        """Devices of the compiler and replicas of TPUStrategy."""
        return self.num_chips * self.chip.devices

    @property
    def num_hosts(self) -> int:
        return self.num_chips // math.prod(self._host_shape)

    @property
    def topology_name(self) -> str:
        """As libtpu calls it, such as "v5e:16x16"."""
        family = self.chip.family
        return f"{_LIBTPU.get(family, family)}:{'x'.join(map(str, self.shape))}"

    @property
    def topology_options(self) -> dict[str, str | list[int]]:
        """What libtpu must be told beyond the name."""
        options: dict[str, str | list[int]] = {}
        if math.prod(self._host_shape) != _CHIPS_A_HOST:
            options["chips_per_host_bounds"] = [*self._host_shape]
        if self.chip is V4:  # else a device for each of the two cores of a chip
            options["chip_config_name"] = "megacore"
        return options

    @property
    def links(self) -> int:
        """Links of the chip that has the fewest, a corner: two along a closed axis, one along an open one."""
        return sum((2 if self._closed(length) else 1) for length in self.shape if length > 1)

    def _closed(self, length: int) -> bool:
        if self.chip.family in _RING:
            return length >= _RING[self.chip.family]
        return all(axis % _CUBE == 0 for axis in self.shape)

    @property
    def _host_shape(self) -> tuple[int, int, int]:
        if self.num_chips == 1:
            return (1, 1, 1)
        if self.chip in (V5E, V6E) and self.num_chips == 8:
            return (2, 4, 1)
        return (2, 2, 1)

    def describe(self) -> str:
        """For people: "v5litepod-256: 256 chips (16x16), 256 replicas, 64 hosts"."""
        hosts = "1 host" if self.num_hosts == 1 else f"{self.num_hosts} hosts"
        chips = "1 chip" if self.num_chips == 1 else f"{self.num_chips} chips"
        shape = "x".join(map(str, self.shape))
        return f"{self.accelerator_type}: {chips} ({shape}), {self.num_replicas} replicas, {hosts}"


def _slices() -> dict[str, Slice]:
    found = {}
    for family, shapes in _SHAPES.items():
        for text in shapes.split():
            shape = tuple(int(length) for length in text.split("x"))
            count = math.prod(shape) * (2 if family in _COUNTS_CORES else 1)
            name = f"{family}-{count}"
            found[name] = Slice(accelerator_type=name, chip=CHIPS[family], shape=shape)
    return found


SLICES = _slices()

# Names of a family that are in use elsewhere, as in Kubernetes and in what people say.
_ALIASES = {"v5e": V5E.family, "v5lite": V5E.family, "v5litepods": V5E.family, "v5": V5P.family, "v6": V6E.family}


def find(accelerator_type: str) -> Slice:
    """The slice that an accelerator type names.

    Raises:
      UsageError: no such generation, or no slice of that size; the message offers the nearest.
    """
    name = accelerator_type.strip()
    if name in SLICES:
        return SLICES[name]
    match = re.fullmatch(r"(?:tpu-?)?([a-z0-9]+?)(?:-(\d+))?", name.lower())
    family, size = (match[1], match[2]) if match else (name.lower(), None)
    known = _ALIASES.get(family, family)
    if known not in CHIPS:
        close = nearest(known, [*CHIPS, *_ALIASES])
        hint = _ALIASES.get(close, close) if close else None
        offer = f"did you mean {_offer(hint, size)!r}?" if hint else f"known: {', '.join(f'{one}-N' for one in CHIPS)}"
        raise UsageError(f"--tpu_type={name}: no such accelerator type; {offer}")
    if f"{known}-{size}" in SLICES:
        raise UsageError(f"--tpu_type={name}: no such accelerator type; did you mean '{known}-{size}'?")
    raise UsageError(
        f"--tpu_type={name}: there is no such slice of {known}{_nearest_size(known, size)}. Listed: {_listed(known)}"
    )


def _offer(family: str, size: str | None) -> str:
    return f"{family}-{size}" if f"{family}-{size}" in SLICES else _sizes(family)[0]


def _sizes(family: str) -> list[str]:
    return [name for name, found in SLICES.items() if found.chip.family == family]


def _nearest_size(family: str, size: str | None) -> str:
    if size is None:
        return ""
    close = min(_sizes(family), key=lambda name: abs(int(name.rpartition("-")[2]) - int(size)))
    return f"; the nearest is {close}"


def _listed(family: str) -> str:
    names = _sizes(family)
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN - 1])} and others up to {names[-1]}"

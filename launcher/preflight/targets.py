"""Targets: the devices that a step can be compiled for, as the rest of preflight sees them.

`slices.Slice` is one of TPUs, `gpus.GpuMachines` one of NVIDIA GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from launcher.preflight.constants import Constant

if TYPE_CHECKING:
    from launcher.machine.strategy import StrategyPlan
    from launcher.preflight.costs import Collective, Costs, Operation
    from launcher.preflight.hbm import HbmUse
    from launcher.preflight.hlo import Module
    from launcher.run.plan import RunPlan

# How often the bytes of a collective cross a device's links at least, for n devices times (n - 1) / n: a sum over all
# is scattered and then gathered (Patarasuk and Yuan 2009).
CROSSINGS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-permute": 1}


class Target(Protocol):
    """Devices that a step can be compiled for.

    Attributes:
      name: as its flag has it, such as "v5litepod-256" or "h100:8".
      flag: what asks for it, such as "--tpu_type=v5litepod-256".
      accelerator: "tpu" or "gpu".
      device_name: of one device, for people.
      memory_name, wire_name: what the bounds call its memory and what connects its devices, such as "HBM" and "ICI".
      topology_name: as its compiler calls it.
      num_chips, num_replicas, num_hosts: of all of them together.
      memory_bytes: of one replica.
      peak_flops: 16-bit FLOP/s of one replica, of which MFU is a share.
      clock: hertz of the cycles of its compiler's cost model; None where that tells nothing of use.
      constants: every number that its estimates use, by name.
      figures_of: what of a run the figures are of; empty where it is the very program.
    """

    @property
    def name(self) -> str: ...
    @property
    def flag(self) -> str: ...
    @property
    def accelerator(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def memory_name(self) -> str: ...
    @property
    def wire_name(self) -> str: ...
    @property
    def topology_name(self) -> str: ...
    @property
    def num_chips(self) -> int: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def num_hosts(self) -> int: ...
    @property
    def memory_bytes(self) -> Constant: ...
    @property
    def peak_flops(self) -> float: ...
    @property
    def clock(self) -> float | None: ...
    @property
    def clock_words(self) -> str: ...
    @property
    def constants(self) -> Mapping[str, Constant]: ...
    @property
    def figures_of(self) -> str: ...

    def describe(self) -> str:
        """For people, in a line."""
        ...

    def strategy(self) -> StrategyPlan:
        """How a run on them would be distributed."""
        ...

    def check(self, plan: RunPlan) -> None:
        """Raises UsageError where nothing can be told of such a run."""
        ...

    def configure(self) -> None:
        """Sets TensorFlow up as a run on them does, as far as that changes what is lowered."""
        ...

    def compile_request(self) -> dict[str, Any]:
        """What the compiler's process must know: the arguments of `xla_compiler.compile_program`, and "xla_flags"."""
        ...

    def count(self, optimised: Module, before_libraries: Module | None) -> Costs:
        """Costs of a program.

        Args:
          optimised: what the compiler made of it.
          before_libraries: the same before parts of it became calls of libraries; None where none does.
        """
        ...

    def reserved(self, costs: Costs | None, needed: float) -> Mapping[str, Constant]:
        """Memory of a device that is needed beside a program's own, by what for; empty if the compiler reckons with it.

        Args:
          costs: of the program, where known.
          needed: bytes of the program itself.
        """
        ...

    def compute_seconds(self, costs: Costs) -> float:
        """Seconds that the matrix arithmetic of a step needs at least."""
        ...

    def compute_words(self, costs: Costs) -> str:
        """How much arithmetic that is, and of what."""
        ...

    def memory_seconds(self, costs: Costs | Operation) -> float:
        """Seconds that its memory traffic needs at least."""
        ...

    def wire_seconds(self, collective: Collective) -> float:
        """Seconds that one collective needs at least, all its turns together."""
        ...

    def wire_words(self) -> str:
        """What the collectives go over, such as "over the 2 links of a corner chip"."""
        ...

    def latency_seconds(self, collective: Collective) -> float:
        """Seconds that one collective takes whatever its size, about, all its turns together."""
        ...

    def larger(self) -> Iterator[Target]:
        """More of the same devices, from the fewest on."""
        ...

    def advice(self, costs: Costs, hbm: HbmUse) -> Iterator[str]:
        """What could be better about a step on these very devices, a sentence each."""
        ...

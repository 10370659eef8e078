"""Targets: the devices that a step can be compiled for, as the rest of preflight sees them.

`slices.Slice` is one of TPUs, `gpus.GpuMachines` one of NVIDIA GPUs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from launcher.machine.accelerators import Constant
from launcher.machine.devices import StrategyPlan, names
from launcher.preflight.compiled import costs as costs_lib
from launcher.preflight.compiled.costs import Collective, Costs, Operation
from launcher.preflight.compiled.hlo import Module

if TYPE_CHECKING:
    from launcher.preflight.compiled.hbm import HbmUse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(abc.ABC):
    """Devices that a step can be compiled for: of all of them together, but where it is said to be of one replica."""

    accelerator: ClassVar[str]  # "tpu" or "gpu"
    xla_flags: ClassVar[tuple[str, ...]] = ()  # for its compiler
    memory_name: ClassVar[str]  # as the bounds call it, such as "HBM"

    name: str  # as its flag has it, such as "v5litepod-256" or "h100:8"
    device_name: str  # of one device, for people
    link_name: str  # as the bounds call what connects its devices, such as "ICI"
    topology_name: str  # as its compiler calls it
    num_chips: int
    num_replicas: int
    num_hosts: int
    memory_bytes: Constant  # of one replica
    memory_bandwidth: float  # bytes/s of one replica
    peak_flops: float  # 16-bit FLOP/s of one replica, of which MFU is a share
    constants: Mapping[str, Constant]  # every number that its estimates use, by name
    clock: float | None = None  # hertz of the cycles of its compiler's cost model; None where that tells nothing of use
    clock_words: str = ""  # the clock, for people

    @property
    def flag(self) -> str:
        """Flag that asks for it, such as "--tpu_type=v5litepod-256"."""
        return f"--{self.accelerator}_type={self.name}"

    @abc.abstractmethod
    def describe(self) -> str:
        """For people, in a line."""

    @property
    def local_replicas(self) -> int:
        """Replicas of one process."""
        return self.num_replicas

    def strategy(self) -> StrategyPlan:
        """Strategy of a run on them."""
        return StrategyPlan(
            kind=self.accelerator,
            num_replicas=self.num_replicas,
            local_replicas=self.local_replicas,
            why=self.describe(),
            devices=names(self.accelerator, self.local_replicas),
            accelerator=self.accelerator,
        )

    @property
    def words(self) -> str:
        """Its name and what of a run there goes without saying, for people."""
        return self.name

    @property
    def figures_of(self) -> str:
        """The program that the figures are of, for people; empty where it is the run's very own."""
        return ""

    def seen_whole(self) -> Target:
        """The same, on which a compiler sees the whole step of a run that does not ask for one."""
        return self

    def configure(self) -> None:
        """Sets TensorFlow up as a run on them does, as far as that changes what is lowered."""
        tf.config.experimental.enable_tensor_float_32_execution(True)  # as it is where no GPU is set up

    @abc.abstractmethod
    def compile_request(self) -> dict[str, Any]:
        """Request to the compiler's process: "platform", "topology" and "num_replicas"."""

    def count(self, optimised: Module, before_libraries: Module | None) -> Costs:
        """Costs of a program, which before parts of it became calls of libraries was another one, or None."""
        return costs_lib.count(optimised)

    def reserved(self, costs: Costs | None, needed: float) -> Mapping[str, Constant]:
        """Memory of a device beside the `needed` bytes of a program, by what for; empty if the compiler counts it."""
        return {}

    @abc.abstractmethod
    def compute_seconds(self, costs: Costs) -> float:
        """Seconds that the matrix arithmetic of a step needs at least."""

    @abc.abstractmethod
    def compute_words(self, costs: Costs) -> str:
        """Words for that arithmetic: how much, and of what."""

    def memory_seconds(self, costs: Costs | Operation) -> float:
        """Seconds that its memory traffic needs at least."""
        return costs.hbm_bytes / self.memory_bandwidth

    @abc.abstractmethod
    def link_seconds(self, collective: Collective) -> float:
        """Seconds that one collective needs at least, all its turns together."""

    @abc.abstractmethod
    def link_words(self) -> str:
        """Links that the collectives go over, such as "over the 2 links of a corner chip"."""

    @abc.abstractmethod
    def latency_seconds(self, collective: Collective) -> float:
        """Seconds that one collective takes whatever its size, about, all its turns together."""

    @abc.abstractmethod
    def larger(self) -> Iterator[Target]:
        """More of the same devices, from the fewest on."""

    @abc.abstractmethod
    def advice(self, costs: Costs, hbm: HbmUse) -> Iterator[str]:
        """Sentences on what could be better about a step on these very devices."""

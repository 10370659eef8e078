"""Settings of `--mode=verify`: topologies, steps and tolerances; recipes or `--gin_param` bind them as `verify.…`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import gin

from launcher.config import gin_bindings
from launcher.config.bound_types import check_least, check_value, one_of
from launcher.errors import UsageError
from launcher.machine.runtime_kinds import KINDS, TENSORFLOW, RuntimeKind

DEVICES = ("auto", "cpu", "gpu")


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tolerances:
    """Largest deviations from one replica that still count as the same training.

    Attributes:
      loss: mean loss of each step, relative.
      gradient_norm: global norm of each step's gradient, relative.
      weights: final weights and their moving averages, absolute.
      slots: final optimizer slots, relative to the largest value that any slot of the same kind has.
      moving_statistics: final moving statistics, relative to the largest of their variable where that exceeds 1.
    """

    # Defaults are those of float32, whose unit roundoff u is 2^-24 = 6e-8. Between two topologies only the order of
    # sums differs, a few u a step. That stays so (2e-7 in every loss of 50 steps of ResNet-20, three seeds, with a
    # fifth of the run as warm-up) until some activation comes to lie on the other side of its ReLU's kink: its share of
    # the gradient then differs as a whole, and the network multiplies the difference in every step that follows.
    loss: float = 1e-5  # what this project promises over 50 steps; 6e-7 at most in recipes that warm up gently
    # A kink that flips a share p of the activations changes the gradient by about its root. With p = u, sqrt(u) is
    # 2.4e-4; four times that for the norm and for the worst element of a slot (measured: 6e-5 and 6e-4), and half of it
    # for weights and statistics, into which the gradient goes times the learning rate (measured: 8e-6 and 4e-7).
    gradient_norm: float = 1e-3
    weights: float = 1e-4
    slots: float = 1e-3
    moving_statistics: float = 1e-4

    def __post_init__(self) -> None:
        check_least("Tolerances", self, **{field.name: 0 for field in dataclasses.fields(self)})


# Of the dtypes that are computed in, half the distance from 1 to the next number.
_UNIT_ROUNDOFF = {"mixed_float16": 2.0**-11, "mixed_bfloat16": 2.0**-8, "mixed_float8": 2.0**-4}


def for_policy(policy: str) -> Tolerances:
    """The tolerances of one of `launcher.step.precision.POLICIES`.

    Under a 16-bit policy the sum over a replica's batch is rounded to 16 bits once for each part that the batch is
    split in, and a weight that differs in its last float32 bit may be rounded to another 16-bit neighbour. Activations
    then differ by u, the unit roundoff of 16 bits, and those within u of a ReLU's kink, a share of about u of them,
    flip it: from the first step on, gradients differ by about sqrt(u). A loss averages over the batch and is flat
    across a kink: it differs by a fraction of u.

    Measured over 50 steps, as multiples of what is allowed here. ResNet-20 on digits, a fifth of the run as warm-up,
    three seeds: float16 loss 0.1, gradient norm 0.1, weights 0.3, slots 0.3, statistics 0.4; bfloat16 at most 0.1. With
    half that warm-up float16 reaches 1.0 in weights and slots.
    """
    if policy not in _UNIT_ROUNDOFF:
        return Tolerances()
    roundoff = _UNIT_ROUNDOFF[policy]
    root = math.sqrt(roundoff)
    return Tolerances(
        loss=roundoff / 2,  # float16 2.4e-4, bfloat16 2.0e-3
        gradient_norm=root,  # float16 2.2e-2, bfloat16 6.3e-2
        weights=root / 4,  # float16 5.5e-3, bfloat16 1.6e-2
        slots=root * 4,  # float16 8.8e-2, bfloat16 0.25
        moving_statistics=root / 4,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """One way to spread a step over processes, devices and time."""

    workers: int = 1  # processes, one replica each; 1 for no cluster
    replicas: int = 1  # mirrored, of the one process
    microbatches: int = 1  # parts of each replica's batch
    engine: str = TENSORFLOW.name

    @property
    def runtime(self) -> RuntimeKind:
        return KINDS[self.engine]

    @property
    def name(self) -> str:
        """The name of the topology in the table."""
        has_devices = self.runtime.has_devices
        replicas = self.engine if has_devices else "mirrored"
        parts = {"workers": self.workers, replicas: self.replicas, "microbatches": self.microbatches}
        named = " x ".join(f"{name} {count}" for name, count in parts.items() if count > 1)
        return named or (f"{self.engine} 1" if has_devices else "one replica")

    @property
    def strategy(self) -> str | None:
        """The `--strategy` that makes it; None for a runtime with devices of its own."""
        if self.runtime.has_devices:
            return None
        if self.workers > 1:
            return "multi_worker"
        return "mirrored" if self.replicas > 1 else "one_device"

    @property
    def local_replicas(self) -> int | None:
        """The `--replicas` that makes it; None where its strategy has one alone."""
        return self.replicas if self.replicas > 1 or self.runtime.has_devices else None


ONE_REPLICA = Topology()


@gin_bindings.settings("verify")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """Settings of a verification.

    Attributes:
      steps: steps each topology trains; no more than the recipe has. Its schedules keep the recipe's length.
      replicas: numbers of mirrored replicas to compare with one; () for none.
      workers: numbers of worker processes.
      microbatches: numbers of microbatches; the recipe's own `train.microbatches` is always among them.
      devices: "cpu" for logical CPU devices, "gpu" for this machine's GPUs, "auto" for GPUs where there are enough.
      tolerances: those of the recipe's precision unless given, as `@Tolerances()`.
      timeout_seconds: how long one topology may take.
      dropout: leave dropout and noise on. Each replica draws masks of its own, so topologies then differ by design.
    """

    steps: int = 50
    replicas: int | Sequence[int] = (2, 4)
    workers: int | Sequence[int] = (2,)
    microbatches: int | Sequence[int] = (2,)
    devices: str = "auto"
    tolerances: Tolerances | None = None
    timeout_seconds: float = 600.0
    dropout: bool = False

    def __post_init__(self) -> None:
        check_least("verify", self, steps=1)
        check_value("verify.timeout_seconds", self.timeout_seconds, self.timeout_seconds > 0, "more than 0")
        check_value("verify.devices", self.devices, self.devices in DEVICES, one_of(DEVICES))
        for name in ("replicas", "workers", "microbatches"):
            if any(count < 2 for count in _counts(getattr(self, name))):
                raise UsageError(f"verify.{name} = {getattr(self, name)}: each must be 2 or more, or () for none")

    def topologies(self, recipe_microbatches: int, runtime: RuntimeKind = TENSORFLOW) -> tuple[Topology, ...]:
        """The topologies that are compared with `ONE_REPLICA`; on devices of its own, also one of them.

        Raises:
          UsageError: nothing is left to compare.
        """
        microbatches = set(_counts(self.microbatches)) | {recipe_microbatches} - {1}
        found = (
            *([ONE_REPLICA] if runtime.has_devices else []),
            *(Topology(replicas=count) for count in _counts(self.replicas)),
            *(Topology(workers=count) for count in _counts(self.workers)),
            *(Topology(microbatches=count) for count in sorted(microbatches)),
        )
        if not found:
            raise UsageError("verify.replicas, verify.workers and verify.microbatches are all (): nothing to verify")
        return tuple(dataclasses.replace(one, engine=runtime.name) for one in dict.fromkeys(found))


def _counts(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)

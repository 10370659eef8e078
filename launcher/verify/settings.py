"""What `--mode=verify` compares and for how long: the arguments that a recipe or `--gin_param` binds as `verify.…`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.verify.tolerances import Tolerances

DEVICES = ("auto", "cpu", "gpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """One way to spread a step over processes, devices and time.

    Attributes:
      workers: processes, one replica each; 1 for no cluster.
      replicas: mirrored replicas of the one process.
      microbatches: parts of each replica's batch.
    """

    workers: int = 1
    replicas: int = 1
    microbatches: int = 1

    @property
    def name(self) -> str:
        """As the table shows it."""
        parts = {"workers": self.workers, "mirrored": self.replicas, "microbatches": self.microbatches}
        return " x ".join(f"{name} {count}" for name, count in parts.items() if count > 1) or "one replica"

    @property
    def strategy(self) -> str:
        """The `--strategy` that makes it."""
        if self.workers > 1:
            return "multi_worker"
        return "mirrored" if self.replicas > 1 else "one_device"


ONE_REPLICA = Topology()


@gin_bindings.settings("verify")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a recipe is verified.

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
        if self.steps < 1:
            raise UsageError(f"verify.steps = {self.steps}: must be 1 or more")
        if not self.timeout_seconds > 0:
            raise UsageError(f"verify.timeout_seconds = {self.timeout_seconds}: must be more than 0")
        if self.devices not in DEVICES:
            raise UsageError(f"verify.devices = {self.devices!r}: expected one of {', '.join(DEVICES)}")
        for name in ("replicas", "workers", "microbatches"):
            if any(count < 2 for count in _counts(getattr(self, name))):
                raise UsageError(f"verify.{name} = {getattr(self, name)}: each must be 2 or more, or () for none")

    def topologies(self, recipe_microbatches: int) -> tuple[Topology, ...]:
        """What is compared with `ONE_REPLICA`.

        Raises:
          UsageError: nothing is left to compare.
        """
        microbatches = set(_counts(self.microbatches)) | {recipe_microbatches} - {1}
        found = (
            *(Topology(replicas=count) for count in _counts(self.replicas)),
            *(Topology(workers=count) for count in _counts(self.workers)),
            *(Topology(microbatches=count) for count in sorted(microbatches)),
        )
        if not found:
            raise UsageError("verify.replicas, verify.workers and verify.microbatches are all (): nothing to verify")
        return tuple(dict.fromkeys(found))


def _counts(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)

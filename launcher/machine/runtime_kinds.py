"""Kinds of runtimes, one a value of --engine: what the rest of the house asks of each.

Imports neither TensorFlow nor JAX, as a supervisor reads the flags of its workers.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Callable
from typing import Any

from launcher.config import plugins


def _late(path: str) -> Callable[..., Any]:
    """A function by its path, "package.module:name", which is imported when it is called."""
    return lambda *args: pkgutil.resolve_name(path)(*args)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeKind:
    """One kind of runtime.

    Attributes:
      name: its value of --engine.
      says: what it is, for --help.
      make: RunPlan -> Runtime.
      devices: (--replicas or None, Cluster, environment) -> StrategyPlan of devices of its own, each process's; None
        where they are those of a tf.distribute strategy.
      check: raises UsageError where what it needs is not installed.
      compiles: the model's part of a step is compiled, whatever train.jit_compile says.
      divides_weights: it can train with train.shard = 'all'.
      uses_jax: JAX runs the steps: it takes gpu.memory_share of each GPU at its start, keeps what it compiles in
        --compile_cache by itself, and has a profiler of its own.
    """

    name: str
    says: str
    make: Callable[[Any], Any]
    devices: Callable[..., Any] | None = None
    check: Callable[[], None] = lambda: None
    compiles: bool = False
    divides_weights: bool = False
    uses_jax: bool = False

    @property
    def flag(self) -> str:
        """The flag that asks for it, for messages."""
        return f"--engine={self.name}"

    @property
    def has_devices(self) -> bool:
        """Whether its devices are its own: then TensorFlow has the host's CPU, and each host of a slice runs us."""
        return self.devices is not None


TENSORFLOW = RuntimeKind(
    name="tensorflow",
    says="by tf.distribute",
    make=_late("launcher.run.session:tf_runtime"),
)
PJRT = RuntimeKind(
    name="pjrt",
    says="JAX's runtime, with --replicas devices a process",
    make=_late("launcher.step_program.pjrt_runtime:make"),
    devices=_late("launcher.machine.jax_devices:plan"),
    check=_late("launcher.machine.jax_devices:check_jax"),
    compiles=True,
    divides_weights=True,
    uses_jax=True,
)
KINDS = plugins.Table("engine", RuntimeKind, {kind.name: kind for kind in (TENSORFLOW, PJRT)})

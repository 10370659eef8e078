"""Sessions of a recipe, many in one process, for benchmarks whose runs are shorter than TensorFlow's start."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config import gin_bindings
from launcher.machine.runtime_kinds import KINDS
from launcher.run import loading, session
from launcher.run.recipe import Recipe


def build(
    gin_file: str, bindings: Sequence[str], seed: int = 0, replicas: int = 1, engine: str = "tensorflow"
) -> session.Session:
    """A session on CPUs or GPUs of this process, as `launcher.main` would build it with these --gin_params."""
    gin_bindings.reset()
    loading.import_builtins()
    gin_bindings.load([gin_file], bindings)
    kind = KINDS[engine]
    resolved = loading.Machine(environ={}, replicas=replicas, seed=seed, runtime=kind).plan_of(Recipe())
    resolved.data.check()
    return session.build_on(kind.make(resolved), resolved)

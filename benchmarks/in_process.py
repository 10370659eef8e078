"""Sessions of a recipe, many in one process, for benchmarks whose runs are shorter than TensorFlow's start."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config import gin_bindings
from launcher.machine import strategy as strategy_lib
from launcher.machine.cluster import resolve
from launcher.run import loading, session
from launcher.run.recipe import Recipe
from launcher.runtime.tensorflow import TfRuntime


def build(gin_file: str, bindings: Sequence[str], seed: int = 0, replicas: int = 1) -> session.Session:
    """A session on CPUs or GPUs of this process, as `launcher.main` would build it with these --gin_params."""
    gin_bindings.reset()
    loading.import_builtins()
    gin_bindings.load([gin_file], bindings)
    resolved = loading.Machine(environ={}, replicas=replicas, seed=seed).plan_of(Recipe())
    resolved.data.check()
    return session.build_on(TfRuntime(strategy_lib.build(resolved.strategy, resolve({}))), resolved)

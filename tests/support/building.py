"""Sessions inside the test process, as `launcher.main` would build them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.config import gin_bindings
from launcher.machine import strategy as strategy_lib
from launcher.machine.cluster import resolve
from launcher.run import loading, session
from launcher.run.recipe import Recipe
from launcher.runtime.tensorflow import TfRuntime


def build_session(recipe: str, params: Sequence[str] = (), replicas: int = 1) -> session.Session:
    """The session of a recipe with these bindings on that many logical CPU devices."""
    loading.import_builtins()
    gin_bindings.load([recipe], params)
    resolved = loading.Machine(environ={}, replicas=replicas).plan_of(Recipe())
    return session.build_on(TfRuntime(strategy_lib.build(resolved.strategy, resolve({}))), resolved)

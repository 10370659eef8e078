"""The plan that a mode's flags and recipe make on this machine, and what makes it real."""

import os
from collections.abc import Callable
from functools import partial

from launcher.modes import MODES, EngineRequest, Request
from launcher.run import loading, session
from launcher.run.plan import RunPlan


def resolve(request: Request, *, connect: bool = True) -> RunPlan:
    """The plan that the recipe and the flags make on this machine; see `loading.Machine.resolve`."""
    return make_machine(request, connect=connect).resolve(request.gin_file, request.gin_param)


def make_machine(request: Request, *, connect: bool = True) -> loading.Machine:
    """The devices that the flags ask for."""
    return loading.Machine(
        environ=os.environ,
        strategy=request.strategy,
        replicas=request.replicas,
        tpu=request.tpu,
        seed=request.seed,
        deterministic=request.deterministic,
        connect=connect,
        engine=getattr(request, "engine", None),
    )


def session_builder(request: Request) -> Callable[[RunPlan], session.Session]:
    """Builder of the session on the engine that the flags name."""
    if not isinstance(request, EngineRequest) or request.engine != "pjrt":
        return session.build
    from launcher.step_program import pjrt_runtime  # with JAX, which need not be there

    cache, trains = getattr(request, "compile_cache", None), MODES[request.mode].trains
    return partial(pjrt_runtime.build, compile_cache=cache, from_chief=request.restore_from_chief, trains=trains)

"""The plan that a mode's flags and recipe make on this machine."""

import os

from launcher.modes import Request
from launcher.run import loading
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
        runtime=request.asked_runtime,
    )

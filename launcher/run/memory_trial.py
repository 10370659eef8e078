"""`train.microbatches = 'auto'` and `train.rematerialize = 'auto'`: what makes a step fit, tried on the device.

Each worker lets a child process take two steps of the run, with its own replicas alone, at the setting that costs
least, then at the next. Where memory runs out, only the child ends; JAX's runtime says of a step that it has compiled
whether it fits, and runs none that does not. All workers then take what is enough for each.

    python -m launcher.run.memory_trial FOLDER
"""

import dataclasses
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, EXIT_FAILED, UsageError
from launcher.machine import child_process
from launcher.machine.jax_devices import NEEDS_MORE
from launcher.machine.runtime_kinds import KINDS
from launcher.run import session
from launcher.run.loading import Machine
from launcher.run.plan import RunPlan

_STEPS = 2  # the second has the optimizer's state beside it
# TensorFlow's own allocations fail with an error of its own, Python's with another, those of XLA, cuDNN and cuBLAS with
# any code, and those of C++ end the process at once. What they say is all that they have in common.
# Leans on TensorFlow, XLA, CUDA: what runs out of memory says one of these words. Noticed by
# tests/run/test_memory_trial.py. Then: add the new words; until then `'auto'` ends with the error itself.
_OUT_OF_MEMORY = re.compile(
    r"ResourceExhausted|RESOURCE_EXHAUSTED|MemoryError|bad_alloc|out of memory|ALLOC_FAILED|Cannot allocate memory|"
    + NEEDS_MORE,
    re.IGNORECASE,
)


class Setting(NamedTuple):
    """Values of the bindings of `train` that a recipe leaves to 'auto'; None for those that it does not."""

    rematerialize: bool | None = None
    microbatches: int | None = None

    @property
    def bindings(self) -> tuple[str, ...]:
        """Bindings that have a recipe take these values."""
        return tuple(f"train.{name} = {value}" for name, value in self._asdict().items() if value is not None)


def settings(plan: RunPlan) -> list[Setting]:
    """Settings to try, the one that costs least time first.

    More microbatches cost little as long as each has rows enough, rematerialisation a third more arithmetic at once: so
    it comes after all numbers of microbatches, and with it, these begin again at one. Each uses less memory than those
    before it with no more microbatches.
    """
    recipe, size = plan.recipe, plan.per_replica_batch_size
    counts = [count for count in range(1, size + 1) if size % count == 0] if recipe.microbatches == "auto" else [None]
    choices = [False, True] if recipe.rematerialize == "auto" else [None]
    return [Setting(choice, count) for choice in choices for count in counts]


def is_open(plan: RunPlan) -> bool:
    """Whether the recipe leaves anything to be tried."""
    return "auto" in (plan.recipe.microbatches, plan.recipe.rematerialize)


def settled(plan: RunPlan, setting: Setting, before: Sequence[Setting]) -> RunPlan:
    """The plan with a setting, and why it is this one: those `before` did not fit."""
    fewer = ", ".join(str(earlier.microbatches) for earlier in before if earlier.rematerialize == setting.rematerialize)
    if setting.microbatches is not None:
        why = f"auto: {fewer} did not fit" if fewer else "auto: one is enough"
        plan = dataclasses.replace(plan, microbatches=setting.microbatches, microbatches_why=why)
    if setting.rematerialize is not None:
        without = "all numbers of microbatches" if setting.microbatches is not None else "the step"
        why = f"auto: without it, {without} did not fit" if setting.rematerialize else "auto: the step fits without"
        plan = dataclasses.replace(plan, rematerialize=setting.rematerialize, rematerialize_why=why)
    return plan


def decide(
    plan: RunPlan, *, gin_files: Sequence[str], gin_params: Sequence[str], say: Callable[[str], None] = print
) -> RunPlan:
    """The plan with what the recipe leaves open, such that it fits on every worker.

    Args:
      plan: of a recipe that `is_open`; nothing has been built on its devices yet.
      say: is told what is tried.

    Raises:
      UsageError: nothing fits; or it cannot be tried: the devices are a TPU's, which no second process can use, or the
        run is of a `launcher.fit` that no second process can call.
    """
    names = [name for name in Setting._fields if getattr(plan.recipe, name) == "auto"]
    told = " and ".join(f"train.{name} = 'auto'" for name in names)
    if plan.strategy.accelerator == "tpu":
        raise UsageError(f"{told}: a TPU is open to one process only: let --mode=preflight find it, and bind that")
    if not gin_files:
        raise UsageError(f"{told}: launcher.fit cannot try it in this process: give --gin_file=PROGRAM.py, or a value")

    def fits(setting: Setting) -> bool:
        say(f"{told}: trying {', '.join(setting.bindings)}")
        return _fits(_request(plan, setting, gin_files, gin_params))

    choices = settings(plan)
    plan, setting = _enough_for_all(plan, next(filter(fits, choices), None))
    if setting is None:
        what = "even with train.rematerialize = True, the step does not fit"
        more = "; bind train.microbatches = 'auto'"
        if (count := choices[-1].microbatches) is not None:
            with_it = " with train.rematerialize = True" * bool(choices[-1].rematerialize)
            what, more = f"not even {count} microbatches of one example fit{with_it}", ""
        size, devices = plan.recipe.global_batch_size, ", ".join(plan.strategy.devices)
        raise UsageError(f"train.global_batch_size = {size}: {what} in the memory of {devices}{more}")
    return settled(plan, setting, choices[: choices.index(setting)])


def _request(plan: RunPlan, setting: Setting, gin_files: Sequence[str], gin_params: Sequence[str]) -> dict[str, object]:
    """The request to a child for steps of this worker's replicas alone, with the batch of each as it is."""
    local, runtime = plan.strategy.local_replicas, plan.strategy.runtime
    batch = plan.per_replica_batch_size * local
    bindings = (*setting.bindings, f"train.global_batch_size = {batch}", f"train.eval_batch_size = {batch}")
    return {
        "gin_files": [*gin_files],
        "gin_params": [*gin_params, *bindings],
        "engine": runtime.name,
        "strategy": None if runtime.has_devices else "mirrored" if local > 1 else "one_device",
        "replicas": local,
        "seed": plan.seed,
        "deterministic": plan.deterministic,
    }


def _fits(request: dict[str, object]) -> bool:
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    command = [sys.executable, "-m", "launcher.run.memory_trial"]
    with child_process.asked(command, request, environ=environ) as (_, code, lines):
        # Any other mistake comes again in the run itself, which tells of it.
        return code == EXIT_DONE or not (code == -signal.SIGKILL or any(map(_OUT_OF_MEMORY.search, lines)))


def _enough_for_all(plan: RunPlan, mine: Setting | None) -> tuple[RunPlan, Setting | None]:
    """The least that is enough for each worker, and the plan with the runtime that was made to learn it.

    Each value by itself: a worker that needs rematerialisation may do with fewer microbatches than one that does not.
    Where nothing is enough, here or for all, it is None.
    """
    if plan.cluster.num_workers == 1:
        return plan, mine
    runtime = plan.strategy.runtime.make(plan)
    needs = [mine is None, *(int(value or 0) for value in mine or Setting())]
    found = runtime.workers.gather(needs, worker=plan.cluster.index, num_workers=plan.cluster.num_workers)
    nothing, *most = np.rint(found.max(axis=0)).astype(int).tolist()
    plan = dataclasses.replace(plan, made=runtime.host)
    if nothing:
        return plan, None
    return plan, next(setting for setting in settings(plan) if [int(value or 0) for value in setting] == most)


def main(argv: Sequence[str]) -> int:
    """Takes the steps of a request; what ends it before they are done is printed."""
    request = child_process.request_in(argv[1])
    recipe, engine = (request.pop("gin_files"), request.pop("gin_params")), KINDS[request.pop("engine")]
    of_devices = {name: value for name, value in os.environ.items() if name.startswith(("CUDA_", "JAX_", "XLA_"))}
    try:
        with gin_bindings.usage_errors():
            plan = Machine(environ=of_devices, runtime=engine, **request).resolve(*recipe)
            trainer = session.build(plan).trainer
            batches = trainer.batches(plan.data)
            for _ in range(_STEPS):
                trainer.train(batches, 1)
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
    return EXIT_DONE


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

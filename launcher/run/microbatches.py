"""`train.microbatches = 'auto'`: the fewest parts of a replica's batch that fit, tried on the device itself.

Each worker lets a child process take two steps of the run, with its own replicas alone, in one part, then in more.
Where memory runs out, only the child ends. All workers then take the number of the one that needs most.

    python -m launcher.run.microbatches REQUEST
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from launcher.config import gin_bindings
from launcher.errors import EXIT_DONE, UsageError
from launcher.machine import child_process
from launcher.machine import strategy as strategy_lib
from launcher.run import session
from launcher.run.loading import Machine
from launcher.run.plan import RunPlan

_STEPS = 2  # the second has the optimizer's state beside it
_OUT_OF_MEMORY = 12  # ENOMEM


def decide(
    plan: RunPlan, *, gin_files: Sequence[str], gin_params: Sequence[str], say: Callable[[str], None] = print
) -> RunPlan:
    """The plan with a number of microbatches that fits on every worker.

    Args:
      plan: of a recipe that leaves the number open; nothing has been built on its devices yet.
      gin_files, gin_params: what it was made of.
      say: is told what is tried.

    Raises:
      UsageError: not even one example at a time fits; or the devices are a TPU's, which no second process can use.
    """
    if plan.strategy.accelerator == "tpu":
        raise UsageError(
            "train.microbatches = 'auto' tries the step in a process of its own, and a TPU is open to one process "
            "only: let --mode=preflight say how many fit, and bind that"
        )
    counts = _candidates(plan)
    failed: list[int] = []
    for count in counts:
        say(f"train.microbatches = 'auto': trying {count}")
        if _fits(_request(plan, count, gin_files, gin_params)):
            break
        failed.append(count)
    plan, most = _most_of_all(plan, len(failed))
    if most == len(counts):
        raise UsageError(
            f"train.global_batch_size = {plan.recipe.global_batch_size}: not even {counts[-1]} microbatches of one "
            f"example fit in the memory of {', '.join(plan.strategy.devices)}"
        )
    tried = f"{', '.join(map(str, counts[:most]))} ran out of memory" if most else "they need no more"
    return dataclasses.replace(plan, microbatches=counts[most], microbatches_why=f"auto: {tried}")


def _candidates(plan: RunPlan) -> list[int]:
    size = plan.per_replica_batch_size
    return [count for count in range(1, size + 1) if size % count == 0]


def _request(plan: RunPlan, count: int, gin_files: Sequence[str], gin_params: Sequence[str]) -> dict[str, object]:
    """What a child needs to take steps of this worker's replicas alone, with the batch of each as it is."""
    local = plan.strategy.local_replicas
    batch = plan.per_replica_batch_size * local
    bindings = (
        f"train.microbatches = {count}",
        f"train.global_batch_size = {batch}",
        f"train.eval_batch_size = {batch}",
    )
    return {
        "gin_files": [*gin_files],
        "gin_params": [*gin_params, *bindings],
        "strategy": "mirrored" if local > 1 else "one_device",
        "replicas": local,
        "seed": plan.seed,
        "deterministic": plan.deterministic,
    }


def _fits(request: dict[str, object]) -> bool:
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "request.json"), Path(folder, "log.txt")
        path.write_text(json.dumps(request), "utf-8")
        command = [sys.executable, "-m", "launcher.run.microbatches", str(path)]
        with child_process.running(command, log=log, environ=environ) as process:
            code = process.wait()
    # Any other mistake comes again in the run itself, which tells of it.
    return code not in (_OUT_OF_MEMORY, -signal.SIGKILL)


def _most_of_all(plan: RunPlan, mine: int) -> tuple[RunPlan, int]:
    """The largest of all workers' numbers, and the plan with the strategy that was made to learn it."""
    if plan.cluster.num_workers == 1:
        return plan, mine
    if plan.deterministic and plan.made is None:
        tf.config.experimental.enable_op_determinism()
    strategy = plan.made or strategy_lib.build(plan.strategy, plan.cluster)
    found = strategy.gather(strategy.run(lambda: tf.constant([mine], tf.int32)), axis=0)
    return dataclasses.replace(plan, made=strategy), int(tf.reduce_max(found))


def main(argv: Sequence[str]) -> int:
    """Takes the steps of a request; the exit code says whether memory ran out."""
    child_process.follow_parent()
    request = json.loads(Path(argv[1]).read_text("utf-8"))
    recipe = request.pop("gin_files"), request.pop("gin_params")
    try:
        with gin_bindings.usage_errors():
            plan = Machine(environ={}, **request).resolve(*recipe)
            trainer = session.build(plan).trainer
            batches = trainer.batches(plan.data)
            for _ in range(_STEPS):
                trainer.train(batches, 1)
    except (tf.errors.ResourceExhaustedError, MemoryError):
        return _OUT_OF_MEMORY
    except tf.errors.OpError as error:
        # XLA's and cuDNN's own allocations fail with other codes.
        if "out of memory" in str(error).lower() or "RESOURCE_EXHAUSTED" in str(error):
            return _OUT_OF_MEMORY
        raise
    return EXIT_DONE


if __name__ == "__main__":
    code = main(sys.argv)
    sys.stdout.flush()
    os._exit(code)

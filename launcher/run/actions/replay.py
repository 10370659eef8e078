"""Silent corruption: the gradients of a step computed twice, and their bits compared on every replica."""

import socket
from typing import Any

import tensorflow as tf

from launcher.data.kinds import reads_once
from launcher.data.pipeline import Batch
from launcher.errors import MachineError, PeerError, UsageError
from launcher.machine.runtime_kinds import TENSORFLOW
from launcher.reporting.units import first
from launcher.run.plan import RunPlan
from launcher.runtime import Runtime
from launcher.step.trainer import Trainer
from launcher.worker import drill


class Replay:
    """Runs the forward and backward pass of batches twice and compares the gradients' bits; see `LookAtBatches`.

    A device that computes the same twice with different bits is broken, which nothing else shows. All workers stop
    with exit code 75 then, and the broken one alone says that it is; the supervisor names it and starts all again.

    Raises:
      UsageError: two passes could not be compared here.
    """

    def __init__(self, trainer: Trainer, plan: RunPlan):
        _check(plan, trainer.runtime)
        self._step: Any = trainer.replica_step  # one of ours, as `_check` has seen to
        self._trainer, self._cluster = trainer, plan.cluster

    def look(self, step: int, batch: Batch) -> None:
        before, again = self._of(batch, 0), self._of(batch, int(drill.flips_bit()))
        broken = [replica for replica, same in enumerate((before == again).all(axis=(1, 2))) if not same]
        if not broken:
            return
        each = len(before) // self._cluster.num_workers
        workers = sorted({replica // each for replica in broken})
        paths = [weight.path for weight in self._trainer.model.trainable_variables]
        differ = (before != again).any(axis=(0, 2))
        what = f"the gradients of {first([path for path, one in zip(paths, differ, strict=True) if one])}"
        if self._cluster.index in workers:
            mine = ", ".join(str(one) for one in broken if one // each == self._cluster.index)
            where = f"replica {mine} on {socket.gethostname()}"
            raise MachineError(
                f"{where} computed {what} twice with different bits, after step {step}: "
                "a device, memory or power supply there is broken; take the host out of the job and test it"
            )
        raise PeerError(f"worker {first([str(one) for one in workers])} computed {what} twice with different bits")

    def _of(self, batch: Batch, flip: int) -> Any:
        return self._trainer.runtime.host.call(self._step.checksums, batch, tf.constant(flip, tf.int64))


def _check(plan: RunPlan, runtime: Runtime) -> None:
    asked = f"train.replay_every = {plan.recipe.replay_every}"
    if runtime.host is not runtime or plan.recipe.task.step_assigns is not None:
        raise UsageError(f"{asked}: for steps of our own by {TENSORFLOW.flag}; leave it out with others")
    if reads_once(plan.data):
        raise UsageError(f"{asked}: the generator has no batch twice; leave it out, or give other data")
    if plan.strategy.accelerator == "gpu" and not plan.deterministic:
        raise UsageError(
            f"{asked}: the order of sums on a GPU depends on time, so that any two passes differ; add --deterministic"
        )

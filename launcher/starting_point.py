"""Where a run goes on from: the newest whole checkpoint, read by every worker or by the chief for all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from launcher.checkpoints import Best, CheckpointStore
from launcher.errors import LauncherError
from launcher.from_chief import FromChief
from launcher.trainer import Trainer


class ChiefError(LauncherError):
    """The chief found out why the run cannot start; every worker ends with its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(f"the chief cannot start: {message}")
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """What an earlier attempt left.

    Attributes:
      step: steps done; None for a run that starts anew, whose trainer stays as it was built.
      state: what `Trainer.restore` takes.
      best: what the run has to beat.
    """

    step: int | None
    state: Mapping[str, np.ndarray]
    best: Best | None


def from_storage(store: CheckpointStore, trainer: Trainer, *, same_order: bool) -> StartingPoint:
    """Reads the newest whole checkpoint of the store.

    Args:
      store: where this process reads.
      trainer: which is going to be restored.
      same_order: whether the run must see its examples in the order in which they were begun.

    Raises:
      UsageError: it is of another model, or of a run with another order of examples.
      CheckpointReadError: it cannot be read.
    """
    newest = store.latest()
    if newest is None:
        return StartingPoint(step=None, state={}, best=None)
    store.check_compatible(newest, trainer.specs())
    if same_order:
        store.check_same_run(newest)
    return StartingPoint(step=newest, state=store.read(newest), best=store.best_record())


def from_chief(store: CheckpointStore, trainer: Trainer, *, same_order: bool) -> StartingPoint:
    """As `from_storage` on the chief; the other workers get its values over the wire and never touch their store.

    Raises:
      ChiefError: what stopped the chief, on the other workers.
    """
    wire = FromChief(trainer.strategy, is_chief=store.is_chief)
    if not store.is_chief:
        told = wire.message()
        if "error" in told:
            with contextlib.suppress(tf.errors.OpError):  # The chief may be gone by now.
                wire.wait_for_all()
            raise ChiefError(told["error"], told["exit_code"])
        if told["step"] is None:
            return StartingPoint(step=None, state={}, best=None)
        best = told["best"] and Best(**told["best"])
        return StartingPoint(step=told["step"], state=wire.arrays(trainer.specs()), best=best)
    try:
        start = from_storage(store, trainer, same_order=same_order)
    except LauncherError as error:
        wire.message({"error": str(error), "exit_code": error.exit_code})
        wire.wait_for_all()
        raise
    wire.message({"step": start.step, "best": start.best and dataclasses.asdict(start.best)})
    if start.step is not None:
        wire.arrays(trainer.specs(), start.state)
    return start

"""Where a run goes on from: the newest whole checkpoint, read by every worker or by the chief for all."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.checkpoints import HOST, Best, CheckpointStore
from launcher.errors import LauncherError
from launcher.run.from_chief import FromChief
from launcher.step.trainer import Trainer

State = Mapping[str, np.ndarray]


class ChiefError(LauncherError):
    """The chief found out why the run cannot start; every worker ends with its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(f"the chief cannot start: {message}")
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """What an earlier attempt left.

    Attributes:
      step: steps done; None for a run that starts anew.
      best: what the run has to beat.
      notes: what a person should know of how it goes on.
      host: what actions had in the checkpoint, see `launcher.run.actions.Action.state`.
    """

    step: int | None = None
    best: Best | None = None
    notes: tuple[str, ...] = ()
    host: State = dataclasses.field(default_factory=dict)


def restore(store: CheckpointStore, trainer: Trainer, *, same_order: bool) -> StartingPoint:
    """Restores the trainer from the newest whole checkpoint of the store; without one, it stays as it was built.

    Args:
      store: where this process reads.
      trainer: what goes on.
      same_order: whether the run must see its examples in the order in which they were begun.

    Raises:
      UsageError: the checkpoint is of another model, or of a run with another order of examples.
      CheckpointReadError: it cannot be read.
      PeerError: another worker found another checkpoint.
    """
    start, state = _read(store, trainer, same_order=same_order)
    if start.step is not None:
        trainer.restore(state)
    trainer.check_agreement()
    return start


def restore_from_chief(store: CheckpointStore, trainer: Trainer, *, same_order: bool) -> StartingPoint:
    """As `restore` on the chief; the other workers get its values over the wire and never touch their store.

    Raises:
      ChiefError: what stopped the chief, on the other workers.
    """
    wire = FromChief(trainer.strategy, is_chief=store.is_chief)
    start, state = _hand_out(wire, store, trainer, same_order) if store.is_chief else _take(wire, trainer)
    if start.step is not None:
        trainer.restore(state)
    trainer.check_agreement()
    return start


def _read(store: CheckpointStore, trainer: Trainer, *, same_order: bool) -> tuple[StartingPoint, State]:
    newest = store.latest()
    if newest is None:
        return StartingPoint(), {}
    if same_order:
        store.check_same_run(newest)
    state = read(store, trainer, newest)
    note = _settle_loss_scale(state, store.manifest(newest).get("scaling"), trainer)
    host = {name.removeprefix(HOST): state.pop(name) for name in [*state] if name.startswith(HOST)}
    notes = (note,) if note else ()
    return StartingPoint(step=newest, best=store.best_record(), notes=notes, host=host), state


def read(store: CheckpointStore, trainer: Trainer, step: int) -> dict[str, np.ndarray]:
    """The state at a step of the store, for `Trainer.restore`.

    What this run does not average is left out. What it averages and the other did not starts at the weight itself.

    Raises:
      UsageError: the checkpoint is of another model.
      CheckpointReadError: it cannot be read.
    """
    specs, stand_ins = trainer.specs(), trainer.stand_ins()
    store.check_compatible(step, specs, stand_ins)
    found = store.read(step)
    return {
        **{name: value for name, value in found.items() if name.startswith(HOST)},
        **{
            name: found[name] if name in found else found[stand_ins[name]].astype(dtype)
            for name, (_, dtype) in specs.items()
        },
    }


def _settle_loss_scale(
    state: dict[str, np.ndarray], recorded: Mapping[str, Any] | None, trainer: Trainer
) -> str | None:
    """Puts the recipe's own loss scale in place of the state of another one; says what it did, unless all is the same.

    Args:
      state: as read.
      recorded: what the checkpoint says of its loss scale; None from a version that did not say.
      trainer: what goes on.
    """
    if recorded == trainer.scaling:
        return None
    at = float(state["loss_scale/scale"])
    if recorded is None and trainer.could_have_scaled(state):
        return f"the checkpoint does not record its loss scale; going on at {at:g}, which this run's can have come to"
    state.update(trainer.initial_loss_scale())
    was = "of another loss scale" if recorded is None else f"of {_shown(recorded)}"
    return (
        f"the checkpoint's loss scale {at:g} is {was}; this run starts with its own: {_shown(trainer.scaling)} at "
        f"{float(state['loss_scale/scale']):g}"
    )


def _shown(scaling: Mapping[str, Any]) -> str:
    loss_scale = scaling["loss_scale"]
    arguments = ", ".join(f"{name}={value}" for name, value in loss_scale["arguments"].items())
    return f"{loss_scale['kind']}({arguments}) under {scaling['policy']}"


def _hand_out(
    wire: FromChief, store: CheckpointStore, trainer: Trainer, same_order: bool
) -> tuple[StartingPoint, State]:
    try:
        start, state = _read(store, trainer, same_order=same_order)
    except LauncherError as error:
        wire.message({"error": str(error), "exit_code": error.exit_code})
        wire.wait_for_all()
        raise
    sizes = {name: len(value) for name, value in start.host.items()}
    wire.message({**dataclasses.asdict(dataclasses.replace(start, host={})), "host": sizes})
    if start.step is not None:
        wire.arrays({**trainer.specs(), **_host_specs(sizes)}, {**state, **start.host})
    return start, state


def _take(wire: FromChief, trainer: Trainer) -> tuple[StartingPoint, State]:
    told = wire.message()
    if "error" in told:
        with contextlib.suppress(tf.errors.OpError):  # The chief may be gone by now.
            wire.wait_for_all()
        raise ChiefError(told["error"], told["exit_code"])
    if told["step"] is None:
        return StartingPoint(), {}
    best = told["best"] and Best(**told["best"])
    state = wire.arrays({**trainer.specs(), **_host_specs(told["host"])})
    host = {name: state.pop(name) for name in told["host"]}
    return StartingPoint(step=told["step"], best=best, notes=tuple(told["notes"]), host=host), state


def _host_specs(sizes: Mapping[str, int]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: ((size,), "uint8") for name, size in sizes.items()}

"""The starting point of a run: its newest whole checkpoint, or other weights; read by all or by the chief."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.checkpoints import HOST, Best, CheckpointStore, array_of, record_of
from launcher.data.order import ALL_IN
from launcher.errors import LauncherError, UsageError
from launcher.reporting.units import first as first_of
from launcher.run.start import start_weights
from launcher.run.start.start_weights import OPTIMIZER, StartFrom
from launcher.runtime.tensorflow import TfRuntime
from launcher.step.layers import layers_of
from launcher.step.trainer import Trainer

_CHUNK_BYTES = 16 * 2**20  # of a collective
_WORD_BYTES = 4

State = Mapping[str, Any]  # arrays, and sources of those that devices have in parts

# In a checkpoint: the batches that the run leaves out, as far as it knew then; of those to come the store knows more.
LEFT_OUT = "left_out"
# In a checkpoint that was saved in the middle of the evaluation after its step.
EVALUATION_DUE = "evaluation_due"


class ChiefError(LauncherError):
    """The chief found out why the run cannot start; every worker ends with its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(f"the chief cannot start: {message}")
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """The state that an earlier attempt left.

    Attributes:
      step: steps done; None for a run that starts anew.
      best: what the run has to beat.
      notes: what a person should know of how it goes on.
      listing: what was done with each weight of `StartFrom.path`; of the process that read it.
      host: what actions had in the checkpoint, see `launcher.run.actions.base.Event`.
      rewinds: how often it went back and left batches out, see `CheckpointStore.rewinds`.
    """

    step: int | None = None
    best: Best | None = None
    notes: tuple[str, ...] = ()
    listing: str = ""
    host: State = dataclasses.field(default_factory=dict)
    rewinds: tuple[Mapping[str, Any], ...] = ()

    @property
    def evaluation_due(self) -> bool:
        """Whether an earlier attempt was stopped in the middle of the evaluation after this step."""
        return EVALUATION_DUE in self.host


def restore(
    store: CheckpointStore,
    trainer: Trainer,
    *,
    same_order: bool,
    start_from: StartFrom | None = None,
    from_chief: bool = False,
) -> StartingPoint:
    """Restores the trainer from the newest whole checkpoint of the store; without one, from the weights to start with.

    Args:
      same_order: whether the run must see its examples in the order in which they were begun.
      start_from: what a run that starts anew starts with; None for what it was built with.
      from_chief: whether the chief alone reads its store, and hands what it finds to the other workers.

    Raises:
      UsageError: the checkpoint is of another model, or of a run that left out other batches; or the weights to start
        with are of another model.
      CheckpointReadError: it cannot be read.
      PeerError: another worker found another checkpoint.
      ChiefError: the chief, which alone reads, was stopped by one of these.
    """
    read = functools.partial(_read, store, trainer, start_from)
    start, state = _shared(FromChief(trainer.runtime.host, is_chief=store.is_chief), read) if from_chief else read()
    trainer.state.restore(state)
    before = ALL_IN.with_ranges(record_of(start.host[LEFT_OUT]) if LEFT_OUT in start.host else ())
    trainer.left_out = trainer.left_out.with_ranges([*before.ranges, *(rewind["left_out"] for rewind in start.rewinds)])
    trainer.workers.check_agreement(trainer.step, trainer.left_out)
    step = start.step or 0
    if same_order and trainer.left_out.batch_of(step) != before.batch_of(step):
        raise UsageError(
            f"train.skip_batches: this run left out the batches {list(before.ranges)} and is at step {step}; with "
            f"{list(trainer.left_out.ranges)} it would see its examples in another order. Give the value that it was "
            "begun with, or choose another --model_dir"
        )
    return start


def begin(trainer: Trainer, start_from: StartFrom | None) -> StartingPoint:
    """Gives a trainer that starts anew the weights to start with."""
    start, state = _begun(trainer, start_from)
    trainer.state.restore(state)
    return start


def _begun(trainer: Trainer, start_from: StartFrom | None) -> tuple[StartingPoint, State]:
    if start_from is None or start_from.path is None:
        return StartingPoint(notes=_never_learn(trainer, {})), {}
    slots = {name: tf.TensorSpec(*spec) for name, spec in trainer.state.specs().items() if name.startswith(OPTIMIZER)}
    begun = start_weights.read(start_from, trainer.model, slots)
    state = trainer.state.started(begun.weights, begun.slots)
    notes = (begun.note, *_never_learn(trainer, begun.weights))
    return StartingPoint(notes=notes, listing=begun.listing), state


def _never_learn(trainer: Trainer, given: Mapping[int, np.ndarray]) -> tuple[str, ...]:
    """A note on LoRA's matrices that are both zero, as Keras leaves them where it opens a file: of none is a gradient
    other than zero, whatever the loss.
    """
    dead = []
    for layer in layers_of(trainer.model):
        for name, first in vars(layer).items():
            second = vars(layer).get(f"{name[:-1]}b") if re.fullmatch(r"lora_\w+_a", name) else None
            if second is None or not first.trainable:
                continue
            read = trainer.runtime.state.read
            values = (given[id(one)] if id(one) in given else read(one) for one in (second, first))
            dead += [] if any(map(np.any, values)) else [(layer.path, name)]
    if not dead:
        return ()
    paths, name = [path for path, _ in dead], dead[0][1]
    return (
        f"LoRA's two matrices of {first_of(paths)} are both 0, as Keras leaves them where it opens a file, so that "
        "neither ever learns. In build(), give each such layer a first one anew: "
        f"layer.{name}.assign(keras.initializers.HeUniform()(layer.{name}.shape))",
    )


def _read(store: CheckpointStore, trainer: Trainer, start_from: StartFrom | None) -> tuple[StartingPoint, State]:
    newest = store.latest()
    if newest is None:
        return _begun(trainer, start_from)
    state = _state_at(newest, store, trainer)
    manifest = store.manifest(newest)
    note = _settle_loss_scale(state, manifest.get("scaling"), trainer)
    start = StartingPoint(
        step=newest,
        best=store.best_record(),
        notes=(note,) if note else (),
        host={name.removeprefix(HOST): state.pop(name) for name in [*state] if name.startswith(HOST)},
        rewinds=store.rewinds(),
    )
    return start, state


def _state_at(step: int, store: CheckpointStore, trainer: Trainer) -> dict[str, Any]:
    """Without what this run does not average. What it averages and the other did not starts at the weight itself."""
    specs = trainer.state.specs()
    # A rate that is set takes the place of a schedule, or the other way round.
    rates = {name: name for name in [*specs, *store.manifest(step)["tensors"]] if name.endswith("/learning_rate")}
    stand_ins = {**trainer.state.stand_ins(), **rates}
    store.check_compatible(step, specs, stand_ins)
    stored, in_parts = store.stored(step), trainer.state.names_of_parts()
    at = {name: name for name in stored if name.startswith(HOST)}
    at |= {name: name if name in stored else stand_ins[name] for name in specs if name in stored or name not in rates}
    whole = {stands for name, stands in at.items() if name not in in_parts}
    values = store.read(step, whole.__contains__)

    def state(name: str, stands: str) -> Any:
        dtype = specs[name][1] if name in specs and stands != name else stored[stands].dtype
        if name in in_parts:
            return stored[stands].astype(dtype)
        return values[stands].astype(tf.dtypes.as_dtype(dtype).as_numpy_dtype, copy=False)

    return {name: state(name, stands) for name, stands in at.items()}


def _settle_loss_scale(
    state: dict[str, np.ndarray], recorded: Mapping[str, Any] | None, trainer: Trainer
) -> str | None:
    """Puts the recipe's own loss scale in place of the state of another one; says what it did, unless all is the same.

    `recorded` is what the checkpoint says of its loss scale; None where it says nothing.
    """
    if recorded in (None, trainer.state.scaling):
        return None
    at = float(state["loss_scale/scale"])
    state.update(trainer.state.initial_loss_scale())
    return (
        f"the checkpoint's loss scale {at:g} is of {_shown(recorded)}; this run starts with its own: "
        f"{_shown(trainer.state.scaling)} at {float(state['loss_scale/scale']):g}"
    )


def _shown(scaling: Mapping[str, Any]) -> str:
    try:
        loss_scale = scaling["loss_scale"]
        arguments = ", ".join(f"{name}={value}" for name, value in loss_scale["arguments"].items())
        return f"{loss_scale['kind']}({arguments}) under {scaling['policy']}"
    except (AttributeError, KeyError, TypeError):  # another version's
        return str(scaling)


@dataclasses.dataclass
class FromChief:
    """Arrays that only the chief has, brought to every worker bit for bit, the way that gradients take.

    TensorFlow's collectives add numbers, which would change a NaN's payload or the sign of a zero. So arrays travel as
    the 32-bit words they consist of: one replica of the chief gives its words, all others give zeros, and whole numbers
    are added. The chief and the others make the same calls in the same order.

    A collective has `chunk_bytes`, a multiple of 4: a bound on the memory it takes besides the arrays.
    """

    runtime: TfRuntime
    is_chief: bool
    chunk_bytes: int = _CHUNK_BYTES

    def share(
        self, record: Mapping[str, Any] | None = None, arrays: Mapping[str, np.ndarray] | None = None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns the chief's record, which JSON can hold, and its arrays everywhere; the others give nothing.

        It returns on the chief when every other worker has begun to take what was shared.
        """
        specs = {name: (np.shape(array), array.dtype.name) for name, array in (arrays or {}).items()}
        parts = [np.ascontiguousarray(array).reshape(-1) for array in (arrays or {}).values()]
        text = array_of([record, specs])
        size = np.array([text.nbytes], np.int64)
        self._send([size])
        if not self.is_chief:
            text = np.zeros(size[0], np.uint8)
        self._send([text])
        shared, specs = record_of(text)
        if not self.is_chief:
            parts = [
                np.zeros(math.prod(shape), tf.dtypes.as_dtype(dtype).as_numpy_dtype) for shape, dtype in specs.values()
            ]
        self._send(parts)
        return shared or {}, {name: part.reshape(specs[name][0]) for name, part in zip(specs, parts, strict=True)}

    def _send(self, parts: Sequence[np.ndarray]) -> None:
        """Fills the others' arrays, uint8 or of one number, with what is in the chief's."""
        parts = [part.view(np.uint8) for part in parts]
        total = sum(part.nbytes for part in parts)
        # All chunks are of one size, because each size is traced.
        chunk = np.zeros(min(self.chunk_bytes, -(-total // _WORD_BYTES) * _WORD_BYTES), np.uint8)
        for start in range(0, total, max(1, chunk.nbytes)):
            places = list(_overlaps(parts, start, start + chunk.nbytes))
            if self.is_chief:
                for part, place in places:
                    chunk[place] = part
            words = self.runtime.call(_words_of_first_replica, tf.constant(chunk.view(np.int32))).view(np.uint8)
            if not self.is_chief:
                for part, place in places:
                    part[...] = words[place]


def _overlaps(parts: Sequence[np.ndarray], start: int, stop: int) -> Iterator[tuple[np.ndarray, slice]]:
    """Stretches of the parts that, laid end to end, lie in bytes [start, stop), and where in that range."""
    offset = 0
    for part in parts:
        first, last = max(start, offset), min(stop, offset + part.nbytes)
        if first < last:
            yield part[first - offset : last - offset], slice(first - start, last - start)
        offset += part.nbytes


def _words_of_first_replica(words: tf.Tensor) -> tf.Tensor:
    context = tf.distribute.get_replica_context()
    mine = tf.where(tf.equal(context.replica_id_in_sync_group, 0), words, tf.zeros_like(words))
    return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)


def _shared(chief: FromChief, read: Callable[[], tuple[StartingPoint, State]]) -> tuple[StartingPoint, State]:
    """The chief's starting point and state, on all workers."""
    if not chief.is_chief:
        record, arrays = chief.share()
        if "error" in record:
            with contextlib.suppress(tf.errors.OpError):  # The chief may be gone by now.
                chief.share()
            raise ChiefError(record["error"], record["exit_code"])
        record["host"] = {name: arrays.pop(name) for name in record["host"]}
        record["best"] = record["best"] and Best(**record["best"])
        return StartingPoint(**record | {name: tuple(record[name]) for name in ("notes", "rewinds")}), arrays
    try:
        start, state = read()
    except LauncherError as error:
        chief.share({"error": str(error), "exit_code": error.exit_code})
        chief.share()  # returns when all have got the first one, so that the chief may leave
        raise
    record = dataclasses.asdict(dataclasses.replace(start, host={}, listing=""))
    chief.share(record | {"host": [*start.host]}, {**state, **start.host})
    return start, state

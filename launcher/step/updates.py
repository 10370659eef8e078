"""The update of one replica's variables, made or left out by one check, in a way for each kind of device.

The check is the same on all replicas, so what is local may stand in a conditional. A collective may not.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from launcher.optimizers.weight_shards import WeightShard
from launcher.step import gradients, overflow
from launcher.step.rows import Rows, spread
from launcher.step.statistics import Gains
from launcher.step.step_config import StepConfig, StepParts


class Trained(NamedTuple):
    """A weight that the loss depends on.

    Attributes:
      number: its position among all trained weights.
      weight: the variable.
      shard: what a replica updates of it; None where each replica updates all of it.
      rows: which of its rows the gradient is of; None for all in order.
    """

    number: int
    weight: keras.Variable
    shard: WeightShard | None
    rows: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change that one step makes on this replica if it is applied.

    Attributes:
      trained: the weights to update.
      checked: their gradients and the check; of a weight with a shard, that of the shard if `config.checks_shards`.
      moving: as `Gains` has it.
      num_microbatches: of all replicas together, without those of padding alone.
      learning_rate: of this step.
      parts: of the run; its optimizer may be one of `Optimizers`.
    """

    trained: Sequence[Trained]
    checked: gradients.Checked
    moving: Gains = ()
    num_microbatches: int = 1
    learning_rate: tf.Tensor
    parts: StepParts

    @property
    def config(self) -> StepConfig:
        return self.parts.config

    @property
    def num_weights(self) -> int:
        """All trained weights, also those that the loss does not depend on."""
        return len(self.parts.model.trainable_variables)

    @property
    def shards(self) -> dict[int, WeightShard]:
        """What this replica updates a shard of, by the position of the weight."""
        return {one.number: one.shard for one in self.trained if one.shard is not None}

    @property
    def tables(self) -> list[Trained]:
        """The weights whose rows are updated by themselves."""
        return [one for one in self.trained if one.rows is not None]

    def update_weights(self) -> list[tf.Tensor]:
        """Clips the gradients and applies the optimizer; returns the new values of `shards`, which are not assigned."""
        by_index = self._by_index(self._clipped())
        if not self.config.checks_shards:
            by_index |= {index: shard.of(by_index[index]) for index, shard in self.shards.items()}
        for one in self.tables:
            del by_index[one.number]
        of_all = [by_index.get(index) for index in range(self.num_weights)]
        step = tf.cast(tf.convert_to_tensor(self.parts.counters.step), tf.float32)
        return self.parts.optimizer.apply(of_all, step, self.learning_rate)

    def update_rows(self) -> None:
        """Updates the rows of `tables` if they are to be; not in a conditional, which would copy the tables."""
        if not self.tables:
            return
        by_index = self._by_index(self._clipped())
        for one in self.tables:
            gradient = spread(Rows(one.rows, by_index[one.number]))
            self.parts.optimizer.apply_rows(one.number, one.rows, gradient, self.learning_rate, self.checked.applied)

    def _clipped(self) -> list[tf.Tensor]:
        clipping = self.config.clipping
        # No other rule asks for them, and then no weight is a table.
        weights = [tf.cast(one.weight.value, tf.float32) for one in self.trained if clipping.adaptive]
        return clipping.apply(self.checked.gradients, self.checked.norm, weights)

    def present_shards(self) -> list[tf.Tensor]:
        """The values of `shards` as they are."""
        return [shard.taken().value for shard in self.shards.values()]

    def put_together(self, new: Sequence[tf.Tensor]) -> None:
        """Assigns the weights of `shards`, of which every replica has a new shard, after a collective."""
        if not self.shards:
            return
        axes = [shard.axis for shard in self.shards.values()]
        whole = gradients.gather(new, axes, bucket_bytes=self.config.bucket_bytes)
        for shard, value in zip(self.shards.values(), whole, strict=True):
            shard.whole.value.assign(value)

    def move_averages(self) -> None:
        """Moves the moving statistics, and the averages of weights and statistics."""
        move_averages(self.parts, self.moving, self.num_microbatches)

    def flags(self) -> tf.Tensor:
        """Flags of the weights whose gradients are not finite, as `overflow.pack` packs them."""
        squares = self.checked.squares
        by_index = self._by_index(self.checked.gradients if squares is None else tf.unstack(squares))
        of_all = [by_index.get(i, tf.zeros([])) for i in range(self.num_weights)]
        return overflow.pack(overflow.flags(of_all) if squares is None else overflow.of_scalars(tf.stack(of_all)))

    def no_flags(self) -> tf.Tensor:
        """The `flags` of gradients that are finite."""
        return tf.zeros([overflow.num_scalars(self.num_weights)])

    def _by_index(self, of_trained: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        return {one.number: tensor for one, tensor in zip(self.trained, of_trained, strict=True)}


def move_averages(parts: StepParts, moving: Gains, num_microbatches: int) -> None:
    """Moves the moving statistics, see `Change`, and the averages of weights and statistics."""
    for one, gained in moving:
        old = tf.convert_to_tensor(one.variable.value)
        new = one.moved(old, gained, num_microbatches)
        # A 16-bit forward pass can overflow in its statistics alone; those must not stay for ever. Each element by
        # itself: one test of them all would be one more pass over each variable.
        one.variable.value.assign(tf.where(tf.math.is_finite(new), new, old) if new.dtype.is_floating else new)
    parts.ema.update(tf.convert_to_tensor(parts.counters.step) - tf.convert_to_tensor(parts.counters.skipped))


def update(change: Change) -> tf.Tensor:
    """Makes the change if it is to be applied, in the way of the device; returns its flags if it is not.

    Where the step `selects`, the flags are zeros always: they would read every gradient at every step.
    """
    change.update_rows()
    if change.config.selects:
        return _masked(change)
    return _conditional(change)


def _conditional(change: Change) -> tf.Tensor:
    """For a CPU or GPU, which computes one branch of a conditional.

    What replicas update shards of is put together between two of them, also as it was.
    """
    no_flags = change.no_flags()

    def make() -> list[tf.Tensor]:
        new = change.update_weights()
        if not change.shards:
            change.move_averages()
        return [tf.identity(no_flags), *new]

    def move() -> tf.Tensor:
        change.move_averages()
        return tf.constant(True)

    # Flags are looked at only where nothing is applied, so that a finite step pays nothing for them.
    flags, *new = tf.cond(change.checked.applied, make, lambda: [change.flags(), *change.present_shards()])
    if change.shards:
        change.put_together(new)
        tf.cond(change.checked.applied, move, lambda: tf.constant(False))
    return flags


def _masked(change: Change) -> tf.Tensor:
    """For a TPU, which computes both branches, and for an update with collectives: made, and then taken back."""
    no_flags = change.no_flags()
    updated = [one.weight.value for one in change.trained if one.shard is None and one.rows is None]
    updated += [variable.value for variable in change.parts.optimizer.variables]
    present = change.present_shards()
    with _kept_if(change.checked.applied, updated):
        new = change.update_weights()
    change.put_together([tf.where(change.checked.applied, *pair) for pair in zip(new, present, strict=True)])
    moved = [*(one.variable.value for one, _ in change.moving), *(average for _, average in change.parts.ema.variables)]
    with _kept_if(change.checked.applied, moved):
        change.move_averages()
    return no_flags


@contextlib.contextmanager
def _kept_if(applied: tf.Tensor, variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Takes back what the block assigns to these variables unless it is to be applied."""
    before = [tf.identity(variable) for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        # Not `assign`, which for the optimizer's count of updates would call into the cross-replica context.
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.where(applied, tf.identity(variable), value))

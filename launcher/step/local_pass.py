"""One replica's forward and backward pass: its microbatches one after another, added up in float32.

    loss sum -> / nominal weight -> * scale -> differentiate -> add up microbatches in float32

Whatever the model's forward pass assigns is put back, so that a step may still be skipped, or looked at without being
taken. `OwnTime` tells how long a worker spends on it, without the waiting for others in the reduction.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from launcher.data.pipeline import WEIGHT, Batch
from launcher.errors import UsageError
from launcher.machine import loops, xla
from launcher.machine.no_autograph import no_autograph
from launcher.step import gradients, op_source
from launcher.step.layers import activity_penalties
from launcher.step.rows import Rows, rows_of
from launcher.step.statistics import is_overwritten, moving, present, seed_states
from launcher.step.step_config import StepConfig, StepParts
from launcher.tasks import cross_entropy, dropout
from launcher.tasks.base import loss_sums, real_rows
from launcher.tasks.lookups import counted

Watch = Callable[[tf.GradientTape], list[tf.Tensor]]
"""Called under the tape of every microbatch, before its loss: tensors to differentiate the loss by, besides weights."""


class LocalSums(NamedTuple):
    """One replica's float32 sums over its microbatches.

    Attributes:
      gradients: of the scaled loss, by each trained variable; of no element by those in `Traced.tables`.
      rows: by those, not added up by row yet.
      moving: what the statistics gained, see `launcher.step.statistics`.
      loss, weight, metrics: as the task gives them, regularisation included.
      watched: gradients by what `ReplicaStep` was told to watch.
    """

    gradients: list[tf.Tensor]
    moving: list[tf.Tensor]
    loss: tf.Tensor
    weight: tf.Tensor
    metrics: tuple[tf.Tensor, ...]
    watched: list[tf.Tensor]
    rows: list[Rows]


class Traced(NamedTuple):
    """Facts of a step that are known once it is traced.

    Attributes:
      metrics: how many numbers each of the task's metrics has, 1 for a scalar; in the order of the names.
      unused: positions of the trained variables that the loss does not depend on. They are not reduced and not
        updated, so that neither momentum nor weight decay moves them.
      tables: positions of those whose gradients are kept by rows.
      lookups: rows that a replica looks up in a step, at most, of those and of others that might be, by position.
    """

    metrics: Mapping[str, int] = MappingProxyType({})
    unused: Collection[int] = ()
    tables: Sequence[int] = ()
    lookups: Mapping[int, int] = MappingProxyType({})

    @classmethod
    def of(cls, metrics: Mapping[str, tf.Tensor], unused: Collection[int]) -> "Traced":
        return cls({name: metrics[name].shape.num_elements() for name in sorted(metrics)}, unused)


class LocalPass:
    """The forward and backward pass of one replica; in replica context, without any collective.

    Args:
      watch: what else the loss is differentiated by.

    Attributes:
      moving: the statistics, and overwritten weights.
      traced: overwritten weights are among the unused ones.
    """

    def __init__(self, parts: StepParts, watch: Watch | None = None):
        self._task, self._model, self._config, self._watch = parts.task, parts.model, parts.config, watch
        self._optimizer = parts.optimizer
        self._weights = list(self._model.trainable_variables)
        self._seeds = seed_states(self._model)
        self.moving = moving(parts.statistics, self._weights)
        self._overwriting: set[int] = set()
        self.traced = Traced()
        self._forward_backward: Any = self._differentiate  # or a tf.function of it
        if self._config.jit_compile:
            self._forward_backward = tf.function(self._differentiate, jit_compile=True, autograph=False)
        elif self._config.microbatches > 1:
            self._forward_backward = tf.function(self._differentiate, autograph=False)

    def __call__(self, batch: Batch, scale: tf.Tensor, step: tf.Tensor) -> LocalSums:
        """The float32 sums over all microbatches of this replica's part of the global batch.

        Args:
          step: for random numbers.
        """
        count, moving_before = self._config.microbatches, present(self.moving)
        if count == 1:
            return self._microbatch(batch, scale, step, 0, moving_before)
        parts = {
            name: tf.reshape(tensor, [count, tensor.shape[0] // count, *_sizes(tensor)])
            for name, tensor in batch.items()
        }

        def part(index: tf.Tensor | int) -> Batch:
            return {name: tensor[index] for name, tensor in parts.items()}

        # From zeros, not from the first microbatch: outside the loop, it would be held beside those inside, and two
        # microbatches would need the memory of one.
        zeros = self._zero_sums(part(0), scale)

        def body(index: tf.Tensor, totals: LocalSums) -> tuple[tf.Tensor, LocalSums]:
            more = self._microbatch(part(index), scale, step, index, moving_before)
            rows = tf.nest.map_structure(
                lambda all_parts, one: tf.tensor_scatter_nd_update(all_parts, [[index]], one[None]),
                totals.rows,
                more.rows,
            )
            sums = tf.nest.map_structure(tf.add, totals._replace(rows=[]), more._replace(rows=[]))
            return index + 1, sums._replace(rows=rows)

        start = zeros._replace(
            rows=tf.nest.map_structure(lambda one: tf.zeros([count, *one.shape], one.dtype), zeros.rows)
        )
        _, sums = tf.while_loop(lambda index, _: index < count, body, (tf.constant(0), start), parallel_iterations=1)
        return sums._replace(rows=tf.nest.map_structure(lambda one: tf.reshape(one, [-1, *one.shape[2:]]), sums.rows))

    def first(self, batch: Batch, scale: tf.Tensor, step: tf.Tensor) -> LocalSums:
        """The same over the first microbatch alone, all gradients `whole`."""
        count = self._config.microbatches
        part = {name: tensor[: tensor.shape[0] // count] for name, tensor in batch.items()}
        return self.whole(self._microbatch(part, scale, step, 0, present(self.moving)))

    def whole(self, local: LocalSums) -> LocalSums:
        """The same sums with a dense gradient by each trained variable."""
        tables = zip(self.traced.tables, local.rows, strict=True)
        dense = {place: rows.whole(self._weights[place].shape) for place, rows in tables}
        return local._replace(gradients=[dense.get(*pair) for pair in enumerate(local.gradients)], rows=[])

    def _zero_sums(self, batch: Batch, scale: tf.Tensor) -> LocalSums:
        """The sums over no microbatch; traces the pass over one, which alone tells how many metrics there are."""
        outputs = self._forward_backward.get_concrete_function(self._taken(batch), scale).structured_outputs
        zeros = tf.nest.map_structure(lambda output: tf.zeros(output.shape, output.dtype), outputs)
        count, states = self._config.microbatches, zip(self.moving, present(self.moving), strict=True)
        gained = [one.gained(before, tf.constant(0.0), 0, count) for one, before in states]
        return zeros._replace(moving=[*map(tf.zeros_like, gained)])

    def _microbatch(
        self,
        batch: Batch,
        scale: tf.Tensor,
        step: tf.Tensor,
        index: tf.Tensor | int,
        moving_before: Sequence[tf.Tensor],
    ) -> LocalSums:
        """Forward and backward pass of one microbatch; leaves the moving statistics as they were."""
        set_seeds(self._seeds, self._config, step, index)
        sums = self._forward_backward(self._taken(batch), scale)
        for place in self._overwriting:
            self._weights[place].value.assign(sums.gradients[place])
        # Every microbatch starts from the step's statistics and reports its difference. The update of a moving
        # average is affine in the batch statistic, so the mean of the differences is exact on any topology.
        deltas = []
        of_padding, num_real = self._is_padding(index), tf.reduce_sum(batch.get(WEIGHT, 1.0))
        for one, before in zip(self.moving, moving_before, strict=True):
            delta = one.gained(before, num_real, index, self._config.microbatches)
            averaged = of_padding is not None and one.fold == "mean"
            deltas.append(tf.where(of_padding, tf.zeros_like(delta), delta) if averaged else delta)
            one.variable.value.assign(before)
        return sums._replace(moving=deltas)

    def _taken(self, batch: Batch) -> Batch:
        """A batch as the task's loss() takes it."""
        finish = self._config.finish_stored
        return real_rows(self._task, finish(batch) if finish else batch)

    def _is_padding(self, microbatch: tf.Tensor | int) -> tf.Tensor | None:
        """Whether there is no real example in a microbatch; None where there is one in all of them."""
        replicas, each = num_replicas(), self._config.microbatches
        if (parts := self._config.num_parts(replicas)) == replicas * each:
            return None
        return tf.distribute.get_replica_context().replica_id_in_sync_group * each + microbatch >= parts

    def _by_rows(self, found: Sequence[Any], counted: Mapping[int, int]) -> tuple[dict[int, Rows], dict[int, int]]:
        """The gradients that are kept by rows, by their variables' positions; and `Traced.lookups`."""
        count, by_rows, of_step = self._config.microbatches, dict[int, Rows](), dict[int, int]()
        for place, (gradient, weight) in enumerate(zip(found, self._weights, strict=True)):
            # Microbatches are put in a row, of a size that is known.
            known = 0 if count > 1 else counted[id(weight)]
            rows, lookups = rows_of(gradient, weight.value.shape, known, count * num_replicas())
            if lookups:
                of_step[place] = count * lookups
            if rows is None or self._config.clipping.adaptive:
                continue
            if self._optimizer.updates_rows(place, self._config.lazy_embeddings):
                by_rows[place] = rows
        return by_rows, of_step

    @dropout.exact()
    def _differentiate(self, batch: Batch, scale: tf.Tensor) -> LocalSums:
        """The sums of one microbatch, but for what it has moved."""
        variables = [variable.value for variable in self._weights]
        tape = tf.GradientTape(watch_accessed_variables=False)
        with tape, counted(self._config.rows) as lookups:
            for variable in variables:
                tape.watch(variable)
            sources: list[tf.Tensor] = [] if self._watch is None else self._watch(tape)
            parts = activity_penalties(self._model, self._config.global_batch_size / self._config.rows)
            with xla.compiling(self._config.compiled), cross_entropy.using(self._config.loss_chunks), parts:
                loss, weight, metrics = loss_sums(self._task, self._model, batch, True)
            if self._model.losses and not self._task.adds_losses:
                # Weighted like the examples beside it, a regulariser counts once in the global mean.
                loss += weight * tf.add_n([tf.cast(extra, tf.float32) for extra in self._model.losses])
            if self._config.penalty is not None:
                loss += weight * self._config.penalty(self._model)
            scaled = loss / self._config.nominal_weight * scale
        loops.count_turns(tf.compat.v1.get_default_graph())
        with xla.compiling(self._config.compiled):
            try:
                found, watched = tape.gradient(scaled, (variables, sources))
            except LookupError as error:  # a KeyError is one, too
                raise op_source.without_gradient(error, self._model) from error
        unused = {index for index, gradient in enumerate(found) if gradient is None}
        if len(unused) == len(variables):
            raise UsageError("the loss depends on no trained variable: does loss() use the model that it is given?")
        self._overwriting = {place for place, one in enumerate(self._weights) if is_overwritten(one)} - unused
        by_rows, num_lookups = self._by_rows(found, lookups)
        self.traced = Traced.of(metrics, unused | self._overwriting)._replace(tables=[*by_rows], lookups=num_lookups)
        return LocalSums(
            gradients=[
                tf.zeros([0] if place in by_rows else variable.shape)
                if gradient is None or place in by_rows
                else gradients.dense(gradient, variable.shape)
                for place, (gradient, variable) in enumerate(zip(found, variables, strict=True))
            ],
            moving=[],
            loss=loss,
            weight=weight,
            metrics=tuple(metrics[name] for name in self.traced.metrics),
            watched=[
                tf.zeros_like(source) if gradient is None else tf.convert_to_tensor(gradient)
                for gradient, source in zip(watched, sources, strict=True)
            ],
            rows=[*by_rows.values()],
        )


@no_autograph
def set_seeds(
    states: Sequence[keras.Variable], config: StepConfig, step: tf.Tensor, microbatch: tf.Tensor | int = 0
) -> None:
    """Gives every seed generator a state of (seed, step, first example of this part of the global batch)."""
    if not states:
        return
    replica = tf.distribute.get_replica_context().replica_id_in_sync_group
    # The offset, not the replica, so that 2 replicas of 2 microbatches draw what 4 replicas draw.
    offset = replica * (config.rows * config.microbatches) + microbatch * config.rows
    pair = tf.stack([tf.constant(config.seed & 0x7FFFFFFF, tf.int32), tf.constant(0, tf.int32)])
    pair = tf.random.experimental.stateless_fold_in(pair, tf.cast(step, tf.int32))
    pair = tf.random.experimental.stateless_fold_in(pair, tf.cast(offset, tf.int32))
    drawn = tf.random.stateless_uniform([len(states), 2], seed=pair, minval=0, maxval=2**31 - 1, dtype=tf.int32)
    for index, variable in enumerate(states):
        variable.value.assign(tf.cast(drawn[index], variable.value.dtype))


def _sizes(tensor: tf.Tensor) -> list[int | tf.Tensor]:
    """Sizes of the axes but the first, as numbers where they are known."""
    return [tf.shape(tensor)[axis] if size is None else size for axis, size in enumerate(tensor.shape)][1:]


@no_autograph
def num_replicas() -> int:
    """Over which the step is reduced."""
    return tf.distribute.get_replica_context().num_replicas_in_sync


@no_autograph
def is_first_replica() -> bool:
    """Whether what is traced is the first replica's, where each is traced by itself."""
    return tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 0


class OwnTime:
    """Seconds so far, in a variable of each worker outside checkpoints, by the host's clock. It is read once the batch
    is there, and again when the loss and the gradient that is ready last have come back from the device.
    """

    def __init__(self) -> None:
        self.seconds = tf.Variable(0.0, dtype=tf.float64, trainable=False, aggregation=tf.VariableAggregation.NONE)

    def of(self, local_pass: LocalPass, batch: Batch, scale: tf.Tensor, step: tf.Tensor) -> LocalSums:
        """Runs the pass and counts the time until this worker's gradients are there."""
        begun = _clock_after(tf.nest.flatten(batch))
        local = local_pass(batch, scale, step)
        # The first weights' gradient is the last one that a backward pass makes.
        last = [tf.reshape(local.gradients[0], [-1])[:1], *tf.nest.flatten(local.rows)]
        self.seconds.assign_add(_clock_after([local.loss, *last]) - begun)
        return local


def _clock_after(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.device("CPU:0"), tf.control_dependencies([tf.identity(tensor) for tensor in tensors]):
        return tf.timestamp()

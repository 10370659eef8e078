"""The optimizer of a step: a Keras optimizer, applied by each replica to its own copy of the weights.

Keras's `apply_gradients` reduces, clips, decays and scales inside one call, per replica and in the wrong order for
scaled gradients. Launcher's step hands over gradients that are reduced, unscaled and clipped already; `Optimizer` then
takes from a Keras optimizer only its slots and its `update_step`, and adds the learning rate, weight decay,
constraints and the count of updates. What the Keras optimizer was made with is kept: its learning rate, its weight
decay, which Keras multiplies by the learning rate and takes from every weight that `exclude_from_weight_decay` does not
name, and its bound on gradients, which the step applies once, after the reduction. One that has methods of its own for
any of that does all of it by itself, see `launcher.optimizers.own_settings`.
"""

import contextlib
import math
import re
from collections.abc import Sequence

import keras
import tensorflow as tf

from launcher.config.bound_types import checked_patterns
from launcher.errors import UsageError
from launcher.machine.no_autograph import call_converted, no_autograph
from launcher.machine.replaced import put
from launcher.machine.replicas import read_rows, write_rows
from launcher.optimizers import own_settings, same_bits
from launcher.optimizers.schedules import Schedule
from launcher.optimizers.weight_shards import StandIn, Variables, WeightShard, shard_of

# Biases and normalisation parameters, by the end of their path.
NO_DECAY = (r"bias$", r"gamma$", r"beta$")

# What a Keras optimizer would do inside apply_gradients, and what does it here.
_NOT_APPLIED = {
    "gradient_accumulation_steps": "give microbatches (train.microbatches) instead",
    "loss_scale_factor": "bind train.loss_scale instead",
    "use_ema": "bind train.ema_decay instead",
}

# Keras's optimizers whose update treats each element of a weight by itself.
_ELEMENT_WISE = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "ScheduleFreeAdamW",
)
# Those of them that count nothing but their updates, so that rows may be updated before the rest.
_BY_ROWS = tuple(name for name in _ELEMENT_WISE if name not in ("Nadam", "ScheduleFreeAdamW"))


class Optimizer:
    """A Keras optimizer with a schedule and weight decay, applied per replica without any collective.

    Everything a step changes (weights, slots, the count of updates) changes inside `apply`, so that a caller may put
    it in a conditional: a step that is skipped leaves no trace.

    Args:
      keras_optimizer: a fresh one, made under the strategy's scope. It must do its work in `update_step`.
      learning_rate: a number, or a schedule of the run's step; None for the Keras optimizer's own.
      weight_decay: coefficient; 0 for none but the Keras optimizer's own.
      decoupled: True for `w -= learning_rate * weight_decay * w` beside the update (Loshchilov & Hutter 2019, arXiv
        1711.05101, as in Keras's and PyTorch's AdamW); False for `gradient += weight_decay * w` before it (L2, as in
        He et al. 2016 and PyTorch's SGD). Must be said when weight_decay is not 0.
      exclude_from_decay: regular expressions searched for in variables' paths; a match is not decayed. None for
        `NO_DECAY`, or for nothing where the Keras optimizer's own weight decay is kept.
      settable_rate: whether the Keras optimizer's own learning rate, if it is a number, may be set while training, as
        Keras's callbacks do, by `keras_optimizer.learning_rate = rate` on every worker. Checkpoints hold it then.
      own_average: whether the Keras optimizer may have `use_ema`. Its averages are kept as Keras does; to put them in
        the place of the weights at the end is for the caller.

    Attributes:
      keras_optimizer: as it was given.
      updated: what `build` was given.
      shards: of each variable that `build` was given, the shard that a replica updates; None where each updates the
        whole.
      slot_shards: slots of which a replica holds a shard, each with its shape's shard: the variable's, or less an axis.

    Raises:
      UsageError: an argument is out of range, or the Keras optimizer relies on what `apply_gradients` does.
    """

    def __init__(
        self,
        keras_optimizer: keras.optimizers.Optimizer,
        *,
        learning_rate: float | Schedule | None = None,
        weight_decay: float = 0.0,
        decoupled: bool | None = None,
        exclude_from_decay: Sequence[str] | None = None,
        settable_rate: bool = False,
        own_average: bool = False,
    ):
        _check_plain(keras_optimizer, own_average)
        self.keras_optimizer = keras_optimizer
        if not (math.isfinite(weight_decay) and weight_decay >= 0.0):
            raise UsageError(f"{keras_optimizer.name}: weight_decay = {weight_decay} must be 0 or more")
        if weight_decay and decoupled is None:
            raise UsageError(
                f"{keras_optimizer.name}: weight_decay = {weight_decay} needs decoupled=True (beside the update, as "
                "AdamW) or decoupled=False (added to the gradient, as SGD)"
            )
        self._own = own_settings.overridden(keras_optimizer) or own_settings.left_to_it(keras_optimizer)
        self._is_given = bool(weight_decay) or learning_rate is not None
        keras_decays = own_settings.decays(keras_optimizer)
        if weight_decay and keras_decays:
            raise UsageError(
                f"{keras_optimizer.name}: weight_decay = {weight_decay} beside the Keras optimizer's own "
                f"{keras_optimizer.weight_decay}; give one of them (weight_decay=None to the Keras optimizer)"
            )
        rate = own_settings.rate(keras_optimizer)
        self._rate = rate if settable_rate and isinstance(rate, keras.Variable) else None
        self._schedule = _own_rate(keras_optimizer) if learning_rate is None else _as_schedule(learning_rate)
        self._weight_decay = weight_decay
        self._decoupled = bool(decoupled) or keras_decays
        excluded = () if keras_decays else NO_DECAY
        patterns = excluded if exclude_from_decay is None else exclude_from_decay
        self._exclude = checked_patterns("exclude_from_decay", patterns)
        self.updated: list[keras.Variable] = []
        self._decays: list[float] = []
        self._multipliers: list[float] = []
        self._positions: Sequence[int] = ()
        self._total_steps = 0
        self.shards: list[WeightShard | None] = []
        self.slot_shards: list[tuple[keras.Variable, WeightShard]] = []

    def build(
        self,
        variables: Variables,
        total_steps: int,
        rate_multipliers: Sequence[float] | None = None,
        shards: int = 1,
        positions: Sequence[int] | None = None,
    ) -> None:
        """Creates the slots; under the strategy's scope.

        Args:
          variables: what `apply` will update, in its order.
          rate_multipliers: what multiplies the learning rate of each variable, and with it all that the optimizer does
            by the rate: decoupled weight decay is multiplied, too. None for 1 everywhere.
          shards: replicas among which the slots are shared out; 1 for all slots on every replica. The optimizer must be
            one that `check_shardable` lets through.
          positions: those of the variables' gradients among what `apply` is given; None for all in order.

        Raises:
          UsageError: a variable, the optimizer or the schedule cannot be used on replicas.
        """
        self._check_scope(variables, shards)
        if self._own and (self._is_given or shards > 1 or {*(rate_multipliers or ())} - {1.0}):
            raise UsageError(
                f"{', '.join(self._own)} of {type(self.keras_optimizer).__name__} {self.keras_optimizer.name!r} goes "
                "by the rate and decay that this was made with, and by whole weights: give no other rate or weight "
                "decay, no train.rate_multipliers and no train.shard"
            )
        for variable in variables:
            if variable.value.aggregation != tf.VariableAggregation.NONE:
                raise UsageError(f"{variable.path!r}: make it without aggregation={variable.aggregation!r}")
        self.updated = list(variables)
        self.shards = [shard_of(variable, shards) for variable in variables]
        self._build_keras()
        self._decays = [
            0.0 if any(re.search(pattern, variable.path) for pattern in self._exclude) else self._weight_decay or own
            for variable, own in zip(
                variables, own_settings.weight_decays(self.keras_optimizer, variables), strict=True
            )
        ]
        self._multipliers = [1.0 for _ in variables] if rate_multipliers is None else list(rate_multipliers)
        self._positions = range(len(variables)) if positions is None else positions
        self._total_steps = total_steps
        rate = self.learning_rate(tf.constant(0.0))
        if rate.shape.rank != 0:
            raise UsageError(f"{self.keras_optimizer.name}: the schedule must return a scalar, got shape {rate.shape}")

    def check_shardable(self) -> None:
        """Raises UsageError where it is not known that the state can be shared out; see `weight_shards`."""
        kind = type(self.keras_optimizer)
        known = kind in [getattr(keras.optimizers, name, None) for name in _ELEMENT_WISE]
        if known or getattr(kind, "element_wise", False) or self.reduces_shards:
            return
        raise UsageError(
            f"train.shard: {kind.__name__} {self.keras_optimizer.name!r} is not known to update each element of a "
            "weight by itself, and its replicas would see only their shards of the weights. Bind train.optimizer to "
            "Launcher's @adafactor, @lamb, @lars, @muon or @nadam, which do it in parts, or use one of "
            f"{', '.join(_ELEMENT_WISE)}; leave train.shard out, or, if it is your own and its update_step does so, "
            "say element_wise = True in its class"
        )

    @property
    def reduces_shards(self) -> bool:
        """Whether `apply` takes `weight_shards.norms` or `means`, which reduce over the replicas where variables are
        sharded, so that it cannot stand in a conditional then.
        """
        return getattr(type(self.keras_optimizer), "reduces_shards", False)

    @property
    def decays(self) -> list[float]:
        """The weight decay of each of what `updated` lists; 0 for none."""
        kept = getattr(self.keras_optimizer, "layer_decay", 0.0)  # which a method of Launcher's does by itself
        return [kept * one for one in self.keras_optimizer.included] if kept else self._decays

    def _build_keras(self) -> None:
        if not any(self.shards):
            if not self.keras_optimizer.built:
                self.keras_optimizer.build(self.updated)
            return
        keras_add = self.keras_optimizer.add_variable_from_reference

        def add(reference_variable: object, name: str = "var", initializer: object = "zeros") -> keras.Variable:
            if not isinstance(reference_variable, WeightShard):
                return keras_add(reference_variable, name=name, initializer=initializer)
            slot = self.keras_optimizer.add_variable(
                shape=reference_variable.shape,
                initializer=initializer,
                dtype=reference_variable.dtype,
                # Keras's own name for it, so that checkpoints are the same with whole slots.
                name=f"{reference_variable.path.replace('/', '_')}_{name}",
            )
            self.slot_shards.append((slot, reference_variable))
            return slot

        with contextlib.ExitStack() as undo:
            put(undo, self.keras_optimizer, "add_variable_from_reference", add)
            self.keras_optimizer.build(
                [shard or variable for shard, variable in zip(self.shards, self.updated, strict=True)]
            )

    @property
    def parts(self) -> Sequence["Optimizer"]:
        """Itself alone, as the parts of `Optimizers`."""
        return [self]

    @property
    def clipping(self) -> dict[str, float]:
        """The bound on gradients that the Keras optimizer was made with, as arguments of the step's `Clipping`.

        None of one with methods of its own, which clips the reduced gradients by itself.
        """
        return {} if self._own else own_settings.clipping(self.keras_optimizer)

    @property
    def variables(self) -> list[keras.Variable]:
        """Slots and the count of updates: what a checkpoint holds; the learning rate only where it may be set."""
        unused = own_settings.rate(self.keras_optimizer) if self._rate is None else None
        return [variable for variable in self.keras_optimizer.variables if variable is not unused]

    def copies(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """The slots that begin as copies of weights, each with its weight; only `ScheduleFreeAdamW` has such."""
        kind = getattr(keras.optimizers, "ScheduleFreeAdamW", None)
        if kind is None or not isinstance(self.keras_optimizer, kind):
            return []
        slots = {variable.name: variable for variable in self.keras_optimizer.variables}
        return [(slots[f"{weight.path.replace('/', '_')}_momentum"], weight) for weight in self.updated]

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """The rate of one step, float32 scalar, which `rate_multipliers` may multiply for some variables.

        Args:
          step: steps done before it, scalar; skipped steps count.
        """
        if (rate := self.keras_optimizer.learning_rate if self._own else self._rate) is not None:
            return tf.cast(tf.convert_to_tensor(rate), tf.float32)
        return tf.cast(call_converted(self._schedule, step, self._total_steps), tf.float32)

    def next_rate(self) -> tf.Tensor:
        """The rate of the next update, whose number, as for Keras, is that of the updates before it."""
        return self.learning_rate(tf.cast(tf.convert_to_tensor(self.keras_optimizer.iterations), tf.float32))

    def apply(
        self, gradients: Sequence[tf.Tensor | None], step: tf.Tensor, rate: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Updates this replica's weights; in replica context, also inside `tf.cond` unless it `reduces_shards`.

        Args:
          gradients: one for each variable given to `build`, at its position; reduced, unscaled and clipped float32
            tensors, equal on every replica; of a variable with a shard in `shards`, this replica's shard of it. None
            leaves the variable and its slots alone, as Keras does: no update and no decay.
          step: as in `learning_rate`.
          rate: what `learning_rate` returned for it, if that is known: a conditional would compute it once more.

        Returns:
          The new value of this replica's shard of each variable that has shards and a gradient, in their order. Those
          variables are not changed: that is for the caller, with the shards of all replicas.
        """
        gradients = [gradients[position] for position in self._positions]
        if self._own:
            with own_settings.alone(self.keras_optimizer):
                self.keras_optimizer.apply_gradients([*zip(gradients, self.updated, strict=True)])
            return []
        new: list[tf.Tensor] = []
        common_rate = self.learning_rate(step) if rate is None else rate
        short = same_bits.update_of(self.keras_optimizer, len(self.updated))
        if isinstance(self.keras_optimizer, keras.optimizers.Nadam):
            # Leans on Keras: there it advances the product of momentum factors, once a step. Noticed by
            # tests/optimizers/test_keras_optimizers.py. Then: see where it does so now; an AttributeError names it.
            with own_settings.alone(self.keras_optimizer):
                self.keras_optimizer._backend_update_step([], [], common_rate)
        for index, (gradient, whole, shard) in enumerate(zip(gradients, self.updated, self.shards, strict=True)):
            if gradient is None:
                continue
            variable = whole if shard is None else shard.taken()
            self._update(index, gradient, variable, common_rate, short)
            if shard is not None:
                new.append(variable.value)
            elif whole.constraint is not None:
                self.keras_optimizer.assign(whole, call_converted(whole.constraint, tf.convert_to_tensor(whole)))
        iterations = self.keras_optimizer.iterations
        # Keras gives the count an aggregation, for which `assign_add` would call into the cross-replica context: not
        # allowed in a conditional. Every replica counts the same, so each adds to its own copy.
        tf.raw_ops.AssignAddVariableOp(resource=iterations.value.handle, value=tf.ones([], iterations.dtype))
        return new

    def _update(
        self,
        index: int,
        gradient: tf.Tensor,
        variable: keras.Variable | StandIn,
        rate: tf.Tensor,
        short: same_bits.Update | None = None,
    ) -> None:
        """Updates one variable, or what stands in for it, at the rate of the step; if it is whole, by `short`."""
        multiplier, optimizer = self._multipliers[index], self.keras_optimizer
        own_rate = rate if multiplier == 1.0 else rate * multiplier
        if coefficient := self._decays[index]:
            decay = coefficient * tf.convert_to_tensor(variable)
            if self._decoupled:
                optimizer.assign_sub(variable, own_rate * decay)
            else:
                gradient += decay
        if short is not None and variable is self.updated[index] and variable.dtype == "float32":
            short(index, variable.value, gradient, own_rate)
        else:
            optimizer.update_step(gradient, variable, own_rate)

    def updates_rows(self, position: int, lazy: bool = False) -> bool:
        """Whether a weight's rows may be updated by `apply_rows`.

        They may where a row whose gradient is zero stays as it is, its slots too: by plain descent and by Adagrad.

        Args:
          lazy: also by an optimizer that moves such rows, which then stay as they are, undecayed.
        """
        if self._own or position not in self._positions:
            return False
        index, optimizer = self._positions.index(position), self.keras_optimizer
        weight, kinds = self.updated[index], _BY_ROWS if lazy else ("SGD", "Adagrad")
        is_known = type(optimizer) in [getattr(keras.optimizers, name) for name in kinds]
        stays = lazy or not (self._decays[index] or getattr(optimizer, "momentum", 0.0))
        return is_known and stays and weight.constraint is None and not self.shards[index] and weight.dtype == "float32"

    def apply_rows(
        self, position: int, ids: tf.Tensor, gradient: tf.Tensor, rate: tf.Tensor, applied: tf.Tensor
    ) -> None:
        """Updates rows of a weight, and of its slots; in replica context, before `apply`, not in a conditional.

        Args:
          ids: int [n]; where one stands several times, the gradient is the same at all places.
          gradient: float32 [n, ...].
          rate: what `learning_rate` returned.
          applied: bool scalar, whether to change anything.
        """
        index, parts = self._positions.index(position), list[tuple[StandIn, tf.Tensor]]()

        def taken(variable: keras.Variable) -> StandIn:
            before = read_rows(variable.value, ids)
            parts.append((StandIn(variable, before.shape, before), before))
            return parts[-1][0]

        with contextlib.ExitStack() as undo:
            for name, slots in own_settings.slots(self.keras_optimizer, len(self.updated)).items():
                put(undo, self.keras_optimizer, name, [*slots[:index], taken(slots[index]), *slots[index + 1 :]])
            self._update(index, gradient, taken(self.updated[index]), rate)
        for part, before in parts:
            write_rows(part.whole.value, ids, tf.where(applied, part.value, before))

    def _check_scope(self, variables: Variables, shards: int) -> None:
        strategy = tf.distribute.get_strategy()
        if not strategy.extended.variable_created_in_scope(self.keras_optimizer.iterations.value):
            raise UsageError(
                f"optimizer {self.keras_optimizer.name!r} was made outside of the strategy's scope: make it where "
                "the model is built, or bind train.optimizer to the function that makes it, as a reference (@name, "
                "without parentheses)"
            )
        is_same = [*map(id, own_settings.built_for(self.keras_optimizer))] == [*map(id, variables)]
        if self.keras_optimizer.built and (not is_same or shards > 1):
            why = "has trained already, and train.shard divides a state that begins here" if is_same else ""
            why = why or "has been built for other variables"
            raise UsageError(f"optimizer {self.keras_optimizer.name!r} {why}: make a new one")


def _check_plain(keras_optimizer: keras.optimizers.Optimizer, own_average: bool) -> None:
    """Refuses what would be silently lost, because only `update_step` is called."""
    if not isinstance(keras_optimizer, keras.optimizers.Optimizer):
        raise UsageError(f"expected a keras.optimizers.Optimizer, got {type(keras_optimizer).__name__}")
    name = f"{type(keras_optimizer).__name__} {keras_optimizer.name!r}"
    if isinstance(keras_optimizer, keras.optimizers.LossScaleOptimizer):
        raise UsageError(f"{name} skips steps on each replica by itself; give the inner one and bind train.loss_scale")
    for setting, advice in _NOT_APPLIED.items():
        value = getattr(keras_optimizer, setting, None)
        if value and not (own_average and setting == "use_ema"):
            raise UsageError(f"{name}: {setting}={value} acts on each replica by itself under Keras; {advice}")
    if isinstance(keras_optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise UsageError(
            f"{name} has others update its weights, which is not done here; give one of them, and what differs "
            "by train.rate_multipliers, a rate for each pattern of weights"
        )


def _own_rate(keras_optimizer: keras.optimizers.Optimizer) -> Schedule:
    """The rate that the Keras optimizer was made with, as a schedule of the run's step."""
    if (own := own_settings.schedule(keras_optimizer)) is not None:
        return lambda step, total_steps: own(step)
    rate = keras_optimizer.get_config()["learning_rate"]
    if isinstance(rate, float):
        return _as_schedule(rate)
    raise UsageError(
        f"{keras_optimizer.name}: its learning rate is neither a number nor a Keras schedule; give learning_rate to "
        "launcher.optimizers.Optimizer, as a number or a function of (step, total_steps)"
    )


def _as_schedule(learning_rate: float | Schedule) -> Schedule:
    if callable(learning_rate):
        return learning_rate
    if not (math.isfinite(learning_rate) and learning_rate >= 0.0):
        raise UsageError(f"learning_rate = {learning_rate}: must be a finite number, 0 or more")
    return no_autograph(lambda step, total_steps: tf.constant(learning_rate, tf.float32))

"""The optimizers that a model's own step applies, each with the weights that it is applied to, as one optimizer."""

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.optimizers import own_settings
from launcher.optimizers.optimizer import Optimizer
from launcher.optimizers.weight_shards import WeightShard


class Part:
    """One of them.

    Args:
      optimizer: the Keras optimizer.
      variables: those that it updates.

    Attributes:
      keras_optimizer: the one that it was made of.
      clipping: the bound on gradients that it was made with, as arguments of the step's `Clipping`.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]):
        self.keras_optimizer, self._variables = optimizer, list(variables)
        self._optimizer = Optimizer(optimizer, settable_rate=True)
        self._positions: list[int] = []
        self.clipping = self._optimizer.clipping

    def build(self, positions: Mapping[int, int], total_steps: int, multipliers: Sequence[float] | None) -> None:
        """Makes the slots; `positions` are those of the trained weights by id, in the order of the multipliers."""
        for variable in self._variables:
            if id(variable) not in positions:
                raise UsageError(
                    f"train_step applies {self.keras_optimizer.name!r} to {getattr(variable, 'path', variable.name)!r},"
                    " which is not among the model's trainable_variables: make it a weight of a layer or of the model, "
                    "and leave it trainable"
                )
        self._positions = [positions[id(variable)] for variable in self._variables]
        own = None if multipliers is None else [multipliers[position] for position in self._positions]
        self._optimizer.build(self._variables, total_steps, own)

    @property
    def variables(self) -> list[keras.Variable]:
        """As of `Optimizer`."""
        return self._optimizer.variables

    @property
    def updated(self) -> list[keras.Variable]:
        """The weights."""
        return self._variables

    def copies(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """As of `Optimizer`."""
        return self._optimizer.copies()

    def learning_rate(self) -> tf.Tensor:
        """The rate of the next update, whose number, as for Keras, is that of the updates before it."""
        return self._optimizer.learning_rate(tf.cast(tf.convert_to_tensor(self.keras_optimizer.iterations), tf.float32))

    def apply(
        self, gradients: Sequence[tf.Tensor | None], step: tf.Tensor, rate: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """As of `Optimizer`; one gradient for each trained weight of the model."""
        return self._optimizer.apply([gradients[position] for position in self._positions], step, rate)


class Optimizers:
    """All of them, in the order in which the step first applies them.

    Args:
      uses: an optimizer and weights, for each time that the step applies one.

    Attributes:
      num_uses: how many times that is.
    """

    reduces_shards = False
    clipping: Mapping[str, float] = {}
    slot_shards: Sequence[tuple[keras.Variable, WeightShard]] = ()

    def __init__(self, uses: Sequence[tuple[keras.optimizers.Optimizer, Sequence[keras.Variable]]]):
        self.num_uses, weights = len(uses), dict[int, dict[int, keras.Variable]]()
        found = {id(optimizer): optimizer for optimizer, _ in uses}
        for optimizer, variables in uses:
            known = weights.setdefault(id(optimizer), {id(one): one for one in own_settings.built_for(optimizer)})
            known |= {id(variable): variable for variable in variables}
        self._parts = {key: Part(optimizer, [*weights[key].values()]) for key, optimizer in found.items()}
        self.shards: list[WeightShard | None] = []

    @property
    def parts(self) -> list[Part]:
        """Each of them."""
        return list(self._parts.values())

    def part(self, optimizer: keras.optimizers.Optimizer) -> Part | None:
        """That of a Keras optimizer; None of one that was not among the uses."""
        return self._parts.get(id(optimizer))

    def build(
        self,
        variables: Sequence[keras.Variable],
        total_steps: int,
        rate_multipliers: Sequence[float] | None = None,
        shards: int = 1,
    ) -> None:
        """As of `Optimizer`, for all of them."""
        self.shards = [None for _ in variables]
        positions = {id(variable): position for position, variable in enumerate(variables)}
        for part in self._parts.values():
            part.build(positions, total_steps, rate_multipliers)

    def check_shardable(self) -> None:
        """Raises UsageError, always."""
        raise UsageError("train.shard: optimizers of a model's own train_step are not sharded; leave the binding out")

    @property
    def variables(self) -> list[keras.Variable]:
        """As of `Optimizer`."""
        return [variable for part in self._parts.values() for variable in part.variables]

    def copies(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """As of `Optimizer`."""
        return [pair for part in self._parts.values() for pair in part.copies()]

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """Of the one that is applied first."""
        return next(iter(self._parts.values())).learning_rate()

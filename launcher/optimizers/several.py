"""The optimizers that a model's own step applies, each with the weights that it is applied to, as one optimizer."""

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from launcher.errors import UsageError
from launcher.optimizers import own_settings
from launcher.optimizers.optimizer import Optimizer
from launcher.optimizers.weight_shards import Variables, WeightShard


class Optimizers:
    """Optimizers in the order in which the step first applies them.

    Args:
      uses: an optimizer and weights, for each time that the step applies one.

    Attributes:
      num_uses: how many times that is.
    """

    reduces_shards = False
    clipping: Mapping[str, float] = {}
    slot_shards: Sequence[tuple[keras.Variable, WeightShard]] = ()

    def __init__(self, uses: Sequence[tuple[keras.optimizers.Optimizer, Variables]]):
        self.num_uses, self._weights = len(uses), dict[int, dict[int, keras.Variable]]()
        for optimizer, variables in uses:
            built_for = own_settings.built_for(optimizer)
            known = self._weights.setdefault(id(optimizer), {id(variable): variable for variable in built_for})
            known |= {id(variable): variable for variable in variables}
        by_id = {id(optimizer): optimizer for optimizer, _ in uses}
        self._parts = {key: Optimizer(optimizer, settable_rate=True) for key, optimizer in by_id.items()}
        self.shards: list[WeightShard | None] = []

    @property
    def parts(self) -> list[Optimizer]:
        """Each of them; its `apply` takes one gradient for each trained weight of the model."""
        return list(self._parts.values())

    def part(self, optimizer: keras.optimizers.Optimizer) -> Optimizer | None:
        """The part of a Keras optimizer; None of one that was not among the uses."""
        return self._parts.get(id(optimizer))

    def build(
        self,
        variables: Variables,
        total_steps: int,
        rate_multipliers: Sequence[float] | None = None,
        shards: int = 1,
    ) -> None:
        """Creates the slots of each; see `Optimizer.build`."""
        self.shards = [None for _ in variables]
        positions = {id(variable): position for position, variable in enumerate(variables)}
        for key, part in self._parts.items():
            for own, variable in self._weights[key].items():
                if own not in positions:
                    raise UsageError(
                        f"train_step applies {part.keras_optimizer.name!r} to "
                        f"{getattr(variable, 'path', variable.name)!r}, which is not among the model's "
                        "trainable_variables: make it a weight of a layer or of the model, and leave it trainable"
                    )
            places = [positions[own] for own in self._weights[key]]
            multipliers = None if rate_multipliers is None else [rate_multipliers[place] for place in places]
            part.build([*self._weights[key].values()], total_steps, multipliers, positions=places)

    def check_shardable(self) -> None:
        """Raises UsageError, always."""
        raise UsageError("train.shard: optimizers of a model's own train_step are not sharded; leave the binding out")

    @property
    def variables(self) -> list[keras.Variable]:
        """Slots and counts of updates of all of them."""
        return [variable for part in self.parts for variable in part.variables]

    def copies(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """Slots that begin as copies of weights, each with its weight."""
        return [pair for part in self.parts for pair in part.copies()]

    def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
        """The next rate of the one that is applied first."""
        return self.parts[0].next_rate()

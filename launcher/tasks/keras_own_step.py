"""A Keras model's own `train_step` and `test_step`, untouched, on one replica's part of a batch.

What Keras puts between such a step and one device gives way while it is traced, see `launcher.tasks.keras_tracing`.
Metrics begin each step at their first values, so that what they gain is added up over replicas and steps as any task's
sums are. What the step returns is told by Keras's rule: what a metric gave is that metric's result over all examples.
Anything else is a number of one batch, and its mean over the examples is told: also under the name of a metric that the
step never updates, of which Keras tells 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.reporting.units import first
from launcher.tasks import dropout, keras_metrics, keras_tracing
from launcher.tasks.keras_private import is_along_batch
from launcher.tasks.keras_tracing import Result, Tracing

Sums = tuple[tf.Tensor, dict[str, tf.Tensor]]
"""Of the losses of the examples, and of metrics by name; float32."""

_STEPS = {True: "train_step", False: "test_step"}


Uses = list[tuple[keras.optimizers.Optimizer, Sequence[keras.Variable]]]
"""Each application of an optimizer in a step, and the weights that it is applied to."""


def overridden(model: keras.Model) -> list[str]:
    """Names of the steps that are the model's own."""
    return [name for name in _STEPS.values() if keras_metrics.is_overridden(model, name)]


class OwnSteps:
    """The steps of a model.

    Args:
      example: gives data as train_step takes it, of unknown length, inside a graph.
    """

    def __init__(self, model: keras.Model, example: Callable[[], Any]):
        self._model, self._example = model, example
        self.seeds = keras.random.SeedGenerator(0)
        self._assigned: list[keras.Variable] = []
        # Of what each step returns, the names that are of metrics which it never updates.
        self._left: dict[str, set[str]] = {}
        self.has_sums = False
        self._uses: Uses = []
        before, uses = len(model.variables), self.uses()
        # Keras makes layers and metrics where a step is first traced, not optimizers: only then it is traced again.
        self._uses = uses if len(model.variables) == before else []
        model.built = True  # also one that is never called
        self._metrics = [*{id(metric): metric for metric in model.metrics}.values()]
        self._states = list(model.metrics_variables)
        model.reset_metrics()
        self._initial = keras_metrics.arrays(self._states)
        # Of what a step returns, by whether it trains: the metric that gave it, and its name of several; else None.
        self._told: dict[bool, dict[str, Result | None]] = {}

    def uses(self) -> Uses:
        """The optimizers that the training step applies, in its order."""
        return self._uses or self.tried("train_step", self._example)

    def tried(self, step: str, example: Callable[[], Any]) -> Uses:
        """Traces a step, makes what is not built yet, and runs and differentiates nothing; returns what it applies."""
        uses: Uses = []
        of_metrics: dict[str, keras.metrics.Metric] = {}

        def note(optimizer: keras.optimizers.Optimizer, gradients: Any, variables: Any) -> None:
            uses.append((optimizer, variables or ()))

        def trace() -> None:
            tracing = Tracing(apply=note, num_real=tf.constant(1.0), seeds=self.seeds, differentiates=False)
            with keras_tracing.replica(tracing, []):
                returned = keras_metrics.leaves(getattr(self._model, step)(example()) or {})
                named = {name: metric for metric in self._model.metrics for name in _names(metric)}
            if named.keys() == returned.keys():
                of_metrics.update(named)
            self.has_sums |= tracing.has_sums

        # What layers make in the scope is given its first value when it ends, and what the graph assigns is left.
        with keras.StatelessScope() as scope, keras.SymbolicScope():
            traced = tf.function(trace, autograph=False).get_concrete_function()
            own = [variable for variable in self._model.variables if scope.get_current_value(variable) is not None]
        # Keras's variables have their new values in the scope, and are not assigned in the graph.
        operations = traced.graph.get_operations()
        held = {operation.inputs[0].op.name for operation in operations if "Assign" in operation.type}
        if held:
            raise UsageError(
                f"{type(self._model).__name__}'s {step} assigns the tf.Variable {min(held)!r}, which no checkpoint "
                "holds and a skipped step would change: make it a weight of the model, by add_weight(trainable=False)"
            )
        written, counted = ({id(variable) for variable in some} for some in (own, self._model.metrics_variables))
        self._left[step] = {
            name for name, metric in of_metrics.items() if not written & {id(one) for one in metric.variables}
        }
        if step == "train_step":
            self._assigned = [variable for variable in own if id(variable) not in counted]
        return uses

    @dropout.exact()
    def run(self, data: Any, tracing: Tracing, training: bool) -> Sums:
        """Traces a step on a replica's real examples."""
        for variable, value in zip(self._states, self._initial, strict=True):
            variable.assign(value)
        with keras_tracing.replica(tracing, self._metrics):
            named = keras_metrics.leaves(getattr(self._model, _STEPS[training])(data) or {})
            of_metrics = keras_metrics.leaves(self._model.get_metrics_result())
        # Keras tells the metrics' results where the step returns something under all of their names, and no other: also
        # of those that the step never updates, which is 0.
        if of_metrics.keys() == named.keys():
            left = self._left.get(_STEPS[training], set())
            named = {name: named[name] if name in left else value for name, value in of_metrics.items()}
        self._told[training] = {
            name: next((told for leaf, told in tracing.results if leaf is value), None) for name, value in named.items()
        }
        values = {name: tf.reduce_mean(tf.cast(value, tf.float32)) for name, value in named.items()}
        num_real = tracing.num_real
        gained = [
            tf.reshape(tf.cast(tf.convert_to_tensor(variable), tf.float32) - tf.cast(value, tf.float32), [-1])
            for variable, value in zip(self._states, self._initial, strict=True)
        ]
        sums = {"states": tf.concat(gained, axis=0)} if gained else {}
        sums |= {name: value * num_real for name, value in values.items() if self._told[training][name] is None}
        differentiated = tf.reduce_sum([tf.cast(part, tf.float32) for part in tracing.losses])
        loss = values.get("loss", differentiated)
        # A replica without examples has run on one that is not its own.
        named_sums = {_key(training, name): tf.where(num_real > 0, value, 0.0) for name, value in sums.items()}
        return tf.where(num_real > 0, loss * num_real, 0.0), named_sums

    def evaluated(self, data: Any, num_real: tf.Tensor) -> Sums:
        """Traces a step of evaluation."""
        return self.run(data, Tracing(apply=_refuse, num_real=num_real, seeds=self.seeds), training=False)

    @property
    def assigned(self) -> list[keras.Variable]:
        """What they assign, but what an optimizer does."""
        return [*self._assigned, *self._states, self.seeds.state]

    @property
    def notes(self) -> list[str]:
        """Notes that a person should read about them."""
        notes = [
            "the model's own steps run on each replica's examples by themselves, and gradients are averaged over all "
            "examples: that is the same training on any number of replicas where a loss is a mean over examples or has "
            "one value for each, not where it is one sum or compares examples with one another; --mode=verify tells"
        ]
        left = sorted(name for names in self._left.values() for name in names)
        if left:
            notes.append(
                f"{first(left)} is what the step returns, as a mean over the examples: the metric of this name, which "
                "Keras's fit tells, is never updated by the step, and 0"
            )
        own = [one for one in self._metrics if not type(one).__module__.startswith("keras.") and one.variables]
        if own:
            names = first([metric.name for metric in own])
            notes.append(f"states of the metric {names} are taken to be sums over examples")
        return notes

    @property
    def along_batch(self) -> list[str]:
        """Names of the metrics that are no sums over rows."""
        return [metric.name for metric in self._metrics if is_along_batch(metric)]

    @property
    def result_names(self) -> tuple[str, ...]:
        """Names that `results` gives of training, once it is traced."""
        return tuple(self._told.get(True, ()))

    @property
    def untold(self) -> frozenset[str]:
        """Under which names Keras tells no loss, as the steps return none."""
        names = {True: "loss", False: "val_loss"}
        return frozenset(names[training] for training, told in self._told.items() if "loss" not in told)

    def results(self, sums: Mapping[str, np.ndarray], weight: float) -> dict[str, float]:
        """Numbers that the step returned, over all examples."""
        training = any(name.startswith(_key(True, "")) for name in sums)
        named: dict[str, float] = {}
        names = [_key(training, "states")] * len(self._states)
        with keras_metrics.put_together(self._states, self._initial, names, sums):
            for name, told in self._told[training].items():
                if told is None:
                    named[name] = float(sums[_key(training, name)] / weight) if weight else math.nan
                    continue
                metric, inner = told
                result = metric.result()
                number = np.asarray(keras.ops.convert_to_tensor(result if inner is None else result[inner]))
                named |= keras_metrics.floats(name, number)
        return named


def _names(metric: keras.metrics.Metric) -> list[str]:
    result = metric.result()
    return [*keras_metrics.leaves(result)] if isinstance(result, dict) else [metric.name]


def _key(training: bool, name: str) -> str:
    return f"{_STEPS[training]}:{name}"


def _refuse(optimizer: keras.optimizers.Optimizer, gradients: Any, variables: Any) -> None:
    raise UsageError(f"test_step applies the optimizer {optimizer.name!r}; only train_step may")

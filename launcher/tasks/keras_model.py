"""A compiled Keras model as it is: its loss, metrics, optimizer and regularisation, exact on any topology.

    train.task = @KerasTask()
    KerasTask.build = @my.build          # returns a compiled model
    KerasTask.train = @my.train_data     # returns arrays (x, y[, sample_weight]) or a tf.data.Dataset of batches
    KerasTask.validation = @my.validation_data

The reference is Keras on one device. What is not the same there is: the gradient of an embedding is made dense before
the optimizer sees it, so that rows that occur twice count once; and a short batch has the mean over its own examples.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.keras_data import DatasetData, Structure, make_data
from launcher.data.pipeline import WEIGHT, Data
from launcher.errors import UsageError
from launcher.errors.user_code import defined_at
from launcher.machine.as_written import as_written
from launcher.optimizers import Optimizer
from launcher.tasks import callbacks
from launcher.tasks.base import check_builder
from launcher.tasks.keras_weights import class_weights, counted, padding_left_out, regularized, weights_of

_STATE = "state"
_COLOURS = re.compile(r"\x1b\[\d*m")
_REPLACED = {
    "train_step": "the launcher's step takes its place",
    "test_step": "the launcher's evaluation takes its place",
    "compute_loss": "it would take a mean over one replica's part of a batch",
}
_REDUCTIONS = ("sum_over_batch_size", "mean")


@gin.configurable
class KerasTask:
    """A compiled Keras model, its data, and nothing else.

    Args:
      build: returns a compiled `keras.Model`; called under the strategy's scope.
      train: arrays, (x, y) or (x, y, sample_weight), or a `tf.data.Dataset` of batches; or a function that returns it.
      validation: the same, or None.
      class_weight: weight of each class in training, as in Keras's fit.
      shuffle, steps_per_epoch, validation_steps, validation_split: as in Keras's fit.
      callbacks: Keras callbacks, see `launcher.run.keras_callbacks`; or a function that returns them.
    """

    # Of batch normalisation: the reference is one device, which sees the whole batch.
    statistics_over_global_batch = True

    def __init__(
        self,
        *,
        build: Callable[[], keras.Model] = gin.REQUIRED,
        train: Callable[..., Any] | Any = gin.REQUIRED,
        validation: Callable[..., Any] | Any = None,
        class_weight: Mapping[int, float] | None = None,
        shuffle: bool = True,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_split: float = 0.0,
        callbacks: Sequence[keras.callbacks.Callback] | Callable[[], Sequence[keras.callbacks.Callback]] = (),
    ):
        check_builder("KerasTask.build", build, "@my.build")
        self._build = build
        self._sources = train, validation
        self._class_weight = dict(class_weight or {})
        self._arguments: dict[str, Any] = {
            "shuffle": shuffle,
            "steps_per_epoch": steps_per_epoch,
            "validation_steps": validation_steps,
            "validation_split": validation_split,
        }
        self._callbacks = callbacks
        self._data: tuple[Data, Structure] | None = None
        self._model: keras.Model | None = None
        self._initial: list[np.ndarray] = []

    def data(self) -> Data:
        return self._opened()[0]

    def _opened(self) -> tuple[Data, Structure]:
        if self._data is None:
            train, validation = (source() if is_function(source) else source for source in self._sources)
            self._data = make_data(train, validation, **self._arguments)
        return self._data

    def check(self) -> None:
        """Raises UsageError when a callback cannot work."""
        callbacks.check(self.callbacks())

    def callbacks(self) -> Sequence[keras.callbacks.Callback]:
        """Those of this run."""
        if callable(self._callbacks):
            self._callbacks = self._callbacks()
        return tuple(self._callbacks)

    def model(self) -> keras.Model:
        """What `build` returns, with all its variables, its loss and its metrics built.

        Raises:
          UsageError: it is not compiled, or brings a step of its own.
        """
        model = self._build()
        _check(model, defined_at(self._build))
        structure = self._opened()[1]
        x, y, weight = structure.pack(structure.example())
        with _refused(f"{defined_at(self._build)}: {model.name!r} does not take this data, in which {structure}"):
            outputs = model(x, training=False)
        what = f"{defined_at(self._build)}: the loss or a metric does not take the model's outputs with {structure}"
        if y is None:
            what += ", without any y (data is one tuple, (x, y))"
        # What they count is as it was, afterwards.
        with _refused(what), keras.StatelessScope(regularized(model)):
            model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=False)
            model.compute_metrics(x, y, outputs, weight)
        _check_reductions(model, defined_at(self._build))
        self._model = model
        self._initial = [np.array(variable.numpy()) for variable in model.metrics_variables]
        return model

    def notes(self, model: keras.Model, accelerator: str) -> list[str]:
        """What the order of the examples rests on."""
        if not isinstance(self.data(), DatasetData):
            return []
        return [
            "every worker reads the whole tf.data.Dataset and takes its rows; its order, also after a restart, is what "
            "its seeds make it"
        ]

    def optimizer(self) -> Optimizer:
        """The one that the model was compiled with, at the rate that callbacks may set."""
        assert self._model is not None
        found = self._model.optimizer
        if isinstance(found, keras.optimizers.LossScaleOptimizer):  # compile's own doing under mixed_float16
            found = found.inner_optimizer
        return Optimizer(found, settable_rate=isinstance(found.learning_rate, keras.Variable))

    @as_written
    def loss(
        self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool
    ) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
        x, y, sample_weight = self._opened()[1].pack(batch)
        real = batch[WEIGHT]
        outputs = _call(model, x, training)
        if training and self._class_weight:
            sample_weight = class_weights(y, self._class_weight, sample_weight)
        outputs, weights, weight = weights_of(outputs, sample_weight, real)
        variables = model.metrics_variables
        initial = [tf.constant(value) for value in self._initial]
        with keras.StatelessScope([*zip(variables, initial, strict=True), *regularized(model)]) as scope:
            total = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=training)
            # Of layers, which the step adds in training, once for the whole batch.
            extra = tf.add_n([tf.cast(one, tf.float32) for one in model.losses]) if model.losses else 0.0
            with padding_left_out(model, weight):
                model.compute_metrics(x, y, outputs, weights)
            states = [scope.get_current_value(variable) for variable in variables]
        states = counted(model, states, tf.reduce_sum(weight))
        # Keras takes a mean over the rows of this replica, and divides all by the number of replicas.
        rows = float(weight.shape.num_elements())
        loss = (tf.cast(total, tf.float32) * tf.distribute.get_strategy().num_replicas_in_sync - extra) * rows
        weight = tf.reduce_sum(weight)
        if not training:
            loss += weight * extra
        gained = [
            tf.reshape(tf.cast(state, tf.float32) - tf.cast(before, tf.float32), [-1])
            for state, before in zip(states, initial, strict=True)
        ]
        return loss, weight, {_STATE: tf.concat(gained, axis=0)} if gained else {}

    @property
    def result_names(self) -> tuple[str, ...]:
        """Of `results`."""
        size = sum(value.size for value in self._initial)
        return tuple(self.results({_STATE: np.zeros(size)}, 1.0))

    def results(self, sums: Mapping[str, np.ndarray], weight: float) -> dict[str, float]:
        """The compiled metrics' results from their states, added up."""
        model = self._model
        if model is None or _STATE not in sums:
            return {}
        ends = np.cumsum([value.size for value in self._initial])[:-1]
        mapping = [
            (variable, (before + part.reshape(before.shape)).astype(before.dtype))
            for variable, before, part in zip(
                model.metrics_variables, self._initial, np.split(np.atleast_1d(sums[_STATE]), ends), strict=True
            )
        ]
        with keras.StatelessScope(mapping):
            found = model.get_metrics_result()
        named: dict[str, float] = {}
        for name, value in found.items():
            numbers = np.asarray(value)
            if name != "loss":  # its own mean, which knows nothing of the other replicas
                named.update(_numbered(name, numbers))
        return named


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
        # Keras says first in which layer it was.
        line = next((line for line in lines if not line.startswith("Exception encountered")), type(error).__name__)
        raise UsageError(f"{what}: {line}") from error


def _numbered(name: str, numbers: np.ndarray) -> dict[str, float]:
    if not numbers.ndim:
        return {name: float(numbers)}
    return {f"{name}_{index}": float(number) for index, number in enumerate(numbers.flat)}


def is_function(source: Any) -> bool:
    """Whether data is given by a function that returns it."""
    return inspect.isroutine(source) or (callable(source) and not isinstance(source, tf.data.Dataset))


def _call(model: keras.Model, x: Any, training: bool) -> Any:
    parameters = inspect.signature(model.call).parameters
    if "training" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return model(x, training=training)
    return model(x)


def _check(model: Any, where: str) -> None:
    if not isinstance(model, keras.Model):
        raise UsageError(f"{where}: must return a keras.Model, returned {type(model).__name__}")
    if not getattr(model, "compiled", False):
        raise UsageError(f"{where}: the model is not compiled; call model.compile(optimizer=..., loss=...) on it")
    for method, why in _REPLACED.items():
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise UsageError(
                f"{where}: {type(model).__name__} has a {method} of its own; {why}. Write a task with data(), model() "
                "and loss() instead, see docs/own_task.md"
            )


def _check_reductions(model: keras.Model, where: str) -> None:
    for loss in keras.tree.flatten(model.loss):
        reduction = getattr(loss, "reduction", _REDUCTIONS[0])
        if isinstance(loss, keras.losses.Loss) and reduction not in _REDUCTIONS:
            raise UsageError(
                f"{where}: loss {loss.name!r} has reduction={reduction!r}, which depends on how a batch is divided; "
                f"leave it at {_REDUCTIONS[0]!r}"
            )

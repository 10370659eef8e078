"""A compiled Keras model as it is: its loss, metrics, optimizer and regularisation, exact on any topology.

    train.task = @KerasTask()
    KerasTask.build = @my.build          # returns a compiled model
    KerasTask.train = @my.train_data     # returns arrays (x, y[, sample_weight]) or a tf.data.Dataset of batches
    KerasTask.validation = @my.validation_data

The reference is Keras on one device: its own `compute_loss`, `compute_metrics` and metrics see the rows that they would
see there. Where XLA compiles them, shapes are static, and what fills up a short batch has weight 0. A replica's loss is
a mean over its rows, and is weighted with them; for the states of metrics, see `launcher.tasks.keras_metrics`. What
differs on purpose is listed in docs/keras_differences.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.keras_data import make_data, prepare
from launcher.data.kinds import DataInTurn
from launcher.data.pipeline import WEIGHT, Batch, Data, Shard, held
from launcher.data.structure import Structure
from launcher.errors import UsageError
from launcher.errors.user_code import defined_at, mistake
from launcher.machine import xla
from launcher.machine.no_autograph import no_autograph
from launcher.machine.replicas import context_of_several, sum_over_replicas
from launcher.optimizers import Optimizer, Optimizers, own_settings
from launcher.tasks import keras_callbacks, keras_losses, keras_metrics, keras_own_step
from launcher.tasks.base import Place, Sums, Task, check_builder, without_padding
from launcher.tasks.keras_answers import answers, call
from launcher.tasks.keras_losses import compute_loss
from launcher.tasks.keras_own_step import OwnSteps
from launcher.tasks.keras_private import kept_states, keras_losses_of, of_rows, undivided, with_local_metrics
from launcher.tasks.keras_tracing import Tracing
from launcher.tasks.keras_weights import class_weights, each_tensor, padding_left_out, padding_masked, weights_of

_OF_BATCH, _HELD_OUT = "batch/", "held out"
_OF_TENSORFLOW = tf.errors.InvalidArgumentError, tf.errors.UnimplementedError
_ERRORS = (AttributeError, ValueError, TypeError, KeyError, NotImplementedError, *_OF_TENSORFLOW)
_COLOURS = re.compile(r"\x1b\[\d*m")
_SQUARING = (keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Adagrad)


@gin.configurable
class KerasTask(Task):
    """A compiled Keras model, its data, and nothing else.

    Args:
      build: returns a compiled `keras.Model`; called under the strategy's scope.
      train: arrays, (x, y) or (x, y, sample_weight), a `tf.data.Dataset` of batches, or what gives batches in Python;
        or a function that returns it.
      validation: the same, or None.
      class_weight: weight of each class in training, as in Keras's fit.
      shuffle, steps_per_epoch, validation_steps, validation_split: as in Keras's fit.
      callbacks: Keras callbacks, see `launcher.run.actions.keras_callbacks`; or a function that returns them.
      initial_epoch, validation_freq, verbose: as in Keras's fit; see `keras_callbacks.Fit`.
    """

    # Of batch normalisation: the reference is one device, which sees the whole batch.
    statistics_over_global_batch = True
    adds_losses = True
    tried = 8  # examples of arrays, where a batch is looked at before training

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
        initial_epoch: int = 0,
        validation_freq: int | Sequence[int] = 1,
        verbose: int | str = 1,
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
        self.keras_fit = keras_callbacks.checked_fit(initial_epoch, validation_freq, verbose)
        self._data: tuple[Data, list[Structure]] | None = None
        self._model: keras.Model | None = None
        self._initial: list[np.ndarray] = []
        self._folds: list[keras_metrics.Fold] = []
        self._of_batch: tuple[str, ...] = ()
        self._of_loss = self.in_layers = frozenset[int]()  # ids of states of metrics, by what updates them
        # What `compute_metrics` returns, zeros in place of numbers, by whether it trains.
        self._told: dict[bool, dict[str, np.ndarray]] = {}
        self.example: keras_metrics.Batch | None = None
        self._place, self._gathers = Place(1, 1, False, False, False), False
        self._reduced: list[tuple[bool, bool]] = []
        self._has_own_losses = self._adds_sums = self._is_prepared = False
        self._own: OwnSteps | None = None

    def data(self) -> Data:
        return self._opened()[0]

    def _opened(self) -> tuple[Data, list[Structure]]:
        if self._data is None:
            again = [source if is_function(source) else None for source in self._sources]
            train, validation = (source() if is_function(source) else source for source in self._sources)
            self._data = make_data(train, validation, again=again, **self._arguments)
        return self._data

    def check(self) -> None:
        """Raises UsageError when a callback cannot work."""
        keras_callbacks.check(self.callbacks())

    def callbacks(self) -> Sequence[keras.callbacks.Callback]:
        """Keras callbacks of this run."""
        if callable(self._callbacks):
            self._callbacks = self._callbacks()
        return keras_callbacks.flat(self._callbacks)

    def model(self) -> keras.Model:
        """The model that `build` returns, compiled, its variables, loss and metrics built."""
        model = self._model = with_local_metrics(self._build)
        _check(model, defined_at(self._build))
        preprocess = getattr(model, "preprocess_samples", None)  # keras-hub's, whose fit maps it over the data
        if preprocess is not None and not self._is_prepared:
            data, raw = self._opened()
            self._data, self._is_prepared = (data, prepare(data, raw, preprocess)), True
        where, structures = defined_at(self._build), self._opened()[1]
        self._own = None
        if keras_own_step.overridden(model):
            what = f"{where}: {type(model).__name__}'s train_step does not take this data, in which {structures[0]}"
            with _refused(what, structures[0].text("y")):
                self._own = with_local_metrics(lambda: OwnSteps(model, structures[0].traced))
            for held_out in structures[1:]:
                with _refused(f"{where}: its test_step does not take the validation data, in which {held_out}"):
                    self._own.tried("test_step", held_out.traced)
            return model
        for structure in {str(one.shapes): one for one in reversed(structures)}.values():
            x, y, weight = structure.pack(structure.example())
            what, text = f"{where}: {model.name!r} does not take this data, in which {structure}", structure.text
            with _refused(what, text("x")), kept_states(model):
                try:
                    outputs = answers(model, x)
                except _ERRORS as first:  # there are models that take neither zeros nor one example
                    if structure.shapes != structures[0].shapes:
                        raise
                    x, y, weight = self.first_batch()
                    try:
                        outputs = answers(model, x)
                    except _ERRORS as second:  # maybe of what the first has left half built
                        raise (second if mistake(second) else first) from None
            what = f"{where}: the loss or a metric does not take the model's outputs with {structure}"
            if y is None:
                what += ", without any y (data is one tuple, (x, y))"
            own = list(model.losses)
            # What they count is as it was, afterwards.
            self._reduced = []
            with _refused(what, text("y")), keras.StatelessScope() as scope, keras_losses_of(own, model, self._note):
                if self._class_weight and structure is structures[0]:
                    weight = class_weights(y, self._class_weight, weight, outputs)
                compute_loss(model, x, y, outputs, weight, training=True)
                counted = [one for one in model.metrics_variables if scope.get_current_value(one) is not None]
                model.compute_metrics(x, y, outputs, weight)
            self.example = x, y, outputs, weight
        self.in_layers = keras_metrics.of_layers(model, x)
        self._has_own_losses = len(own) > sum(one.regularizer is not None for one in model.trainable_variables)
        self._num_losses, self._adds_training = len(own), False
        self._adds_sums = any(one.shape.rank for one in own)
        keras_losses.check_reductions(model, defined_at(self._build))
        model.reset_metrics()  # as Keras does before each epoch: another fit, or evaluate, may have left something
        self._initial = keras_metrics.arrays(model.metrics_variables)
        self._folds = [keras_metrics.Fold("sum", False)] * len(self._initial)
        self._of_batch, self._of_loss = (), frozenset(map(id, counted))
        return model

    def _note(self, values: tf.Tensor, mask: tf.Tensor | None) -> float:
        self._reduced.append((not values.shape.rank, mask is not None))
        return 1.0

    def placed(self, place: Place) -> None:
        """Finds out how losses and metrics of parts of a batch are put together; UsageError where that is not right."""
        has_short = isinstance(self.data(), DataInTurn) and any(one.rows is None for one in self._opened()[1])
        place = place._replace(pads=place.pads or has_short)
        model, self._place, (num_replicas, microbatches, compiled, *_) = self._model, place, place
        if compiled and (unknown := next((one for one in self._opened()[1] if one.unknown), None)):
            raise UsageError(
                f"{defined_at(self._build)}: {unknown.unknown[0]} of a batch has sizes that are not known: {unknown}. "
                "XLA (--engine=pjrt, jit_compile, a TPU) needs all but the first: pad, and say so with tf.ensure_shape"
            )
        if microbatches > 1 and self._adds_sums:
            raise UsageError(
                f"{defined_at(self._build)}: a layer adds a loss with a value for each example, which Keras sums; "
                f"with train.microbatches = {microbatches} it has to be their mean"
            )
        if self._own is not None and num_replicas > 1 and (names := self._own.along_batch):
            raise UsageError(
                f"{defined_at(self._build)}: metric {names[0]!r} is taken along the batch, of which each replica has a "
                "part, in a step of the model's own: train on one replica"
            )
        if model is None or self._own is not None:
            return
        # What layers add in training alone; with batch normalisation, rows would matter to one another in its trial.
        if (num_replicas * microbatches > 1 or compiled) and self.example and not keras_losses.has_statistics(model):
            with keras_losses.trial(model), contextlib.suppress(*_ERRORS):
                answers(model, self.example[0], training=True)
                self._adds_training = len(model.losses) > self._num_losses
                self._has_own_losses |= self._adds_training
        tried, where = functools.cache(lambda: self._tried(model)), defined_at(self._build)
        added = self._added if self._has_own_losses or self.in_layers else None
        self._gathers, self.takes_real_rows, self.divides_rows = keras_losses.place(
            model, self._reduced, added, tried, where, place, self.counts_rows or bool(self.in_layers)
        )
        self.shows_rows = any(masked for _, masked in self._reduced) and (microbatches > 1 or place.jit)
        if not keras_metrics.has_unknown(model):
            return
        self._folds = keras_metrics.folds(model, tried(), self._of_loss, calls=bool(self.in_layers))
        self._of_batch = keras_metrics.of_one_batch(model, tried())
        if compiled and (names := [*keras_metrics.ignores_weights(model, tried()), *self._of_batch]):
            self.divides_rows |= place.leaves_padding_out and not (self._gathers or self._of_batch)
            if self._of_batch or not place.gives_real_rows(self.divides_rows):
                raise UsageError(
                    f"{where}: metric {names[0]!r} counts rows of weight 0, which fill up a short batch under XLA "
                    "(train.jit_compile, --engine=pjrt, a TPU): have it use sample_weight, or all batches whole"
                )
        names = [*(whole := keras_metrics.of_whole_batches(model, self._folds)).values(), *self._of_batch]
        apart = num_replicas > 1 and ((compiled and not place.gives_real_rows()) or whole.keys() & self.in_layers)
        if names and (microbatches > 1 or apart):
            raise UsageError(
                f"{where}: metric {names[0]!r} does not add up over the rows of a batch, so it needs the whole batch: "
                f"that works neither with train.microbatches > 1 (it is {microbatches}) nor, where a layer updates it "
                "or under XLA (by --engine=pjrt, where a batch is short), on several replicas"
            )

    def _added(self, batch: keras_metrics.Batch) -> tf.Tensor:
        assert self._model is not None
        call(self._model, batch[0], self._adds_training)
        return sum((tf.cast(one, tf.float32) for one in self._model.losses if not one.shape.rank), tf.zeros([]))

    def _tried(self, model: keras.Model) -> keras_metrics.Batch:
        x, y, weight = self.first_batch()
        if weight is None and (self._class_weight or any(one.has_weights for one in self._opened()[1])):
            weight = tf.linspace(0.5, 1.5, len(keras.tree.flatten(x)[0]))
        with kept_states(model):
            return x, y, answers(model, x), weight

    def first_batch(self) -> tuple[Any, Any, Any]:
        """x, y and sample_weight of an even number of examples of the training data."""
        data = self.data()
        size = data.batch_size if isinstance(data, DataInTurn) else self.tried
        batch = next(held(data.train_batches(Shard(global_batch_size=size, seed=0))))
        return self._packed({key: tf.concat([part, part][: 1 + size % 2], 0) for key, part in batch.items()})

    def _packed(self, batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        return self._structure(batch).pack(batch)

    def _structure(self, batch: Mapping[str, Any]) -> Structure:
        structures = self._opened()[1]
        keys = batch.keys() - {WEIGHT}
        return next((one for one in structures if set(one.shapes) == keys), structures[0])

    def notes(self, model: keras.Model, accelerator: str) -> list[str]:
        """Notes of what the order of the examples rests on, and of what is computed otherwise than by Keras."""
        note = data.note if isinstance(data := self.data(), DataInTurn) else ""
        found = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        if isinstance(found, _SQUARING) and any(one.path.endswith("embeddings") for one in model.trainable_variables):
            note += f"{note and '; '}rows of an embedding that occur twice in a batch are added up before {found.name} "
            note += "squares them, on any topology: Keras takes them one by one"
        own = [] if self._own is None else [*self._own.notes]
        if keras_metrics.is_overridden(model, "fit") and not self._is_prepared:
            own.append(f"{type(model).__name__} has a fit of its own, which is not called")
        own += ["run_eagerly is ignored: steps are made into a graph"] * bool(model.run_eagerly)
        return [*own, *keras_callbacks.notes(self.callbacks()), *([note] if note else [])]

    @property
    def untold(self) -> frozenset[str]:
        """Losses that Keras does not tell callbacks of, as the model's own steps return none."""
        return frozenset() if self._own is None else self._own.untold

    @property
    def step_assigns(self) -> Sequence[keras.Variable] | None:  # type: ignore[override]  # known once there is a model
        """Variables that a step of the model's own assigns."""
        return None if self._own is None else self._own.assigned

    @property
    def own_steps(self) -> OwnSteps:
        """The steps of a model that has its own."""
        assert self._own is not None
        return self._own

    def optimizer(self) -> Optimizer | Optimizers:  # type: ignore[override]
        """The one that the model was compiled with, at the rate that callbacks may set; those that its step applies."""
        assert self._model is not None
        if self._own is not None:
            if not (uses := self._own.uses()):
                raise UsageError(f"{defined_at(self._build)}: train_step applies no Keras optimizer")
            return Optimizers(uses)
        found, weights = self._model.optimizer, self._model.trainable_variables
        if isinstance(found, keras.optimizers.LossScaleOptimizer):  # compile's own doing under mixed_float16
            found.inner_optimizer = found = own_settings.made_here(found.inner_optimizer, weights)
        else:
            self._model.optimizer = found = own_settings.made_here(found, weights)
        return Optimizer(found, settable_rate=True, own_average=True)

    @no_autograph
    def train_step(self, batch: Batch, tracing: Tracing) -> keras_own_step.Sums:
        """The model's own, on this replica's examples."""
        return self.own_steps.run(self._rows(batch, training=True), tracing, training=True)

    def try_step(self, model: keras.Model, batch: Batch) -> None:
        if self._own is None:
            super().try_step(model, batch)
            return
        num_real = tf.reduce_sum(batch[WEIGHT])
        tracing = Tracing(apply=lambda *_: None, num_real=num_real, seeds=self._own.seeds, differentiates=False)
        self.train_step(batch, tracing)

    def _rows(self, batch: Batch, training: bool) -> Any:
        """A replica's real examples as the model's own steps take them; one where there is none."""
        rows, replicas = batch[WEIGHT].shape[0], tf.distribute.get_replica_context().num_replicas_in_sync
        are_real = xla.is_compiling() or (rows is not None and rows * replicas == self._structure(batch).rows)
        batch = batch if are_real else without_padding(batch)
        x, y, weight = self._packed(batch)
        if training and self._class_weight:
            weight = class_weights(y, self._class_weight, weight)
        return self._structure(batch).element(x, y, weight)

    @no_autograph
    def loss(self, model: keras.Model, batch: Batch, training: bool) -> Sums:
        seen = real = batch[WEIGHT]
        num_real = weight = tf.reduce_sum(real)
        if self._own is not None:
            loss, metrics = self._own.evaluated(self._rows(batch, training=False), num_real)
            return loss, num_real, metrics
        x, y, sample_weight = self._packed(batch)
        is_real = self.takes_real_rows and real.shape[0] is None
        is_real |= xla.is_compiling() and self._place.gives_real_rows(self.divides_rows)
        compiled = (self._place.compiled or xla.is_compiling()) and not is_real
        count = tf.maximum(tf.cast(num_real, tf.int32), 1)  # the mean of no rows is none: one, which weighs nothing
        bounds = tf.constant([0]), count[tf.newaxis], tf.constant([1])

        def rows(part: Any) -> Any:
            is_kept = is_real or self.keeps_padding
            return part if is_kept else each_tensor(part, lambda one: tf.strided_slice(one, *bounds))

        context = context_of_several()
        # In training, a BatchNormalization puts replicas' means together, which have to be of as many rows each.
        has_statistics = training and keras_losses.has_statistics(model)
        sees_rows = (self._has_own_losses or self.in_layers) and not has_statistics
        if not compiled and (context is None or self.counts_rows or sees_rows):
            x, seen = rows(x), rows(real)
        if training and self._class_weight:
            sample_weight = class_weights(y, self._class_weight, sample_weight)
        initial = [tf.constant(value) for value in self._initial]
        states = [*zip(model.metrics_variables, initial, strict=True)]
        for variable, value in states:
            if id(variable) in self.in_layers:
                variable.assign(value)
        with undivided(), of_rows(seen if training else None):  # the former of layers that have a loss of Keras's
            outputs = call(model, x, training)
        start = [(one, tf.identity(one.value) if id(one) in self.in_layers else value) for one, value in states]
        together = judged = x, y, outputs, sample_weight
        if compiled:
            judged = x, y, *padding_masked(outputs, sample_weight, real)
            weights = weights_of(outputs, sample_weight, real)
        else:
            x, y, outputs, weights = judged = tuple(rows(part) for part in together)
        own = [keras_losses.summed(one, real, num_real) if one.shape.rank else one for one in model.losses]
        takes_whole_batches = bool(self._of_batch) or any(fold.whole for fold in self._folds)
        gathers, num_everywhere = context is not None and self._gathers, num_real
        parts = judged if compiled else together
        if context is not None and (takes_whole_batches or gathers):
            needs_x = keras_metrics.is_overridden(model) or keras_metrics.is_overridden(model, "compute_loss")
            parts = keras_metrics.of_all_replicas(parts, real, needs_x=needs_x, padded=compiled or is_real)
            num_everywhere = sum_over_replicas(num_real)
        factor, left = None, list[tf.Tensor]()

        def kept(values: tf.Tensor, mask: tf.Tensor | None) -> float:
            left.append(keras_losses.share_of_mask(values, mask))
            return 1.0

        if gathers:
            judged, share = parts, num_real / num_everywhere
            own = [tf.reduce_sum(keras_metrics.side_by_side(share * one[tf.newaxis])) for one in own]
        elif any(masked for _, masked in self._reduced):
            if (training and self._place.microbatches > 1) or (self._place.jit and context is not None):
                factor = kept
            elif context is not None:
                factor = functools.partial(keras_losses.of_all_replicas, num_real)
        with keras.StatelessScope(start) as scope:
            before = {id(scope.get_current_value(variable)) for variable in model.metrics_variables}
            with keras_losses_of(own, model, factor):
                total = tf.cast(compute_loss(model, *judged, training), tf.float32)
            if left:
                weight = left[0] * (tf.size(real, tf.float32) if compiled else num_real)
            keras_metrics.count_losses(model, scope, before, weight)
            # Also of a Loss among the metrics, Keras takes 1/replicas.
            with undivided(), padding_left_out(model, real) if compiled else contextlib.nullcontext():
                logs = model.compute_metrics(x, y, outputs, weights)
            states = whole = [scope.get_current_value(variable) for variable in model.metrics_variables]
        part = tf.math.multiply_no_nan  # a replica without rows has no part of a loss that is not finite
        loss = part(total, weight)
        if gathers:  # the gradient through the replica's own rows alone is to be summed, not averaged by their number
            loss = tf.custom_gradient(lambda one: (part(one, weight), lambda upstream: upstream * num_everywhere))(
                total
            )
        is_first, num_rows, has_rows, zero = True, num_real, num_real > 0, tf.zeros([])
        if context is not None and takes_whole_batches:
            whole, logs = keras_metrics.updated(model, initial, parts)
            is_first, num_rows = tf.equal(context.replica_id_in_sync_group, 0), num_everywhere
        states_by_fold: dict[str, list[tf.Tensor]] = {}
        for fold, state, of_whole, before in zip(self._folds, states, whole, initial, strict=True):
            value = tf.cast(of_whole if fold.whole else state, tf.float32)
            if fold.over_steps == "sum":
                value -= tf.cast(before, tf.float32)
            value = tf.reshape(value, [before.shape.num_elements()])
            value = tf.where(is_first if fold.whole else has_rows, value, zero)
            states_by_fold.setdefault(f"{fold.over_steps}:{'' if training else _HELD_OUT}", []).append(value)
        metrics = {name: tf.concat(values, axis=0) for name, values in states_by_fold.items()}
        logs = keras_metrics.leaves(logs)
        self._told[training] = {name: np.zeros(tuple(getattr(value, "shape", ()))) for name, value in logs.items()}
        for name in ("", *self._of_batch) if self._of_batch else ():
            value = tf.cast(logs[name], tf.float32) * num_rows if name else num_rows
            metrics[_OF_BATCH + name] = tf.where(is_first, value, 0.0)
        return loss, weight, metrics

    @property
    def result_names(self) -> tuple[str, ...]:  # type: ignore[override]  # known only once a step is traced
        """Names that `results` gives of training."""
        if self._own is not None:
            return self._own.result_names
        shown = self._shown(self._told.get(True, {}), dict.fromkeys(self._of_batch, 0.0))
        return tuple(shown)

    def results(self, sums: Mapping[str, np.ndarray], weight: float) -> dict[str, float]:
        """The compiled metrics' results from their states, put together, as Keras's fit has them at an epoch's end."""
        model = self._model
        if model is None:
            return {}
        if self._own is not None:
            return self._own.results(sums, weight)
        held_out = _HELD_OUT * any(name.endswith(_HELD_OUT) for name in sums)
        names = [f"{fold.over_steps}:{held_out}" for fold in self._folds]
        with keras_metrics.put_together(model.metrics_variables, self._initial, names, sums):
            found = model.get_metrics_result()
            if keras_metrics.is_overridden(model) and self.example is not None:
                logs = model.compute_metrics(*self.example)
                found = found if found.keys() == logs.keys() else logs
            numbers = keras_metrics.numbers(found)
        told = self._told.get(not held_out, numbers)
        of_batch = {name: float(sums[_OF_BATCH + name] / sums[_OF_BATCH]) for name in self._of_batch}
        return self._shown({name: number for name, number in numbers.items() if name in told}, of_batch)

    def _shown(self, numbers: Mapping[str, np.ndarray], of_batch: Mapping[str, float]) -> dict[str, float]:
        """Numbers under the names that people see."""
        shown: dict[str, float] = {}
        for name, number in numbers.items():
            if name in of_batch:
                shown[name] = of_batch[name]
            elif number.ndim or name != "loss":  # its own mean, which knows nothing of the other replicas
                shown |= keras_metrics.floats(name, number)
        return shown


@contextlib.contextmanager
def _refused(what: str, text: str = "") -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
        # Keras says first in which layer it was.
        line = next((line for line in lines if not line.startswith("Exception encountered")), type(error).__name__)
        raise UsageError(f"{what}: {text or mistake(error) or line}") from error


def is_function(source: Any) -> bool:
    """Whether data is given by a function that returns it."""
    return inspect.isroutine(source) or (callable(source) and not isinstance(source, tf.data.Dataset))


def _check(model: Any, where: str) -> None:
    if not isinstance(model, keras.Model):
        raise UsageError(f"{where}: must return a keras.Model, returned {type(model).__name__}")
    if not getattr(model, "compiled", False):
        raise UsageError(f"{where}: the model is not compiled; call model.compile(optimizer=..., loss=...) on it")

"""Tasks: the seam between the launcher and the thing that is learned."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.data.pipeline import WEIGHT, Batch, Data, Shard
from launcher.errors import UsageError, nearest
from launcher.errors.user_code import defined_at
from launcher.machine.no_autograph import call_converted, no_autograph
from launcher.optimizers import Optimizer
from launcher.reporting.sinks import Samples
from launcher.tasks import lookups

Assets = Mapping[str, bytes]
Sums = tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]  # what a task's loss() returns


class Task:
    """A model, its data and its loss: three methods to write, and defaults for all else that a run asks a task.

    A task may inherit from this. A class that does not is a task as well if it has the three methods: `complete` gives
    it the defaults. Beyond what stands here, a task may have the methods of `Decodes`, to be evaluated by what the
    model writes; of `ReadsLines` or `ReadsImages`, for `--mode=predict` on lines or image files; and of `ShowsSamples`.

    Attributes:
      nominal_weight_per_example: about how much weight one example carries, e.g. the tokens of a sentence. It only
        keeps scaled gradients near the middle of their range; the true weight is what the mean is taken over.
      logits_shape: (tokens of an example, size of the vocabulary) of a loss that can be computed in pieces: see
        `launcher.tasks.cross_entropy.LossChunks`.
      evaluation_metrics: names that every evaluation has beyond the names that training has.
      adds_losses: whether loss() gives what layers add to the model's losses, too; else the step does in training.
      statistics_over_global_batch: True for a model whose `keras.layers.BatchNormalization` is to see what it would see
        on one device.
      results: a method `results(sums, weight) -> metrics`, for metrics that are no means: numbers from the sums over
        all examples of what loss() gives as metrics, which may be vectors then, such as the state of a
        `keras.metrics.AUC`. What is named `max:…` or `min:…` is the largest or smallest over the examples, not a sum.
      result_names: the names that `results` gives, known once a step is traced; None for those of loss().
      takes_real_rows: whether loss() is to get a batch without what fills it up, one row of padding alone, where
        TensorFlow's XLA compiles it: once more for each number of rows.
      divides_rows: whether the runtime is to leave out what fills up a batch, and divide the real rows.
      shows_rows: whether the mean loss of several steps, or of an evaluation, is that of their means, weighted with
        their rows, whatever loss() gives as weight.
      counts_rows: told by the run, whether a layer adds up or averages rows in a state of its own.
      keeps_padding: told by the run, to cut nothing off that fills up a batch.
      in_layers: ids of states of metrics that layers update.
      step_assigns: of a model that has a step of its own, the variables that it assigns; else None.
      optimizer: a method that gives the optimizer that comes with the model; called after `model()`, under the same
        scope, unless `train.optimizer` is bound.
    """

    nominal_weight_per_example: float = 1.0
    logits_shape: tuple[int, int] | None = None
    evaluation_metrics: Sequence[str] = ()
    adds_losses: bool = False
    statistics_over_global_batch: bool = False
    results: Callable[[Mapping[str, np.ndarray], float], Mapping[str, float]] | None = None
    result_names: Sequence[str] | None = None
    takes_real_rows: bool = False
    divides_rows: bool = False
    shows_rows: bool = False
    counts_rows: bool = False
    keeps_padding: bool = False
    in_layers: frozenset[int] = frozenset()
    step_assigns: Sequence[keras.Variable] | None = None
    optimizer: Callable[[], Optimizer] | None = None

    def data(self) -> Data:
        """The source of batches; see `launcher.data.pipeline`."""
        raise NotImplementedError

    def model(self) -> keras.Model:
        """Builds the Keras model. Called once, under the strategy's scope and the dtype policy of the run."""
        raise NotImplementedError

    def loss(self, model: keras.Model, batch: Batch, training: bool) -> Sums:
        """Sums over one replica's batch, never means: the launcher divides by the weight of the global batch.

        Args:
          model: what `model()` returned.
          batch: tensors of this replica; `batch["weight"]` (float32 [batch]) is 0 for padding.
          training: whether this is a training step.

        Returns:
          (sum of the weighted losses, sum of the weights, sums of the weighted metrics by name), all float32 scalars.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raises UsageError when something it needs is missing; called before anything is written."""

    def placed(self, place: Place) -> None:
        """Told where it will run; raises UsageError if it cannot."""

    def try_step(self, model: keras.Model, batch: Batch) -> None:
        """Assigns, outside of any graph, what a training step does but trained weights."""
        loss_sums(self, model, batch, True)

    def notes(self, model: keras.Model, accelerator: str) -> Sequence[str]:
        """Notes that a person should read, printed with the plan. The accelerator is "cpu", "gpu" or "tpu"."""
        return ()

    def finish_metrics(self, means: dict[str, float]) -> Mapping[str, float]:
        """The evaluation's metrics from their means over all examples: for those that are no means, as a perplexity."""
        return means

    def callbacks(self) -> Sequence[keras.callbacks.Callback]:
        """Keras callbacks, called at the ends of epochs; see `launcher.run.actions.keras_callbacks`."""
        return ()

    def assets(self) -> Assets:
        """Files that belong to the weights, such as a vocabulary, by name; kept in MODEL_DIR/assets."""
        return {}

    def use_assets(self, assets: Assets) -> None:
        """Takes them from there instead of making them."""

    def served(self, model: keras.Model) -> Served | None:
        """Everything from the bytes of a request, such as a file or a line, to the answer, as TensorFlow operations.

        None where an export takes the model's own inputs.
        """
        return None


class Place(NamedTuple):
    """The place where a task runs.

    Attributes:
      num_replicas, microbatches: what a batch is divided among.
      compiled: whether XLA compiles loss().
      jit: whether TensorFlow's does: without collectives, and for each number of rows.
      pads: whether rows of weight 0 may fill up a batch; datasets may have short ones besides.
      divides_rows: whether the runtime can leave them out, and divide the others.
    """

    num_replicas: int
    microbatches: int
    compiled: bool
    jit: bool
    pads: bool
    divides_rows: bool = False

    @property
    def leaves_padding_out(self) -> bool:
        """Whether there would be rows of weight 0, and each replica can have as many of the others instead."""
        return self.pads and self.divides_rows and self.microbatches == 1

    def gives_real_rows(self, divides: bool = False) -> bool:
        """Whether no replica has rows of weight 0 but one that has no others; where it `divides`, or none are there."""
        return self.divides_rows and (divides or not self.pads)


class Score(NamedTuple):
    """The worth of decoded outputs.

    Attributes:
      metrics: by name.
      notes: lines for a person, such as how a metric is defined and samples.
      samples: (what was given, what the model wrote, what was expected), for the report.
    """

    metrics: dict[str, float]
    notes: list[str]
    samples: Samples = ()


@runtime_checkable
class Decodes(Protocol):
    """A task that is evaluated by what its model writes, too."""

    def num_decode_examples(self, last: bool) -> int:
        """The number of examples that an evaluation decodes; `last`: the one at the end, or the only one."""

    def decode_batches(self, shard: Shard) -> tf.data.Dataset:
        """Batches of the examples to decode, as `Data.eval_batches`; "example", int64 [b], tells them apart."""

    def generate(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """Tokens that the model writes, int32 [b, length], length static; in replica context, without collectives."""

    def score(self, examples: np.ndarray, outputs: np.ndarray) -> Score:
        """Judges all outputs [n, length] of the examples, int64 [n] in ascending order; the same on every worker."""


@runtime_checkable
class ShowsSamples(Protocol):
    """A task that shows people what its model makes of some evaluation examples."""

    num_samples: int

    def samples(self, model: keras.Model, batch: Batch) -> Samples:
        """Samples of a whole batch, as `Score.samples`; an image that was given is a data URI. Eager, on one device."""


@runtime_checkable
class ReadsLines(Protocol):
    """A task whose model answers a line of text with a line of text."""

    def encode_lines(self, lines: Sequence[str]) -> dict[str, np.ndarray]:
        """A batch for `generate`, one row a line."""

    def generate(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """See `Decodes`."""

    def decode_lines(self, outputs: np.ndarray) -> list[str]:
        """The text of each output."""


@runtime_checkable
class ReadsImages(Protocol):
    """A task whose model classifies image files.

    Attributes:
      decode_images: files, string [n], to images float32 [n, ...]; None where the data does not say how.
      class_names: by class; empty if they are not known.
    """

    decode_images: Callable[[tf.Tensor], tf.Tensor] | None
    class_names: Sequence[str]

    def classify(self, model: keras.Model, batch: Batch) -> tf.Tensor:
        """Probabilities float32 [b, classes] of "image"; in replica context, without collectives."""


class Served(NamedTuple):
    """A SavedModel's answer.

    Attributes:
      input_name: of the one input, string [n].
      function: string [n] to a dict of tensors whose first axis is n.
      resources: objects that hold the tables and variables, beyond the model's, that the function reads.
    """

    input_name: str
    function: Callable[[tf.Tensor], dict[str, tf.Tensor]]
    resources: list[Any]


def check_builder(binding: str, model: Callable[..., Any], example: str) -> None:
    """Raises UsageError unless a bound model is a builder, which is called later, under the strategy's scope."""
    if isinstance(model, keras.Model) or not callable(model):  # a built model can be called, too
        raise UsageError(
            f"{binding} must be a reference without parentheses, such as {example}, got {type(model).__name__}"
        )


_NOT_OF_USERS = ("builtins", "keras", "launcher", "tensorflow")
_MISSPELT = 0.8  # of 1: how near a name is to one of a task's that it is taken for a slip

_SUMS = "(sum of losses, sum of weights, {metric: sum})"


def complete(task: Any) -> Task:
    """The object that a recipe binds as its task, with `Task`'s defaults for what its class leaves out.

    Raises:
      UsageError: it lacks one of the three methods, or they do not take the arguments they are called with; or it has a
        name that is nearly, but not quite, one of a task's.
    """
    for name, arguments in (("data", ()), ("model", ()), ("loss", ("model", "batch", "training"))):
        method = getattr(task, name, None)
        if not callable(method) or getattr(method, "__func__", None) is vars(Task)[name]:
            raise UsageError(f"train.task = {task!r} has no method {name}(): bind @image_classification() or another")
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError:
            raise UsageError(
                f"{defined_at(method)}: {name}() is called as {name}({', '.join(arguments)}), and takes "
                f"{inspect.signature(method)}"
            ) from None
        except ValueError:  # it does not say what it takes
            continue
    _check_spelling(task)
    for name, default in vars(Task).items():
        # A property is there without being asked for its value, which may not be known yet.
        if name.startswith("_") or inspect.getattr_static(task, name, None) is not None or hasattr(task, name):
            continue
        try:
            object.__setattr__(task, name, types.MethodType(default, task) if callable(default) else default)
        except AttributeError:
            raise UsageError(f"{task!r} takes no attributes; have it inherit launcher.tasks.base.Task") from None
    return cast(Task, task)


def _check_spelling(task: Any) -> None:
    """Raises UsageError for a public name that is nearly one of a task's, which would be passed over in silence."""
    kinds = [kind for kind in type(task).__mro__ if kind not in (object, Task)]
    of_users = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _NOT_OF_USERS]
    written = {name for one in (task, *of_users) for name in getattr(one, "__dict__", ())}
    present = written.union(*map(vars, kinds))
    offered = set(vars(Task))
    for capability in (Decodes, ShowsSamples, ReadsLines, ReadsImages):
        members = {name for name in (*vars(capability), *capability.__annotations__) if not name.startswith("_")}
        offered |= members if members & present else set()
    for name in sorted(name for name in written - offered if not name.startswith("_")):
        if (close := nearest(name, offered - present, cutoff=_MISSPELT)) is not None:
            raise UsageError(f"train.task: nothing asks for {name!r}; did you mean {close!r}? Else call it '_{name}'")


def open_data(task: Task) -> Data:
    """The task's data; UsageError where it is not what `Data` describes."""
    data: Any = task.data()
    needed = ("num_train_examples", "num_eval_examples", "check", "train_batches", "eval_batches")
    if all(hasattr(data, name) for name in needed):
        return data
    what = f"{type(data).__module__}.{type(data).__name__}"
    if isinstance(data, tf.data.Dataset):
        what = "a tf.data.Dataset, whose order cannot be tied to the seed and the step"
    elif data is None:
        what = "None; does it end with a return?"
    raise UsageError(
        f"{defined_at(task.data)}: data() must return a launcher.data.pipeline.RandomAccessData, or an object with "
        f"{', '.join(needed)}; it returned {what}"
    )


def real_rows(task: Task, batch: Batch) -> Batch:
    """A batch as the task's loss() takes it where TensorFlow's XLA compiles that."""
    return without_padding(batch) if task.takes_real_rows else batch


def without_padding(batch: Batch) -> Batch:
    """A replica's real examples; one where there is none."""
    count = tf.maximum(tf.cast(tf.reduce_sum(batch[WEIGHT]), tf.int32), 1)
    return {name: one[:count] for name, one in batch.items()}


def loss_sums(task: Task, model: keras.Model, batch: Batch, training: bool) -> Sums:
    """Calls the task's loss() while a step is traced; UsageError unless it returns float32 sums."""
    with lookups.by_rows():
        outputs = call_converted(task.loss, model, batch, training)
    return checked_sums(outputs, batch, where=defined_at(task.loss), vectors=task.results is not None)


@no_autograph
def checked_sums(outputs: Any, batch: Mapping[str, tf.Tensor], *, where: str, vectors: bool = False) -> Sums:
    """Checks what a task's `loss` returned for a batch; see `loss_sums`. `vectors`: metrics may be vectors, too."""
    if not isinstance(outputs, tuple | list) or len(outputs) != 3 or not isinstance(outputs[2], Mapping):
        raise UsageError(f"{where}: loss() must return {_SUMS}, got {_shape_of(outputs)}")
    loss, weight, metrics = outputs
    named = {"the loss": loss, "the weight": weight, **{f"metric {name!r}": metrics[name] for name in metrics}}
    tensors = {}
    for name, value in named.items():
        try:
            tensor = tensors[name] = tf.convert_to_tensor(value)
        except (TypeError, ValueError):
            raise UsageError(f"{where}: {name} that loss() returned is no tensor: {_shape_of(value)}") from None
        if vectors and name.startswith("metric ") and tensor.dtype == tf.float32 and tensor.shape.rank == 1:
            continue
        if tensor.dtype != tf.float32 or tensor.shape.rank != 0:
            advice = "add it up with tf.reduce_sum" if tensor.shape.rank else "cast it with tf.cast(..., tf.float32)"
            raise UsageError(
                f"{where}: {name} that loss() returned must be a float32 scalar (a sum over the batch), "
                f"got {_shape_of(tensor)}; {advice}"
            )
    rows = batch[WEIGHT].shape[0] if WEIGHT in batch else None
    if rows and rows > 1 and tf.get_static_value(tensors["the weight"]) == 1.0:
        raise mean_weight(where, 1.0, rows)
    loss, weight, *rest = tensors.values()
    return loss, weight, dict(zip(metrics, rest, strict=True))


def folded(name: str, values: npt.ArrayLike) -> np.ndarray:
    """A task's metric of several steps or batches, from its values [n, ...] in each of them."""
    fold, nothing = {"max": (np.max, -np.inf), "min": (np.min, np.inf)}.get(name.partition(":")[0], (np.sum, 0.0))
    return fold(np.asarray(values), axis=0, initial=nothing)


def metric_results(task: Task, sums: Mapping[str, np.ndarray], weight: float) -> dict[str, float]:
    """The metrics of some examples: means, or what the task makes of the sums; NaN where their weight is 0.

    Args:
      sums: float64 scalar or vector by name.
      weight: sum of the examples' weights.
    """
    if task.results is not None:
        return {name: value if weight else math.nan for name, value in task.results(sums, weight).items()}
    return {name: float(value / weight) if weight else math.nan for name, value in sums.items()}


def mean_weight(where: str, weight: float, examples: int) -> UsageError:
    """The refusal of a loss(), defined there, that gave `weight`, a mean, for so many examples."""
    return UsageError(
        f"{where}: loss() returned weight {weight:g} for {examples} examples: return sums, not means, "
        f'as in {_SUMS}, where the sum of weights is tf.reduce_sum(batch["weight"]) or a number of tokens'
    )


def _shape_of(value: Any) -> str:
    """A value as a message shows it."""
    if tf.is_tensor(value):
        return f"{value.dtype.name} of shape {value.shape}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shape_of, value))})"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(repr, value)) or 'nothing'}"
    return "None" if value is None else type(value).__name__

"""Batches whose content depends on (seed, step) alone, for any number of hosts and replicas.

A batch is a dict of tensors whose first axis is the batch. It always has the key "weight", float32 [batch]: 1 for a
real example (or the example's own weight), 0 for padding.

    RandomAccessData(
        train=ArrayExamples({"image": train_x, "label": train_y}),
        evaluation=ArrayExamples({"image": test_x, "label": test_y}),
    )
"""

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from launcher.data.images.mix import partner_positions
from launcher.data.kinds import DataOfEpochs, identity_of, pads_batches
from launcher.data.order import example_seeds, shuffled
from launcher.data.text import storage
from launcher.errors import UsageError
from launcher.machine.host_arrays import rows_of
from launcher.machine.no_autograph import call_converted, no_autograph

Batch = dict[str, tf.Tensor]
Augment = Callable[[Batch, tf.Tensor], Batch]
"""(batch, seeds int32 [n, 2]: one pair an example) -> batch; stateless."""
Finish = Callable[[Batch], Batch]
Mixing = Callable[[Batch, Batch, tf.Tensor], Batch]
"""(batch, the partner of each example, seeds int32 [n, 2]) -> batch; stateless; see `launcher.data.images.mix.Mix`."""

WEIGHT = "weight"

# Finished batches beside those in the making, of which there are as many as processors.
_AHEAD = 2

# Of an array, those that its identity looks at: a second's work.
_DIGESTED_BYTES = 2**28

_held: collections.deque[Iterator[Any]] = collections.deque(maxlen=3)


def held(dataset: Iterable[Any]) -> Iterator[Any]:
    """An iterator that is let go some others later, when it no longer reads ahead.

    Of one that is let go while it does, TensorFlow (2.21) takes what a `cache()` in it has read so far for the whole:
    all that read the data set then get those few elements, without a word. To let it go waits for the thread that tunes
    it, see `batch_pipeline`, so nothing does.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    _held.append(iter(dataset.with_options(options) if isinstance(dataset, tf.data.Dataset) else dataset))
    return _held[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of every global batch that one host feeds.

    Args:
      start_step: the first step to make training batches for; evaluation starts at its beginning always.
      in_this_process: whether the batches are made in this process, where Python functions can be called, and not by a
        host that it drives.
      as_stored: whether training batches go without what data with `finish_stored` does to them at the end.
    """

    global_batch_size: int  # examples of one step over all replicas; divisible by `num_replicas`, or `rows` are given
    seed: int  # the run's
    num_replicas: int = 1  # in sync over all hosts
    first_replica: int = 0  # global index of this host's first replica
    local_replicas: int = 1  # replicas this host feeds
    start_step: int = 0
    in_this_process: bool = True
    rows: int = 0  # of each replica's batch, padding included; 0 for its even share, see `rows_of_replica`
    as_stored: bool = False

    def __post_init__(self) -> None:
        if self.num_replicas < 1 or self.local_replicas < 1 or self.first_replica < 0 or self.start_step < 0:
            raise ValueError(f"impossible shard: {self}")
        if self.first_replica + self.local_replicas > self.num_replicas:
            raise ValueError(f"the host's replicas exceed the {self.num_replicas} of the run: {self}")
        if 0 < self.global_batch_size <= self.rows * self.num_replicas:
            return
        if self.global_batch_size < 1 or self.global_batch_size % self.num_replicas:
            raise UsageError(f"global batch size {self.global_batch_size}: choose a multiple of {self.num_replicas}")

    @property
    def per_replica_batch_size(self) -> int:
        return self.rows or self.global_batch_size // self.num_replicas


class Data(Protocol):
    """The source of a task's batches: five members. It may also be of `launcher.data.kinds`."""

    @property
    def num_train_examples(self) -> int | None:
        """Examples of an epoch; None if unknown: the recipe must then give steps, not epochs."""

    @property
    def num_eval_examples(self) -> int | None:
        """Examples of one evaluation; 0 if there are none, None if that is unknown."""

    def check(self) -> None:
        """Raises UsageError when the data set is not prepared; called before anything is written."""

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        """One replica's batches, static shapes, endless: the host's replicas of a step in turn, then the next step."""

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        """Batches as of `train_batches`, with every example once over all hosts; as many for every replica, padded."""


def steps_per_epoch(data: Data, global_batch_size: int) -> int | None:
    """Steps of an epoch, see `DataOfEpochs`; None where the data does not say."""
    return data.steps_per_epoch(global_batch_size) if isinstance(data, DataOfEpochs) else None


def rows_of_replica(data: Data, global_batch_size: int, num_replicas: int, microbatches: int = 1) -> int:
    """Rows of a replica's batch, as `Shard` takes them: 0 where the batch must be divided evenly."""
    if not pads_batches(data):
        return 0
    return math.ceil(global_batch_size / (num_replicas * microbatches)) * microbatches


def described(data: Data) -> dict[str, Any]:
    """The record of the training data in checkpoints: the number of its examples, and its identity."""
    return {"examples": data.num_train_examples, "identity": identity_of(data)}


@runtime_checkable
class Examples(Protocol):
    """A set of examples in which any one can be had at once."""

    def __len__(self) -> int: ...

    def fetch(self, indices: tf.Tensor) -> Batch:
        """Examples `indices` (int64 [n]) as tensors [n, ...]; runs inside `tf.data.Dataset.map`.

        Examples that only the process that trains can fetch, as by Python, and not the hosts of a TPU pod, say what to
        do about it in `stays_here`, a string.
        """


@runtime_checkable
class Evaluation(Protocol):
    """A source of the batches that a model is evaluated on, apart from what it is trained on."""

    @property
    def num_examples(self) -> int:
        """Examples of one evaluation."""

    def steps(self, global_batch_size: int) -> int:
        """Batches of one evaluation."""

    def batches(self, shard: Shard, finish: Finish | None) -> tf.data.Dataset:
        """See `Data.eval_batches`; `finish` changes each batch at the end."""


@dataclasses.dataclass(frozen=True)
class ExamplesEvaluation:
    """`Evaluation` on examples that can be had in any order, in their own."""

    examples: Examples

    @property
    def num_examples(self) -> int:
        return len(self.examples)

    def identity(self) -> str:
        return identity_of(self.examples)

    def steps(self, global_batch_size: int) -> int:
        return math.ceil(len(self.examples) / global_batch_size)

    def batches(self, shard: Shard, finish: Finish | None) -> tf.data.Dataset:
        _check_can_run(self.examples, shard)

        @no_autograph
        def batch_at(element: tf.Tensor) -> Batch:
            position, real, _ = _positions_of_epochs(shard, element, len(self.examples))
            batch = call_converted(self.examples.fetch, position)
            batch = batch if finish is None else call_converted(finish, batch)
            return weighted(batch, shard.per_replica_batch_size, real)

        elements = self.steps(shard.global_batch_size) * shard.local_replicas
        return batch_pipeline(_not_rewritten(tf.data.Dataset.range(elements)), batch_at)


class ArrayExamples:
    """Examples held in memory.

        >>> examples = ArrayExamples({"image": np.zeros([3, 8, 8, 1]), "label": np.array([0, 1, 1])})
        >>> len(examples), examples.fetch(tf.constant([2]))["label"].numpy()
        (3, array([1]))

    Args:
      arrays: key to array [n, ...] of any dtype TensorFlow knows, not to be written to while they are in use: large
        ones need not be copied. The key "weight", if there, weights the examples.
      identity: of their content, where it is known; else a digest of it.

    Raises:
      UsageError: no arrays, arrays of different lengths, none of any length, or rows of unequal shapes.
    """

    def __init__(self, arrays: Mapping[str, npt.ArrayLike], identity: str = ""):
        if not arrays:
            raise UsageError("ArrayExamples got no arrays; give it at least one, such as {'image': x, 'label': y}")
        self._arrays = {key: _as_array(key, value) for key, value in arrays.items()}
        lengths = {key: len(array) for key, array in self._arrays.items()}
        if len(set(lengths.values())) != 1:
            raise UsageError(f"arrays of one data set must have one length, got {lengths}")
        self._identity, self._length = identity, next(iter(lengths.values()))
        if not self._length:
            raise UsageError(f"a data set needs at least one example, got arrays of length 0: {', '.join(lengths)}")
        if WEIGHT in arrays and self._arrays[WEIGHT].ndim != 1:
            raise UsageError(f"'weight' must hold one number an example, got shape {self._arrays[WEIGHT].shape}")
        self._rows: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {}

    def __len__(self) -> int:
        return self._length

    def identity(self) -> str:
        """A digest of the arrays' content; of large ones, of rows that are spread over them."""
        return self._identity or storage.digest(
            *(f"{key} {array.shape}" for key, array in self._arrays.items()),
            *(array[:: -(-array.nbytes // _DIGESTED_BYTES) or 1] for array in self._arrays.values()),
        )

    @no_autograph
    def fetch(self, indices: tf.Tensor) -> Batch:
        if not self._rows:
            # Made once and captured by reference: as constants of the graph they would be limited to 2 GB. Not made
            # before the first use, because that would start TensorFlow's runtime while devices are still being set up.
            with tf.init_scope(), tf.device("CPU:0"):
                self._rows = {key: rows_of(array) for key, array in self._arrays.items()}
        return {key: rows(indices) for key, rows in self._rows.items()}


def _as_array(key: str, value: npt.ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"{key!r} is not an array: {error}") from None
    if array.dtype == object:
        raise UsageError(f"{key!r} has rows of different shapes or types; pad or convert them to one array")
    if not array.ndim:
        raise UsageError(f"{key!r} is a single value, {value!r}; its first axis must be the examples")
    return array


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class RandomAccessData:
    """`Data` from examples that can be had in any order.

        >>> data = RandomAccessData(train=ArrayExamples({"label": np.arange(100)}))
        >>> data.num_train_examples, data.num_eval_examples
        (100, 0)

    Position p of the training stream is example `shuffled(p)`; replica r of step s gets positions s*B + r*b up to
    s*B + (r+1)*b (B, b: global and per-replica batch). Positions run on over the ends of epochs: no batch is short.

    With `whole_epochs`, an epoch is a whole number of batches, and the last one is padded, as is each that replicas do
    not divide: in the place of what is missing stand examples of that batch once more, with weight 0.

    Args:
      train: the training examples.
      evaluation: the examples to evaluate on, or an `Evaluation`; None if there are none.
      augment: changes a training batch; gets a seed pair an example, derived from (seed, epoch, example).
      finish: changes every batch at the end, training and evaluation alike, such as bytes to standardised floats.
      mix: mixes finished training examples with others of their epoch, each augmented as it is where it stands itself.
      shuffle: False for examples in their own order in every epoch.
      whole_epochs: see above; not with `mix`.
      steps: what the run calls an epoch, as with Keras's `steps_per_epoch`; None for all examples.
    """

    train: Examples
    evaluation: Examples | Evaluation | None = None
    augment: Augment | None = None
    finish: Finish | None = None
    mix: Mixing | None = None
    shuffle: bool = True
    whole_epochs: bool = False
    steps: int | None = None

    def __post_init__(self) -> None:
        parts: dict[str, Any] = {"train": self.train, "evaluation": self.evaluation}
        for role, examples in parts.items():
            if examples is None or isinstance(examples, Evaluation):
                continue
            if not isinstance(examples, Examples):
                advice = "wrap it: ArrayExamples({'features': ...})" if isinstance(examples, dict) else "see Examples"
                raise UsageError(f"RandomAccessData: {role} must be examples, got {type(examples).__name__}; {advice}")
            if len(examples) < 1:
                raise UsageError(f"RandomAccessData({role}=...): a data set needs at least one example, got none")
        held_out = self.evaluation
        self._evaluation = ExamplesEvaluation(held_out) if isinstance(held_out, Examples) else held_out
        self.num_train_examples = len(self.train)
        self.num_eval_examples = 0 if self._evaluation is None else self._evaluation.num_examples
        self.pads_batches = self.whole_epochs

    def steps_per_epoch(self, global_batch_size: int) -> int | None:
        """Batches of an epoch, where epochs are whole."""
        return self.steps or (math.ceil(len(self.train) / global_batch_size) if self.whole_epochs else None)

    def check(self) -> None:
        """Nothing to prepare."""

    def identity(self) -> str:
        """That of the training examples, and whether they are shuffled."""
        return f"{identity_of(self.train)}{'' if self.shuffle else ' unshuffled'}"

    def example_at(self, position: int, seed: int) -> int:
        """The training example at a position of the training stream."""
        _, index = shuffled(tf.constant([position], tf.int64), seed=seed, size=len(self.train))
        return int(index[0])

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        _check_can_run(self.train, shard)
        size, count = len(self.train), shard.per_replica_batch_size
        halves = slice(count), slice(count, None)

        def examples_at(position: tf.Tensor, epoch: tf.Tensor | None = None) -> tuple[Batch, Any]:
            if self.shuffle:
                epoch, index = shuffled(position, seed=shard.seed, size=size, epoch=epoch)
            else:
                epoch, index = position // size, position % size
            draws = self.augment is not None or self.mix is not None
            seeds = example_seeds(seed=shard.seed, epoch=epoch, index=index) if draws else None
            batch = call_converted(self.train.fetch, index)
            if self.augment is not None:
                batch = call_converted(self.augment, batch, seeds)
            if self.finish is not None and not shard.as_stored:
                batch = call_converted(self.finish, batch)
            return batch, seeds

        @no_autograph
        def batch_at(element: tf.Tensor) -> Batch:
            if self.whole_epochs:
                position, real, epoch = _positions_of_epochs(shard, element, size)
                return weighted(examples_at(position, epoch)[0], count, real)
            position = _positions(shard, element)
            if self.mix is None:
                return weighted(examples_at(position)[0], count)
            others = partner_positions(position, seed=shard.seed, size=size)
            both, seeds = examples_at(tf.concat([position, others], axis=0))
            batch, partner = ({key: value[part] for key, value in both.items()} for part in halves)
            return weighted(call_converted(self.mix, batch, partner, seeds[:count]), count)

        first = shard.start_step * shard.local_replicas
        return batch_pipeline(_not_rewritten(tf.data.Dataset.counter(first, dtype=tf.int64)), batch_at)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return evaluated_on(self._evaluation).batches(shard, self.finish)

    def eval_steps(self, global_batch_size: int) -> int:
        """Batches of an evaluation."""
        return evaluated_on(self._evaluation).steps(global_batch_size)


def evaluated_on(evaluation: Evaluation | None) -> Evaluation:
    """The same; raises UsageError where there is none."""
    if evaluation is None:
        raise UsageError("there are no evaluation examples; use --mode=train, or give some")
    return evaluation


def _not_rewritten(elements: tf.data.Dataset) -> tf.data.Dataset:
    """To rewrite a pipeline, each of its iterators copies the tensors it reads, which may be all examples."""
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    return elements.with_options(options)


def _check_can_run(examples: Examples, shard: Shard) -> None:
    advice = getattr(examples, "stays_here", None)
    if advice is not None and not shard.in_this_process:
        raise UsageError(f"the hosts of a TPU pod cannot read this data, which the process that trains reads: {advice}")


@no_autograph
def _step_and_places(shard: Shard, element: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Step of the host's batch number `element` (int64 []), and its places in the global batch, int64 [b]."""
    size = shard.per_replica_batch_size
    step, replica = element // shard.local_replicas, element % shard.local_replicas + shard.first_replica
    return step, replica * size + tf.range(size, dtype=tf.int64)


@no_autograph
def _positions(shard: Shard, element: tf.Tensor) -> tf.Tensor:
    """Positions [b] in the global stream of the host's batch number `element` (int64 [])."""
    step, place = _step_and_places(shard, element)
    return step * shard.global_batch_size + place


@no_autograph
def _positions_of_epochs(shard: Shard, element: tf.Tensor, num_examples: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Positions int64 [b] of a batch of padded epochs, float32 [b], 0 for padding, and the epoch."""
    whole, (step, rows) = shard.global_batch_size, _step_and_places(shard, element)
    epoch, number = step // -(-num_examples // whole), step % -(-num_examples // whole)
    first = number * whole
    there = tf.minimum(tf.constant(whole, tf.int64), num_examples - first)
    return epoch * num_examples + first + rows % there, tf.cast(rows < there, tf.float32), epoch


@no_autograph
def weighted(batch: Batch, size: int, mask: tf.Tensor | None = None) -> Batch:
    """A batch of static shapes with "weight", float32 [size]: its own or 1, times the mask, 0 for padding."""
    weight = tf.ones([size]) if mask is None else mask
    if WEIGHT in batch:
        weight *= tf.cast(batch[WEIGHT], tf.float32)
    batch = {**batch, WEIGHT: weight}
    return {key: _with_static_shape(key, value, size) for key, value in batch.items()}


def _with_static_shape(key: str, value: tf.Tensor, size: int) -> tf.Tensor:
    if value.shape.rank is None or not value.shape[1:].is_fully_defined():
        raise UsageError(f"{key!r} of a batch has shape {value.shape}; say all axes but the first by tf.ensure_shape")
    return tf.ensure_shape(value, [size, *value.shape[1:]])


def batch_pipeline(elements: tf.data.Dataset, batch_at: Callable[..., Batch]) -> tf.data.Dataset:
    """Maps elements to batches in parallel, in order, ahead of their use."""
    options = tf.data.Options()
    options.deterministic = True
    # The thread that tunes sleeps for up to as long as the iterator has lived, and the iterator's end waits for it in
    # TensorFlow 2.21: after each evaluation. It could choose no more than `parallel_calls`.
    options.autotune.enabled = False
    return (
        elements.map(batch_at, num_parallel_calls=parallel_calls(), deterministic=True)
        .prefetch(_AHEAD)
        .with_options(options)
    )


def parallel_calls() -> int:
    """The number of elements made at once: one on each processor that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

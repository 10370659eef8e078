"""`Data` from batches in the order in which they come: of `tf.data.Dataset`s, or of Python."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import WEIGHT, Batch, Shard, held
from launcher.data.python_batches import PythonBatches
from launcher.data.structure import Structure, as_arrays, flatten, inner_sizes
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph

_ORDER_OF_DATASET = (
    "every worker reads the whole tf.data.Dataset and takes its rows; its order, also after a restart, is what its "
    "seeds make it"
)


class DatasetData:
    """`Data` from batches, of `tf.data.Dataset`s or of Python, in the order in which they come.

    Every worker reads all of them and takes its rows of each batch, so that a step's batch is the same on any
    topology; a resumed run reads what its epoch has used up and goes on. Both hold as far as the dataset gives the
    same elements each time: its shuffles and random maps need seeds, which `launcher` sets where it calls the function
    that makes the dataset. A batch that is short, at the end of an epoch, or that the replicas do not divide, is filled
    with examples of its own once more, with weight 0.

    Args:
      train: batches of the run's global batch size, of which the last of an epoch may be shorter; where they have to be
        counted, the largest has that size, else the first.
      validation: batches of any size, or None.
      steps_per_epoch: batches of an epoch; None for those of the dataset, which are counted if it cannot tell.
      validation_steps: batches of `validation` to evaluate on; None for all.
      shuffle: whether batches that have numbers come in another order in each epoch, as with Keras's PyDataset.
    """

    pads_batches = True

    def __init__(
        self,
        *,
        train: tf.data.Dataset | PythonBatches,
        validation: tf.data.Dataset | PythonBatches | None,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        shuffle: bool = False,
    ):
        self._python = train if isinstance(train, PythonBatches) else None
        self.reads_again = self._python is None
        self._shuffle = shuffle
        if isinstance(train, PythonBatches):
            self.name, self.note, self.reads_once = "Python", train.note, train.reads_once
            self.batch_size, self._train = train.batch_size, train.dataset()
            self._steps_per_epoch = steps_per_epoch or _told(train, "training", "steps_per_epoch")
        else:
            self.name, self.note, self.reads_once = "tf.data", _ORDER_OF_DATASET, False
            self.batch_size, self._train = batch_size_of(train), _as_dicts(train, "training")
            self._steps_per_epoch = steps_per_epoch or 0
            if not steps_per_epoch:
                self._steps_per_epoch, largest = _num_batches(self._train, "training", "steps_per_epoch")
                self.batch_size = max(self.batch_size, largest)
        self.num_train_examples = self._steps_per_epoch * self.batch_size
        self._validation: tf.data.Dataset | None = None
        self.num_eval_examples, self._eval_rows = 0, list[int]()
        if validation is not None:
            self._validation = _to_evaluate_on(validation, validation_steps)
            self._eval_rows = _rows_of_batches(self._validation)
            self.num_eval_examples = sum(self._eval_rows)
        self.finish: Callable[[Batch], Batch] | None = None  # as of `RandomAccessData`
        self._structures = [
            _structure(source, read)
            for source, read in ((train, self._train), (validation, self._validation))
            if source is not None and read is not None
        ]

    @property
    def structures(self) -> list[Structure]:
        """How its batches are put together again: of training, and of validation."""
        return self._structures

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Batches of an epoch; raises UsageError where they are of another size than the run's."""
        if self.batch_size != global_batch_size:
            raise UsageError(
                f"train.global_batch_size = {global_batch_size}: the dataset's batches have {self.batch_size}"
            )
        return self._steps_per_epoch

    def check(self) -> None:
        """Nothing to prepare."""

    def identity(self) -> str:
        """Of what a batch looks like: what is in it is known by reading it alone."""
        return str(self._train.element_spec)

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        self.steps_per_epoch(shard.global_batch_size)
        if self._python is None:
            return self._parts(self._train.repeat().skip(shard.start_step), shard)
        if not shard.in_this_process:
            raise UsageError("a TPU pod's hosts run no Python, which makes this data: see docs/own_data.md")
        return self._parts(self._python.dataset(shard.start_step, shuffle=self._shuffle, seed=shard.seed), shard)

    def eval_steps(self, global_batch_size: int) -> int:
        """Batches of an evaluation: those of the dataset where their sizes differ, else full ones."""
        if not self._is_ragged:
            return math.ceil(self.num_eval_examples / global_batch_size)
        return sum(math.ceil(rows / global_batch_size) for rows in self._eval_rows)

    @property
    def _is_ragged(self) -> bool:
        return self._validation is not None and any(
            None in inner_sizes(spec) for spec in self._validation.element_spec.values()
        )

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        if self._validation is None:
            raise UsageError("there is no validation data; use --mode=train or give some")
        size = shard.global_batch_size
        if self._is_ragged:  # rows of two batches cannot be put together
            return self._parts(self._validation.flat_map(_in_pieces(size)), shard)
        return self._parts(self._validation.rebatch(size), shard)

    def _parts(self, batches: tf.data.Dataset, shard: Shard) -> tf.data.Dataset:
        return _of_replicas(batches if self.finish is None else batches.map(self.finish), shard)


def _structure(source: tf.data.Dataset | PythonBatches, read: tf.data.Dataset) -> Structure:
    if isinstance(source, PythonBatches):
        specs = iter(source.element_spec.values())
        parts = as_arrays(as_tuple(source.first), role="Python's")
        element = keras.tree.map_structure(lambda leaf: None if leaf is None else next(specs), parts)
    else:
        element = source.element_spec
    return Structure(element, functools.partial(first_batch, read, "given"))


def _told(batches: PythonBatches, role: str, argument: str) -> int:
    if batches.num_batches is None:
        raise UsageError(f"the {role} data does not say how many batches it has: say so with {argument}")
    return batches.num_batches


def _to_evaluate_on(validation: tf.data.Dataset | PythonBatches, steps: int | None) -> tf.data.Dataset:
    """The batches of an evaluation, the same ones each time."""
    if not isinstance(validation, PythonBatches):
        return _as_dicts(validation if steps is None else validation.take(steps), "validation")
    steps = steps or _told(validation, "validation", "validation_steps")
    found = validation.dataset().take(steps)
    if not validation.is_kept:
        return found
    kept = [*found.as_numpy_iterator()]
    return tf.data.Dataset.from_generator(lambda: iter(kept), output_signature=validation.element_spec)


def batch_size_of(dataset: tf.data.Dataset) -> int:
    """Examples of a batch of a dataset: of its specification, or else of its first one; UsageError without batches."""
    sizes = {
        None if spec.shape.rank is None else [*spec.shape, 0][0] for spec in flatten(dataset.element_spec).values()
    }
    if sizes == {None}:
        for element in itertools.islice(held(dataset), 1):
            sizes = {int(tf.shape(leaf)[0]) if leaf.shape.rank else 0 for leaf in flatten(element).values()}
        if sizes == {None}:
            raise UsageError("the dataset is empty")
    if len(sizes) != 1 or sizes & {0, None}:
        found = dict.fromkeys(map(str, sizes)) or {"none": None}
        raise UsageError(
            f"expected batches, got a tf.data.Dataset of elements of {', '.join(found)} rows; call .batch(size) on it"
        )
    return sizes.pop() or 0


def as_tuple(element: Any) -> Any:
    """What PyTorch puts in a list, as (x, y)."""
    return tuple(element) if isinstance(element, list) else element


def _in_pieces(size: int) -> Callable[[Batch], tf.data.Dataset]:
    @no_autograph
    def pieces(batch: Batch) -> tf.data.Dataset:
        starts = tf.data.Dataset.range(0, _rows(batch), size)
        part = no_autograph(lambda start: {key: value[start : start + size] for key, value in batch.items()})
        return starts.map(part)

    return pieces


def _as_dicts(dataset: tf.data.Dataset, role: str) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    for key, spec in flatten(dataset.element_spec).items():
        if isinstance(spec, tf.RaggedTensorSpec):
            raise UsageError(f"{key} of the {role} dataset is ragged: have a .map() call to_tensor() on it")

    is_tuple = isinstance(dataset.element_spec, tuple)

    @no_autograph
    def as_dict(*element: Any) -> Batch:
        leaves = flatten(element if is_tuple else element[0]).items()
        return {key: tf.sparse.to_dense(leaf) if isinstance(leaf, tf.SparseTensor) else leaf for key, leaf in leaves}

    found = dataset.map(as_dict)
    if any(spec.shape.rank is None for spec in found.element_spec.values()):
        ranks = {key: value.shape.rank for key, value in first_batch(found, role).items()}

        def ranked(batch: Batch) -> Batch:
            return {key: tf.ensure_shape(value, [None] * ranks[key]) for key, value in batch.items()}

        found = found.map(no_autograph(ranked))
    return found.with_options(options)


def first_batch(dataset: tf.data.Dataset, role: str) -> Batch:
    """Reads it; UsageError where there is none."""
    for batch in held(dataset):
        return batch
    raise UsageError(f"the {role} dataset is empty")


def _num_batches(dataset: tf.data.Dataset, role: str, argument: str) -> tuple[int, int]:
    """And the examples of the largest, where they have to be read to be counted, else 0."""
    count, largest = int(dataset.cardinality()), 0
    if count == tf.data.INFINITE_CARDINALITY:
        raise UsageError(f"the {role} dataset is endless: say how many batches an epoch has with {argument}")
    if count == tf.data.UNKNOWN_CARDINALITY:
        begin = np.int64(0), np.int64(0)
        count, largest = map(
            int, dataset.reduce(begin, lambda so_far, batch: (so_far[0] + 1, tf.maximum(so_far[1], _rows(batch))))
        )
    if not count:
        raise UsageError(f"the {role} dataset is empty")
    return count, largest


def _rows_of_batches(dataset: tf.data.Dataset) -> list[int]:
    """Examples of each batch; reads them all, as their number is what a mean is taken over."""
    _num_batches(dataset.take(1), "validation", "validation_steps")
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise UsageError("the validation dataset is endless: say how much of it to use with validation_steps")
    return [int(rows) for rows in held(dataset.map(_rows))]


def _rows(batch: Batch) -> tf.Tensor:
    return tf.shape(next(iter(batch.values())), tf.int64)[0]


def _of_replicas(batches: tf.data.Dataset, shard: Shard) -> tf.data.Dataset:
    """The parts of this host's replicas of each global batch, in turn."""
    size, whole = shard.per_replica_batch_size, shard.global_batch_size
    larger = (
        f"UsageError: a batch of the dataset has more than {whole} examples, which its first one has; leave "
        "steps_per_epoch out, so that the largest is known, or see rebatch()"
    )

    @no_autograph
    def part(batch: Batch, replica: tf.Tensor) -> Batch:
        rows = _rows(batch)
        with tf.control_dependencies([tf.debugging.assert_less_equal(rows, tf.constant(whole, tf.int64), larger)]):
            rows = tf.identity(rows)
        place = replica * size + tf.range(size, dtype=tf.int64)
        taken = {key: tf.gather(value, place % rows) for key, value in batch.items()}
        taken[WEIGHT] = tf.cast(place < rows, tf.float32)
        return {key: tf.ensure_shape(value, [size, *value.shape[1:]]) for key, value in taken.items()}

    @no_autograph
    def parts(batch: Batch) -> tf.data.Dataset:
        replicas = tf.data.Dataset.range(shard.first_replica, shard.first_replica + shard.local_replicas)
        return replicas.map(no_autograph(lambda replica: part(batch, replica)))

    if shard.local_replicas == 1:
        found = batches.map(no_autograph(lambda batch: part(batch, tf.constant(shard.first_replica, tf.int64))))
    else:
        found = batches.flat_map(parts)
    return found.prefetch(tf.data.AUTOTUNE)

"""Data for Keras's `fit` as `Data`: arrays, data frames, `tf.data.Dataset`s of batches, and batches made by Python.

Data is (x, y[, sample_weight]), each one tensor or any nest of tuples, lists and dicts. In a batch, each of their
tensors has a key of its own, such as "x", "x/title" or "y/0"; `Structure` puts them together again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from launcher.data import pipeline
from launcher.data.pipeline import WEIGHT, Batch, Data, Evaluation, Finish, Shard, evaluated_on, held
from launcher.data.python_batches import PythonBatches, is_python
from launcher.data.structure import Structure, as_arrays, flatten, inner_sizes, split_off
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph


class DatasetBatches:
    """Batches of a `tf.data.Dataset`, as dicts; see `PythonBatches` for what it offers.

    Args:
      dataset: of batches, of which the last of an epoch may be shorter.
      role: "training" or "validation", for messages.
    """

    name, reads_again, reads_once = "tf.data", True, False
    note = (
        "every worker reads the whole tf.data.Dataset and takes its rows; its order, also after a restart, is what its "
        "seeds make it"
    )

    def __init__(self, dataset: tf.data.Dataset, role: str):
        self._role, self._batches = role, _as_dicts(dataset, role)
        self.element_spec = self._batches.element_spec
        sizes = {[*spec.shape, 0][0] for spec in self.element_spec.values()}
        if sizes == {None}:
            sizes = {[*leaf.shape, 0][0] for leaf in first_batch(self._batches, role).values()}
        if len(sizes) != 1 or sizes & {0, None}:
            rows = ", ".join(map(str, sizes)) or "none"
            raise UsageError(
                f"expected batches, got a tf.data.Dataset of elements of {rows} rows; call .batch(size) on it"
            )
        self.batch_size = sizes.pop()
        self.structure = Structure(dataset.element_spec, lambda: first_batch(self._batches, role))

    def count(self, argument: str) -> int:
        """Batches of an epoch; where they have to be read for that, `batch_size` is the largest one's then."""
        count = int(self._batches.cardinality())
        if count == tf.data.INFINITE_CARDINALITY:
            raise UsageError(f"the {self._role} dataset is endless: say how many batches to take with {argument}")
        if count == tf.data.UNKNOWN_CARDINALITY:
            rows = rows_of_batches(self._batches)
            count, self.batch_size = len(rows), max([self.batch_size, *rows])
        if not count:
            raise UsageError(f"the {self._role} dataset is empty")
        return count

    def endless(self, start: int, *, shuffle: bool, seed: int) -> tf.data.Dataset:
        return self._batches.repeat().skip(start)

    def first(self, count: int | None) -> tf.data.Dataset:
        if count is None and int(self._batches.cardinality()) == tf.data.INFINITE_CARDINALITY:
            self.count("validation_steps")
        return self._batches if count is None else self._batches.take(count)


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
      evaluation: what to evaluate on, or None.
      steps: batches of an epoch; None for those of the dataset, which are counted if it cannot tell.
      shuffle: whether batches that have numbers come in another order in each epoch, as with Keras's PyDataset.
    """

    pads_batches, details = True, ""

    def __init__(
        self,
        *,
        train: DatasetBatches | PythonBatches,
        evaluation: Evaluation | None = None,
        steps: int | None = None,
        shuffle: bool = False,
    ):
        self._train, self.evaluation, self._shuffle = train, evaluation, shuffle
        self._steps = steps or train.count("steps_per_epoch")
        self.name, self.note, self.batch_size = train.name, train.note, train.batch_size
        self.reads_again, self.reads_once = train.reads_again, train.reads_once
        self.num_train_examples = self._steps * self.batch_size
        self.num_eval_examples = 0 if evaluation is None else evaluation.num_examples
        self.finish: Finish | None = None  # as of `RandomAccessData`

    def steps_per_epoch(self, global_batch_size: int) -> int:
        """Batches of an epoch; raises UsageError where they are of another size than the run's."""
        if self.batch_size != global_batch_size:
            raise UsageError(
                f"train.global_batch_size = {global_batch_size}: the dataset's batches have {self.batch_size}"
            )
        return self._steps

    def check(self) -> None:
        """Nothing to prepare."""

    def identity(self) -> str:
        """The shapes and dtypes of a batch: what is in it is known by reading it alone."""
        return str(self._train.element_spec)

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        self.steps_per_epoch(shard.global_batch_size)
        if not shard.in_this_process and not self.reads_again:
            raise UsageError("a TPU pod's hosts run no Python, which makes this data: see docs/own_data.md")
        batches = self._train.endless(shard.start_step, shuffle=self._shuffle, seed=shard.seed)
        return _of_replicas(batches, self.finish, shard)

    def eval_steps(self, global_batch_size: int) -> int:
        """Batches of an evaluation."""
        return evaluated_on(self.evaluation).steps(global_batch_size)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return evaluated_on(self.evaluation).batches(shard, self.finish)


class DatasetEvaluation:
    """`Evaluation` on batches of any size, put together to those of the run unless sizes of examples differ.

    Args:
      count: how many of the batches; None for all.
    """

    def __init__(self, batches: DatasetBatches | PythonBatches, count: int | None = None):
        self.structure, self._batches = batches.structure, batches.first(count)
        self._rows = rows_of_batches(self._batches)  # all are read, as their number is what a mean is taken over
        if not self._rows:
            raise UsageError("the validation dataset is empty")
        self.num_examples = sum(self._rows)
        # Rows of two batches of which one is longer cannot be put together.
        self._is_ragged = any(None in inner_sizes(spec) for spec in self._batches.element_spec.values())

    def steps(self, global_batch_size: int) -> int:
        rows = self._rows if self._is_ragged else [self.num_examples]
        return sum(math.ceil(size / global_batch_size) for size in rows)

    def batches(self, shard: Shard, finish: Finish | None) -> tf.data.Dataset:
        size = shard.global_batch_size
        batches = self._batches.flat_map(_in_pieces(size)) if self._is_ragged else self._batches.rebatch(size)
        return _of_replicas(batches, finish, shard)


def make_data(
    train: Any,
    validation: Any | None,
    *,
    shuffle: bool = True,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_split: float = 0.0,
    again: Sequence[Callable[[], Any] | None] = (None, None),
) -> tuple[Data, list[Structure]]:
    """`Data` from what `fit` takes, and how its batches are put together again: of training, and of validation.

    Args:
      train, validation: datasets, what gives batches in Python, or arrays: see `DatasetBatches`, `PythonBatches` and
        `as_arrays`.
      shuffle, steps_per_epoch, validation_steps, validation_split: as in Keras's fit.
      again: functions that make them anew.
    """
    batches, held_out = _batches_of(train, again[0], "training"), _batches_of(validation, again[1], "validation")
    arrays: Any = None
    if batches is not None:
        if validation_split:
            raise UsageError("validation_split is for arrays; split a tf.data.Dataset with take() and skip()")
    elif train is None or (isinstance(train, Sequence) and not isinstance(train, tuple | list)):
        raise UsageError(f"expected training data as arrays, (x, y) or a tf.data.Dataset, got {type(train).__name__}")
    elif validation_steps is not None and held_out is None:
        raise UsageError("validation_steps is for datasets; of arrays, all examples are evaluated on")
    else:
        arrays = as_arrays(train, role="training")
    evaluation: Evaluation | None = None
    structures = []
    if held_out is not None:
        evaluation, structures = DatasetEvaluation(held_out, validation_steps), [held_out.structure]
    elif validation is not None or validation_split:
        if validation is None:
            arrays, kept = split_off(arrays, validation_split)
        else:
            kept = as_arrays(validation, role="validation")
        evaluation, structures = pipeline.ExamplesEvaluation(pipeline.ArrayExamples(flatten(kept))), [Structure(kept)]
    if batches is not None:
        data = DatasetData(train=batches, evaluation=evaluation, steps=steps_per_epoch, shuffle=shuffle)
        return data, [batches.structure, *structures]
    examples = pipeline.ArrayExamples(flatten(arrays))
    return pipeline.RandomAccessData(
        train=examples, evaluation=evaluation, shuffle=shuffle, whole_epochs=True, steps=steps_per_epoch
    ), [Structure(arrays), *structures]


def prepare(data: Any, structures: Sequence[Structure], function: Callable[..., Any]) -> list[Structure]:
    """Has a function of (x, y, sample_weight) change each batch, as keras-hub's preprocessors do.

    Returns how batches are put together then.
    """

    @no_autograph
    def finish(batch: Batch) -> Batch:
        structure = next(nest for nest in structures if set(nest.shapes) == batch.keys())
        return flatten(function(*structure.pack(batch)))

    data.finish = finish
    return [Structure(function(*nest.pack(nest.example()))) for nest in structures]


def _batches_of(source: Any, again: Callable[[], Any] | None, role: str) -> DatasetBatches | PythonBatches | None:
    """The batches of a source; None of arrays."""
    if isinstance(source, tf.data.Dataset):
        return DatasetBatches(source, role)
    return PythonBatches(source, again, role) if is_python(source) else None


def rows_of_batches(dataset: tf.data.Dataset) -> list[int]:
    """Examples of each batch, all of which are read."""
    return [int(rows) for rows in held(dataset.map(_rows))]


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

    dicts = dataset.map(as_dict)
    if any(spec.shape.rank is None for spec in dicts.element_spec.values()):
        ranks = {key: value.shape.rank for key, value in first_batch(dicts, role).items()}

        def ranked(batch: Batch) -> Batch:
            return {key: tf.ensure_shape(value, [None] * ranks[key]) for key, value in batch.items()}

        dicts = dicts.map(no_autograph(ranked))
    return dicts.with_options(options)


def first_batch(dataset: tf.data.Dataset, role: str) -> Batch:
    """Reads it; UsageError where there is none."""
    for batch in held(dataset):
        return batch
    raise UsageError(f"the {role} dataset is empty")


def _rows(batch: Batch) -> tf.Tensor:
    return tf.shape(next(iter(batch.values())), tf.int64)[0]


def _of_replicas(batches: tf.data.Dataset, finish: Finish | None, shard: Shard) -> tf.data.Dataset:
    """The parts of this host's replicas of each global batch, finished, in turn."""
    batches = batches if finish is None else batches.map(finish)
    size, whole = shard.per_replica_batch_size, shard.global_batch_size
    larger = (
        f"UsageError: a batch has more than {whole} examples, which the first one has: no batch may be larger than the "
        "first; of a tf.data.Dataset leave steps_per_epoch out, so that the largest is known, or see rebatch()"
    )

    def part(batch: Batch, replica: tf.Tensor) -> Batch:
        rows = _rows(batch)
        with tf.control_dependencies([tf.debugging.assert_less_equal(rows, tf.constant(whole, tf.int64), larger)]):
            rows = tf.identity(rows)
        place = replica * size + tf.range(size, dtype=tf.int64)
        index = place % rows
        taken = {key: tf.gather(value, index) for key, value in batch.items()}
        taken[WEIGHT] = tf.cast(place < rows, tf.float32)
        return {key: tf.ensure_shape(value, [size, *value.shape[1:]]) for key, value in taken.items()}

    @no_autograph
    def parts(batch: Batch) -> tf.data.Dataset:
        replicas = tf.data.Dataset.range(shard.first_replica, shard.first_replica + shard.local_replicas)
        return replicas.map(no_autograph(lambda replica: part(batch, replica)))

    if shard.local_replicas == 1:  # a dataset of one element a batch takes three times as long
        in_turn = batches.map(no_autograph(lambda batch: part(batch, tf.constant(shard.first_replica, tf.int64))))
    else:
        in_turn = batches.flat_map(parts)
    return in_turn.prefetch(tf.data.AUTOTUNE)

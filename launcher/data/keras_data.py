"""Data for Keras's `fit` as `Data`: arrays, data frames, `tf.data.Dataset`s of batches, and batches made by Python.

Data is (x, y[, sample_weight]), each one tensor or any nest of tuples, lists and dicts. In a batch, each of their
tensors has a key of its own, such as "x", "x/title" or "y/0"; `Structure` puts them together again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from launcher.data.dataset_data import DatasetBatches, DatasetData, DatasetEvaluation
from launcher.data.pipeline import ArrayExamples, Batch, Data, Evaluation, ExamplesEvaluation, RandomAccessData
from launcher.data.python_batches import PythonBatches, is_python
from launcher.data.structure import Structure, as_arrays, flatten, split_off
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph


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
        evaluation, structures = ExamplesEvaluation(ArrayExamples(flatten(kept))), [Structure(kept)]
    if batches is not None:
        data = DatasetData(train=batches, evaluation=evaluation, steps=steps_per_epoch, shuffle=shuffle)
        return data, [batches.structure, *structures]
    examples = ArrayExamples(flatten(arrays))
    return RandomAccessData(
        train=examples, evaluation=evaluation, shuffle=shuffle, whole_epochs=True, steps=steps_per_epoch
    ), [Structure(arrays), *structures]


def _batches_of(source: Any, again: Callable[[], Any] | None, role: str) -> DatasetBatches | PythonBatches | None:
    """The batches of a source; None of arrays."""
    if isinstance(source, tf.data.Dataset):
        return DatasetBatches(source, role)
    return PythonBatches(source, again, role) if is_python(source) else None

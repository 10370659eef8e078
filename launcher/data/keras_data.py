"""What Keras's `fit` takes, as `Data`: arrays, data frames, `tf.data.Dataset`s of batches, and batches made by Python.

Data is (x, y[, sample_weight]), each one tensor or any nest of tuples, lists and dicts. In a batch, each of their
tensors has a key of its own, such as "x", "x/title" or "y/0"; `Structure` puts them together again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from launcher.data.dataset_data import DatasetData, as_tuple
from launcher.data.pipeline import ArrayExamples, Batch, Data, RandomAccessData
from launcher.data.python_batches import PythonBatches, is_python
from launcher.data.structure import Structure, as_arrays, flatten, split_off
from launcher.errors import UsageError
from launcher.machine.no_autograph import no_autograph


class Mixed:
    """`Data` that trains on one kind and is evaluated on another; what is set is set of both."""

    pads_batches = True

    def __init__(self, training: Any, evaluation: Any):
        vars(self).update(training=training, evaluation=evaluation)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.evaluation if name in ("num_eval_examples", "eval_batches") else self.training, name)

    def __setattr__(self, name: str, value: Any) -> None:
        for data in (self.training, self.evaluation):
            setattr(data, name, value)

    def eval_steps(self, global_batch_size: int) -> int:
        """Batches of an evaluation."""
        steps = getattr(self.evaluation, "eval_steps", lambda size: math.ceil(self.num_eval_examples / size))
        return int(steps(global_batch_size))


def prepare(data: Any, structures: Sequence[Structure], function: Callable[..., Any]) -> list[Structure]:
    """Has a function of (x, y, sample_weight) change each batch, as keras-hub's preprocessors do.

    Returns how batches are put together then.
    """

    @no_autograph
    def finish(batch: Batch) -> Batch:
        structure = next(one for one in structures if set(one.shapes) == batch.keys())
        return flatten(function(*structure.pack(batch)))

    data.finish = finish
    return [Structure(function(*one.pack(one.example()))) for one in structures]


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
      train, validation: datasets, what gives batches in Python, or arrays: see `DatasetData`, `launcher.data.
        python_batches` and `as_arrays`.
      shuffle, steps_per_epoch, validation_steps, validation_split: as in Keras's fit.
      again: functions that make them anew.
    """
    first = _batches_of(train, again[0], "training")
    second = _batches_of(validation, again[1], "validation")
    if first is not None:
        if validation_split:
            raise UsageError("validation_split is for arrays; split a tf.data.Dataset with take() and skip()")
        data = DatasetData(
            train=first,
            validation=second,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            shuffle=shuffle,
        )
        if validation is None or second is not None:
            return data, data.structures
        arrays = as_arrays(validation, role="validation")
        return Mixed(data, _from_arrays(arrays, arrays)), [*data.structures, Structure(arrays)]
    if train is None or (isinstance(train, Sequence) and not isinstance(train, tuple | list)):
        raise UsageError(f"expected training data as arrays, (x, y) or a tf.data.Dataset, got {type(train).__name__}")
    if validation_steps is not None and second is None:
        raise UsageError("validation_steps is for datasets; of arrays, all examples are evaluated on")
    arrays = as_arrays(train, role="training")
    if second is not None:
        evaluation = DatasetData(train=second, validation=second, steps_per_epoch=1, validation_steps=validation_steps)
        structures = [Structure(arrays), evaluation.structures[1]]
        return Mixed(_from_arrays(arrays, None, shuffle, steps_per_epoch), evaluation), structures
    held_out = None
    if validation is not None:
        held_out = as_arrays(validation, role="validation")
    elif validation_split:
        arrays, held_out = split_off(arrays, validation_split)
    made = _from_arrays(arrays, held_out, shuffle, steps_per_epoch)
    return made, [Structure(one) for one in (arrays, held_out) if one is not None]


def _batches_of(source: Any, again: Callable[[], Any] | None, role: str) -> tf.data.Dataset | PythonBatches | None:
    """What gives batches; None of arrays."""
    if isinstance(source, tf.data.Dataset):
        return source
    if not is_python(source):
        return None
    return PythonBatches(source, again, lambda element: flatten(as_arrays(as_tuple(element), role=role)), role=role)


def _from_arrays(
    arrays: Any, held_out: Any, shuffle: bool = True, steps_per_epoch: int | None = None
) -> RandomAccessData:
    return RandomAccessData(
        train=ArrayExamples(flatten(arrays)),
        evaluation=None if held_out is None else ArrayExamples(flatten(held_out)),
        shuffle=shuffle,
        whole_epochs=True,
        steps=steps_per_epoch,
    )

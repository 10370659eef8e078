"""Nests (x, y, sample_weight) of whatever Keras's `fit` takes: they become a flat dict of arrays, and a nest again."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.errors import UsageError

_PARTS = ("x", "y", "sample_weight")
_IN_PLACE_OF_TEXT = {"x": "numbers, or a model that begins with TextVectorization", "y": "labels as numbers"}
_NUMBERS = int | float | str | bytes | np.generic


class Structure:
    """The nest (x, y, sample_weight) of arrays, tensors or their specifications behind the flat dict of a batch.

    Args:
      first: reads a batch, where sizes are not known without one.
    """

    def __init__(self, element: Any, first: Callable[[], Mapping[str, Any]] = dict):
        self._parts, self._first = _split(element), first
        self._leaves = flatten(self._parts)
        # How many parts a dataset's element is a tuple of; 0 of arrays, which Keras packs by what there is.
        self._length = len(element) if isinstance(element, tuple) and all(part is not None for part in element) else 0

    def __str__(self) -> str:
        leaves = self._leaves.items()
        return ", ".join(f"{key} is {_dtype(leaf).name} {[None, *inner_sizes(leaf)]}" for key, leaf in leaves)

    def text(self, part: str) -> str:
        """A message for where x or y may not be text; "" where it is none."""
        for key, leaf in self._leaves.items():
            if key[0] == part and _dtype(leaf) == tf.string:
                return f"{key} is text ({getattr(leaf.dtype, 'str', 'string')}): give {_IN_PLACE_OF_TEXT[part]}"
        return ""

    @property
    def unknown(self) -> list[str]:
        """Keys whose sizes differ between batches, or may do so."""
        return [key for key, leaf in self._leaves.items() if None in inner_sizes(leaf)]

    @property
    def has_weights(self) -> bool:
        """Whether examples have weights of their own."""
        return self.pack(self.example())[2] is not None

    @property
    def shapes(self) -> dict[str, Any]:
        """Sizes of an example by a batch's keys, but for the weight that marks what fills it up."""
        return {key: inner_sizes(leaf) for key, leaf in self._leaves.items()}

    def example(self, rows: Any = 1) -> dict[str, tf.Tensor]:
        """A batch of so many rows that are all zeros, or empty strings, as large as those of the first batch."""
        sizes: dict[str, Any] = {}
        if self.unknown:
            with tf.init_scope():  # it is read now, also where a step is traced
                sizes = {key: leaf.shape[1:] for key, leaf in self._first().items()}
        return {
            key: tf.zeros([rows, *sizes.get(key, inner_sizes(leaf))], _dtype(leaf))
            for key, leaf in self._leaves.items()
        }

    @property
    def rows(self) -> int | None:
        """The rows of every batch, where they are known to have the same."""
        specs = [leaf for leaf in self._leaves.values() if isinstance(leaf, tf.TensorSpec)]
        rows = {spec.shape[0] if spec.shape.rank else None for spec in specs}
        return rows.pop() if len(rows) == 1 else None

    def traced(self) -> Any:
        """An element as in a graph that is traced, of zeros: of unknown length, unless all have the same."""
        rows = tf.random.uniform([], 1, 2, tf.int32) if self.rows is None else self.rows
        return self.element(*self.pack(self.example(rows)))

    def element(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """The element of these parts that Keras's `fit` gives `train_step`: of a dataset, as its own are."""
        if self._length > 1:
            return (x, y, sample_weight)[: self._length if sample_weight is None else 3]
        if self._length == 1:
            return (x,)
        return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)

    def pack(self, batch: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """x, y and sample_weight of a batch; None for what there is not."""
        x, y, weight = (
            None if part is None else keras.tree.pack_sequence_as(part, [batch.get(key) for key in _flat(name, part)])
            for name, part in zip(_PARTS, self._parts, strict=True)
        )
        return x, y, weight


def flatten(element: Any) -> dict[str, Any]:
    """x, y and sample_weight as one dict, see `Structure`, without inputs that are None."""
    leaves = [_flat(name, part).items() for name, part in zip(_PARTS, _split(element), strict=True)]
    return {key: leaf for part in leaves for key, leaf in part if leaf is not None}


def inner_sizes(leaf: Any) -> list[int | None]:
    """Sizes of the axes but the first; of an unknown number, one that is unknown."""
    shape = tf.TensorShape(leaf.shape)
    return [None] if shape.rank is None else shape[1:].as_list()


def _dtype(leaf: Any) -> tf.DType:
    return tf.string if getattr(leaf.dtype, "kind", "") == "U" else tf.as_dtype(leaf.dtype)


def _split(element: Any) -> tuple[Any, Any, Any]:
    if not isinstance(element, tuple):
        return element, None, None
    if not 1 <= len(element) <= len(_PARTS):
        raise UsageError(f"data for fit is x, (x, y) or (x, y, sample_weight); got a tuple of {len(element)}")
    x, y, sample_weight = (*element, None, None)[:3]
    return x, y, sample_weight


def _flat(name: str, part: Any) -> dict[str, Any]:
    return {"/".join((name, *map(str, path))): leaf for path, leaf in keras.tree.flatten_with_path(part)}


def as_tuple(element: Any) -> Any:
    """The list that PyTorch puts (x, y) in, as a tuple."""
    return tuple(element) if isinstance(element, list) else element


def as_arrays(element: Any, *, role: str) -> tuple[Any, Any, Any]:
    """(x, y, sample_weight) with every leaf a NumPy array; data frames, series, lists of numbers and tensors are taken.

    Floating point becomes float32 and text becomes strings, as Keras has it.
    """
    x, y, weight = (_arrays_of(f"{role} {name}", part) for name, part in zip(_PARTS, _split(element), strict=True))
    lengths = {key: len(leaf) for key, leaf in flatten((x, y, weight)).items()}
    if len(set(lengths.values())) > 1:
        instead = "; what is validated on is given as validation=(x_val, y_val)" if role == "training" else ""
        raise UsageError(f"{role} data: x, y and sample_weight must be of one length, got {lengths}{instead}")
    return x, y, weight


def _arrays_of(name: str, part: Any) -> Any:
    if part is None:
        return None
    if isinstance(part, list) and all(isinstance(number, _NUMBERS) for number in keras.tree.flatten(part)):
        try:
            part = np.asarray(part)
        except ValueError as error:
            raise UsageError(f"{name}: lists of numbers must be of one length: {error}") from None
    return keras.tree.map_structure(lambda leaf: _array(name, leaf), part)


def _array(name: str, leaf: Any) -> np.ndarray | None:
    if leaf is None and name.endswith("x"):  # of an Input(optional=True)
        return None
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    for method in ("to_numpy", "toarray", "numpy"):  # of data frames and series; of sparse arrays; of tensors
        if hasattr(leaf, method):
            leaf = getattr(leaf, method)()
            break
    array = np.asarray(leaf)
    if array.dtype == object and all(isinstance(item, str | bytes) for item in array.flat):
        array = array.astype(str)
    if array.dtype == object or not array.ndim:
        raise UsageError(
            f"{name}: expected an array, a data frame or a tensor whose first axis is the examples, got "
            f"{type(leaf).__name__}{f' of shape {array.shape}' if array.ndim else ''}; columns of several types go in "
            "as a dict of columns: dict(frame)"
        )
    return array.astype(np.float32) if array.dtype in (np.float64, np.float16) else array


def split_off(arrays: tuple[Any, Any, Any], share: float) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Training and validation arrays: the last `share` of the examples, as `validation_split` of Keras's fit."""
    size = len(next(iter(flatten(arrays).values())))
    first = math.floor(size * (1.0 - share)) if 0 < share < 1 else 0
    if not 0 < first < size:
        raise UsageError(f"validation_split = {share} of {size} examples: must leave some on both sides")

    def part(rows: slice) -> tuple[Any, Any, Any]:
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], arrays)

    return part(slice(first)), part(slice(first, None))

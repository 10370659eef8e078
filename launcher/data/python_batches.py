"""Batches that Python makes, as `tf.data`: a Keras PyDataset, generators, and whatever else gives batches in turn.

A PyDataset has any batch by its number. What is iterated over, such as PyTorch's DataLoader, is begun again for each
epoch. A generator can be read once, unless a function that returns it is given. Where a run goes on from the middle,
the batches before are made once more and left out, in the order in which Python gives them; of a PyDataset nothing but
`on_epoch_end` is called.
"""

import collections
import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.data.order import shuffled
from launcher.data.pipeline import held
from launcher.data.structure import Structure, as_arrays, as_tuple, flatten
from launcher.errors import UsageError

_HOOKS = ("on_epoch_begin", "on_epoch_end")
_PEEKED = 2  # batches, as Keras does, to find out which sizes differ
_KEPT = 8  # of a generator: what a look at its first batches has read is trained on all the same


def is_python(source: Any) -> bool:
    """Whether data is batches that Python makes, rather than arrays or a dataset of TensorFlow's."""
    if isinstance(source, keras.utils.PyDataset):
        return True
    has_values = any(hasattr(source, name) for name in ("__array__", "to_numpy", "numpy", "shape"))
    return hasattr(source, "__iter__") and not isinstance(source, tuple | list | dict | str | bytes) and not has_values


class PythonBatches:
    """Batches of a source for which `is_python` holds.

    Args:
      source: what gives the batches.
      again: makes it anew; None where there is but this one.
      role: "training" or "validation", for messages.

    Attributes:
      batch_size: of the first batch.
      element_spec: of the dicts.
      structure: how they are put together.
      reads_again: whether finding a batch takes reading all before it, in TensorFlow.
      reads_once: whether a batch of an earlier epoch is gone.
    """

    name, reads_again = "Python", False

    def __init__(self, source: Any, again: Callable[[], Any] | None, role: str):
        self._source, self._again, self._role = source, again, role
        self._kind = type(source).__name__
        self._is_indexed = isinstance(source, keras.utils.PyDataset)
        self._has_hooks = any(
            getattr(type(source), hook, None) is not getattr(keras.utils.PyDataset, hook, None) for hook in _HOOKS
        )
        self._once = _Once(source, role) if again is None and hasattr(source, "__next__") else None
        self.reads_once = self._once is not None or (again is None and self._is_indexed and self._has_hooks)
        self._epoch = 0  # of a PyDataset that is told of epochs
        try:
            self._num_batches: int | None = source.num_batches if self._is_indexed else len(source)
        except (TypeError, NotImplementedError):
            self._num_batches = None
        peeked = [*itertools.islice(self._from_first(), _PEEKED)]
        if not peeked:
            raise UsageError(f"the {role} {self._kind} gives no batches")
        parts = self._as_arrays(peeked[0])
        first, other = flatten(parts), flatten(self._as_arrays(peeked[-1]))
        self.batch_size = len(next(iter(first.values())))
        self.element_spec = {
            key: tf.TensorSpec(
                [None, *(size if size == also else None for size, also in _sizes(leaf, other.get(key)))],
                tf.string if leaf.dtype.kind == "U" else leaf.dtype,
            )
            for key, leaf in first.items()
        }
        specs = iter(self.element_spec.values())
        element = keras.tree.map_structure(lambda leaf: None if leaf is None else next(specs), parts)
        self.structure = Structure(element, lambda: next(held(self.endless())))

    @property
    def note(self) -> str:
        """The ground that the order of the batches rests on."""
        if self._is_indexed:
            return (
                f"every worker has the whole {self._kind} and takes its rows of each batch; a restart calls "
                "on_epoch_end again for each epoch that has ended: exact if batches depend on that and their numbers"
            )
        return (
            f"every worker reads the whole {self._kind} and takes its rows of each batch; a restart reads it again up "
            "to the step: exact if it gives the same batches each time"
        )

    def count(self, argument: str) -> int:
        """Batches of an epoch; UsageError where the source does not tell, and the argument that says it."""
        if self._num_batches is None:
            raise UsageError(f"the {self._role} data does not say how many batches it has: say so with {argument}")
        return self._num_batches

    def first(self, count: int | None) -> tf.data.Dataset:
        """So many batches, or those of an epoch, the same ones each time."""
        batches = self.endless().take(count or self.count("validation_steps"))
        if self._once is None:
            return batches
        kept = [*batches.as_numpy_iterator()]
        return tf.data.Dataset.from_generator(lambda: iter(kept), output_signature=self.element_spec)

    def endless(self, start: int = 0, *, shuffle: bool = False, seed: int = 0) -> tf.data.Dataset:
        """Dicts without end, from batch `start` on; with `shuffle`, a PyDataset's in another order in each epoch."""

        def batches() -> Iterator[dict[str, np.ndarray]]:
            for element in self._elements(start, shuffle=shuffle, seed=seed):
                yield flatten(self._as_arrays(element))

        return tf.data.Dataset.from_generator(batches, output_signature=self.element_spec)

    def _as_arrays(self, element: Any) -> Any:
        return as_arrays(as_tuple(element), role=self._role)

    def _from_first(self) -> Iterator[Any]:
        """A look at the first batches, of which a PyDataset is not told."""
        if self._once is not None:
            return self._once.begin(_PEEKED)
        if not self._is_indexed:
            return iter(self._source)
        return (self._source[number] for number in range(_PEEKED if self._num_batches is None else self._num_batches))

    def _elements(self, start: int, *, shuffle: bool, seed: int) -> Iterator[Any]:
        if self._once is not None:
            return self._once.read(start)
        if self._is_indexed:
            return self._by_number(start, shuffle, seed)
        return itertools.islice(self._in_turn(), start, None)

    def _in_turn(self) -> Iterator[Any]:
        source = self._source if self._again is None else self._again()
        while True:
            is_empty = True
            for element in source:
                is_empty = False
                yield element
            if is_empty:
                return
            source = source if self._again is None else self._again()

    def _by_number(self, start: int, shuffle: bool, seed: int) -> Iterator[Any]:
        size = self._num_batches
        dataset, epoch = self._source, 0 if size is None else start // size
        if self._has_hooks:
            dataset, before = (self._source, self._epoch) if self._again is None else (self._again(), 0)
            if epoch < before:
                raise UsageError(
                    f"this {self._kind} cannot go back to epoch {epoch + 1}: give a function that returns it"
                )
            for _ in range(before, epoch):
                self._tell(dataset, "on_epoch_end")
        with concurrent.futures.ThreadPoolExecutor(max(1, getattr(dataset, "workers", 1) or 1)) as pool:
            while True:
                first = start if size is None else start % size
                order: Any = itertools.count(first)
                if size is not None:
                    order = range(first, size)
                    if shuffle:
                        positions = tf.range(epoch * size + first, (epoch + 1) * size, dtype=tf.int64)
                        order = shuffled(positions, seed=seed, size=size)[1].numpy().tolist()
                self._tell(dataset, "on_epoch_begin")
                yield from _ahead(pool, dataset, iter(order))
                self._tell(dataset, "on_epoch_end")
                epoch, start = epoch + 1, 0
                if self._has_hooks and self._again is None:
                    self._epoch = epoch

    def _tell(self, dataset: Any, hook: str) -> None:
        if self._has_hooks and hasattr(dataset, hook):
            getattr(dataset, hook)()


def _sizes(first: np.ndarray, other: np.ndarray | None) -> Iterator[tuple[int, int | None]]:
    return itertools.zip_longest(first.shape[1:], first.shape[1:] if other is None else other.shape[1:])


def _ahead(pool: concurrent.futures.Executor, dataset: Any, order: Iterator[int]) -> Iterator[Any]:
    """Batches in their order, of which as many are made ahead as the dataset allows."""
    workers = max(1, getattr(dataset, "workers", 1) or 1)
    ahead = workers if workers == 1 else max(workers, min(getattr(dataset, "max_queue_size", 10), 4 * workers))
    futures = collections.deque(pool.submit(dataset.__getitem__, number) for number in itertools.islice(order, ahead))
    while futures:
        batch = futures.popleft().result()
        futures.extend(pool.submit(dataset.__getitem__, number) for number in itertools.islice(order, 1))
        yield batch


class _Once:
    """Batches of a generator by number; only the last few can be had again."""

    def __init__(self, source: Iterator[Any], role: str):
        self._source, self._role = source, role
        self._kept: collections.deque[Any] = collections.deque(maxlen=_KEPT)
        self._read = 0
        self._lock = threading.Lock()

    def begin(self, count: int) -> Iterator[Any]:
        """The first ones, so many or as there are; before anything else is read."""
        self._kept.extend(itertools.islice(self._source, count))
        self._read = len(self._kept)
        return iter([*self._kept])

    def read(self, start: int) -> Iterator[Any]:
        """The batches from number `start` on; UsageError where they are no longer there, or there are no more."""
        for number in itertools.count(start):
            with self._lock:
                if number < self._read - len(self._kept):
                    raise UsageError(
                        f"the {self._role} generator cannot be read again: give a function that returns it"
                    )
                while self._read <= number:
                    try:
                        self._kept.append(next(self._source))
                    except StopIteration:
                        raise UsageError(
                            f"the {self._role} generator ended after {self._read} batches, and more are asked for: let "
                            "it go on without end, or give a function that returns it"
                        ) from None
                    self._read += 1
                batch = self._kept[number - self._read]
            yield batch

"""Batches of a process's replicas, as NumPy arrays on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from launcher.data.pipeline import WEIGHT


@dataclasses.dataclass(frozen=True)
class InTurn:
    """Batches for `replicas` of this process: of one after the other, or the real rows of a global one, divided.

    Attributes:
      divided_by: replicas of all processes, where the dataset's batches are global ones.
    """

    dataset: tf.data.Dataset
    replicas: range
    divided_by: int | None = None

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        spec = self.dataset.element_spec
        if self.divided_by is None:
            return spec
        share = math.gcd(spec[WEIGHT].shape[0], self.divided_by)
        return {key: tf.TensorSpec([one.shape[0] // share, *one.shape[1:]], one.dtype) for key, one in spec.items()}

    def __iter__(self) -> _Turns:
        return _Turns(iter(self.dataset), self, self.dataset.element_spec)


@dataclasses.dataclass(frozen=True)
class _Turns:
    parts: tf.data.Iterator
    batches: InTurn
    of_dataset: dict[str, tf.TensorSpec]

    def __iter__(self) -> _Turns:
        return self

    @property
    def element_spec(self) -> dict[str, tf.TensorSpec]:
        return self.batches.element_spec

    def __next__(self) -> list[dict[str, np.ndarray]]:
        if self.batches.divided_by is None:
            return [self._taken() for _ in self.batches.replicas]
        return _divided(self._taken(), self.batches.replicas, self.batches.divided_by)

    def _taken(self) -> dict[str, np.ndarray]:
        return dict(zip(self._names, map(np.asarray, self._take()), strict=True))

    @functools.cached_property
    def _names(self) -> list[str]:
        return sorted(self.of_dataset)

    @functools.cached_property
    def _take(self) -> Callable[[], Sequence[tf.Tensor]]:
        """What `next` calls, which takes three times as long as this by putting the structure together."""
        (resource,) = tf.nest.flatten(self.parts, expand_composites=True)
        specs = [self.of_dataset[name] for name in self._names]
        given = {"output_types": [one.dtype for one in specs], "output_shapes": [one.shape for one in specs]}
        return functools.partial(tf.raw_ops.IteratorGetNext, iterator=resource, **given)


def _divided(batch: dict[str, np.ndarray], replicas: range, num_replicas: int) -> list[dict[str, np.ndarray]]:
    """The real rows of a global batch for these replicas, as many for each, since they run one program.

    Those that all replicas together do not divide are divided by fewer. The others have the same rows as these, and
    weigh nothing: what is averaged over replicas, as moving statistics, is what it would be without them.
    """
    real = np.flatnonzero(batch[WEIGHT])
    if len(real) < len(batch[WEIGHT]):
        batch = {key: value[real] for key, value in batch.items()}
    count = math.gcd(len(real), num_replicas)
    size, alike = len(real) // count, num_replicas // count
    parts = []
    for replica in replicas:
        begin = replica // alike * size
        part = {key: value[begin : begin + size] for key, value in batch.items()}
        parts.append(part if replica % alike == 0 else part | {WEIGHT: np.zeros_like(part[WEIGHT])})
    return parts

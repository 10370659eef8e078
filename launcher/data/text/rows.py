"""Rows of tokens that are made once, kept in the data directory and served from there in batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import tensorflow as tf

from launcher.data.pipeline import Batch, RandomAccessData
from launcher.data.text import mapped, storage
from launcher.data.text.storage import Arrays, Built

_TRAIN, _HELD_OUT = "train.", "held_out."


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is stored of a data set.

    Attributes:
      batches: of the training and the held-out rows.
      arrays: everything that is stored, memory-mapped, by its key.
      facts: numbers stored with them.
    """

    batches: RandomAccessData
    arrays: Arrays
    facts: Mapping[str, float]


def split(train: Arrays, held_out: Arrays) -> Arrays:
    """Both parts under the keys that `open_rows` finds them by; `held_out` may be empty."""
    return {
        **{f"{_TRAIN}{key}": array for key, array in train.items()},
        **{f"{_HELD_OUT}{key}": array for key, array in held_out.items()},
    }


def open_rows(
    name: str,
    version: str,
    make: Callable[[], Built],
    *,
    finish: Callable[[Batch], Batch],
    memory_limit_bytes: int,
) -> Rows:
    """The rows of data set `name`, made by `make` if they are not stored yet.

    Args:
      name: for the folder, with the version.
      version: `storage.digest` of all that the rows depend on.
      make: gives `split` arrays, others beside them if need be, and facts.
      finish: what is left to do to a batch of stored rows.
      memory_limit_bytes: parts that take more stay on disk.

    Raises:
      UsageError: the data directory cannot be written.
    """
    arrays, facts = storage.stored_rows(storage.folder() / f"{storage.file_name(name)}-{version}", make)
    train, held_out = (
        {key.removeprefix(part): array for key, array in arrays.items() if key.startswith(part)}
        for part in (_TRAIN, _HELD_OUT)
    )
    batches = RandomAccessData(
        train=mapped.examples(train, memory_limit_bytes),
        evaluation=mapped.examples(held_out, memory_limit_bytes) if held_out else None,
        finish=finish,
    )
    return Rows(batches, arrays, facts)


def segments(tokens: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Numbers the sequences of each row from 1; 0 is padding. All int32 [b, length]."""
    real = tokens != 0
    return tf.where(real, tf.cumsum(tf.cast(real & (positions == 0), tf.int32), axis=1), 0)

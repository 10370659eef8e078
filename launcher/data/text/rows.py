"""Texts as rows of tokens: made once, kept in the data directory and served from there in batches."""

import abc
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
import tensorflow as tf

from launcher.data.batch_spec import BatchSpec
from launcher.data.pipeline import ArrayExamples, Batch, Examples, RandomAccessData, Shard
from launcher.data.text import storage, vocabulary
from launcher.data.text.source import Source
from launcher.data.text.storage import Arrays, Built

_FORMAT = 1  # of the stored rows
_TRAIN, _HELD_OUT = "train.", "held_out."

Item = TypeVar("Item")


class TextRows(abc.ABC, Generic[Item]):
    """Texts as batches of token rows: `Data`, with the vocabulary that is trained on them.

    Nothing is read before it is asked for. A subclass says what a row holds. Messages name the `binding`.
    """

    row_length: int  # tokens
    _keys: Sequence[str]  # what a batch has a row of tokens, or of numbers of tokens, of
    _layout: tuple[int, ...]  # what the stored rows depend on, beside the texts and the size of the vocabulary

    def __init__(self, source: Source[Item], *, binding: str, vocab_size: int, memory_limit_bytes: int):
        vocabulary.check_size(vocab_size, f"{binding}.vocab_size")
        self.name = source.name
        self.details: str = getattr(source, "details", "")
        self.vocab_size = vocab_size
        self.source = source
        self._binding = binding
        self._memory_limit_bytes = memory_limit_bytes
        self._checked = False

    @abc.abstractmethod
    def _texts(self) -> Iterator[str]:
        """The texts that the vocabulary is trained on."""

    @abc.abstractmethod
    def _make(self) -> Built:
        """The rows as they are stored, see `split`, and facts."""

    @abc.abstractmethod
    def _finish(self, stored: Batch) -> Batch:
        """A batch of stored rows as a task gets it."""

    def _tell(self, facts: Mapping[str, float]) -> None:
        """Called once, when the rows are opened: what a person should know of them."""

    def check(self) -> None:
        """Raises UsageError where a package is missing or the data set is not prepared. Reads no text."""
        vocabulary.module(self._binding)
        self.source.check()
        self._checked = True

    @property
    def num_train_examples(self) -> int | None:
        """Rows of an epoch; None before `check()`: how many there are is known when they are packed."""
        return self._batches.num_train_examples if self._checked else None

    @property
    def num_eval_examples(self) -> int | None:
        """Rows of one evaluation; None before `check()` or if there are none."""
        return self._batches.num_eval_examples if self._checked else None

    def batch_spec(self, size: int) -> BatchSpec:
        """See `launcher.data.batch_spec`."""
        rows_spec = tf.TensorSpec([size, self.row_length], tf.int32)
        return {**dict.fromkeys(self._keys, rows_spec), "weight": tf.TensorSpec([size], tf.float32)}

    def identity(self) -> str:
        return storage.digest(self._digest, self.vocab_size, *self._layout, _FORMAT)

    def train_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._batches.train_batches(shard)

    def eval_batches(self, shard: Shard) -> tf.data.Dataset:
        return self._batches.eval_batches(shard)

    @functools.cached_property
    def _digest(self) -> str:
        return self.source.digest()

    @functools.cached_property
    def vocabulary(self) -> vocabulary.Vocabulary:
        """Trained on the training texts when it is first asked for."""
        return vocabulary.cached_vocabulary(self.name, self._digest, size=self.vocab_size, texts=self._texts)

    @functools.cached_property
    def _stored(self) -> Built:
        """The rows, made if they are not stored yet; raises UsageError where the data directory cannot be written."""
        folder = storage.folder() / f"{storage.file_name(self.name)}-{self.identity()}"
        return storage.stored_rows(folder, self._make)

    @functools.cached_property
    def _batches(self) -> RandomAccessData:
        arrays, facts = self._stored
        train, held_out = (
            {key.removeprefix(part): array for key, array in arrays.items() if key.startswith(part)}
            for part in (_TRAIN, _HELD_OUT)
        )
        self._tell(facts)
        return RandomAccessData(
            train=self._examples(train), evaluation=self._examples(held_out) if held_out else None, finish=self._finish
        )

    def _examples(self, arrays: Arrays) -> Examples:
        """Rows held in memory if they take no more than `memory_limit_bytes`, else left on disk."""
        if sum(array.nbytes for array in arrays.values()) > self._memory_limit_bytes:
            return MappedExamples(arrays)
        return ArrayExamples({key: np.array(array) for key, array in arrays.items()})


def blocks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of up to `size` items, one after another."""
    items = iter(items)
    while block := list(itertools.islice(items, size)):
        yield block


def split(train: Arrays, held_out: Arrays) -> Arrays:
    """Both parts under the keys that they are stored by; `held_out` may be empty."""
    return {
        **{f"{_TRAIN}{key}": array for key, array in train.items()},
        **{f"{_HELD_OUT}{key}": array for key, array in held_out.items()},
    }


class MappedExamples(ArrayExamples):
    """Examples in memory-mapped arrays [n, ...], of which large ones stay on disk: what is fetched is read."""

    def __init__(self, arrays: Arrays):
        super().__init__(arrays)
        size = sum(array.nbytes for array in arrays.values())
        self.stays_here = f"raise memory_limit_bytes of text_corpus or text_pairs to {size}, to hold its rows"


def segments(tokens: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Numbers the sequences of each row from 1; 0 is padding. All int32 [b, length]."""
    real = tokens != 0
    return tf.where(real, tf.cumsum(tf.cast(real & (positions == 0), tf.int32), axis=1), 0)

"""Sentences and their translations, bound by gin: a `text_pairs.source` of any kind, or `text_pairs.name`.

    tfds:NAME             any TFDS translation set: tfds:wmt14_translate/de-en
    tsv:GLOB              own files, two columns of each line a pair
    jsonl:GLOB            own files, the fields jsonl_pairs.source_language and target_language of each line a pair

Training batches are {"source", "target_in", "target_out": int32 [b, row_length], "weight": float32 [b]} and, when
packed, "source_segments", "source_positions", "target_segments" and "target_positions" of the same shape. A source
ends with END; `target_in` is BEGIN and the target, `target_out` the target and END; what is empty is 0. Segments count
from 1 in each row and are the same for a source and its target; positions count from 0 in each sequence. What is
predicted is `target_out` wherever it is not 0.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping

import gin
import numpy as np
import tensorflow as tf
from absl import logging

from launcher.config.bound_types import check_value
from launcher.data.pipeline import Batch
from launcher.data.text import packing, rows, storage
from launcher.data.text.packing import Sequences
from launcher.data.text.patterns import JsonlPairs, Pair, TsvPairs
from launcher.data.text.source import Source, chosen
from launcher.data.text.tfds_text import TfdsPairs
from launcher.data.text.vocabulary import BEGIN, END
from launcher.errors import UsageError

_BLOCK = 10_000
_SIDES = ("source", "target")
_STORED = ("source", "source_positions", "target", "target_positions")
_KINDS = {"tsv:": TsvPairs, "jsonl:": JsonlPairs, "tfds:": TfdsPairs}


@gin.configurable("text_pairs")
class TextPairs(rows.TextRows[Pair]):
    """Pairs of texts by name or from a source, as tokens. Reads and trains nothing: that happens with the first batch.

    Args:
      source: where pairs come from, such as `@tfds_pairs()`, or a class of yours, as in gin_configs/data.
      name: in place of a source: "tfds:NAME", "tsv:GLOB" or "jsonl:GLOB".
      vocab_size: token ids, one vocabulary for both sides.
      max_length: tokens of the longest source or target, with its end. Longer pairs are left out of training and cut
        in evaluation.
      packed: several pairs share a row.
      row_length: tokens of a packed row, if more than `max_length`.
      memory_limit_bytes: rows that take more stay on disk.
    """

    def __init__(
        self,
        source: Source[Pair] | None = None,
        *,
        name: str | None = None,
        vocab_size: int = gin.REQUIRED,
        max_length: int = gin.REQUIRED,
        packed: bool = True,
        row_length: int | None = None,
        memory_limit_bytes: int = 2 * 1024**3,
    ):
        source = chosen("text_pairs", name, source, _KINDS, ["tfds:wmt14_translate/de-en"])
        super().__init__(source, binding="text_pairs", vocab_size=vocab_size, memory_limit_bytes=memory_limit_bytes)
        row_length = max_length if row_length is None else row_length
        check_value("text_pairs.max_length", max_length, max_length >= 2, "2 or more: one token, and the end")
        if row_length < max_length or (row_length > max_length and not packed):
            raise UsageError(f"text_pairs.row_length = {row_length}: must be {max_length}, or more if packed")
        self.max_length = max_length
        self.row_length = row_length
        self.packed = packed
        parts = ("segments", "positions") if packed else ()
        self._keys = ("source", "target_in", "target_out", *(f"{side}_{part}" for side in _SIDES for part in parts))
        self._layout = (max_length, row_length, packed)

    @functools.cached_property
    def eval_pairs(self) -> list[Pair]:
        """The held-out (source, target) texts, whole, in their order."""
        return list(self.source.held_out())

    def _texts(self) -> Iterator[str]:
        return itertools.chain.from_iterable(self.source.train())

    def _tell(self, facts: Mapping[str, float]) -> None:
        if facts["dropped"]:
            logging.warning(
                "%s: %d of %d training pairs are longer than text_pairs.max_length = %d and left out",
                self.name, facts["dropped"], facts["pairs"], self.max_length,
            )  # fmt: skip

    def _make(self) -> storage.Built:
        train, dropped = self._sequences(self.source.train(), cut=False)
        total = len(train[0]) + dropped
        if not len(train[0]):
            raise UsageError(f"no pair of {self.name!r} fits text_pairs.max_length = {self.max_length}; raise it")
        held_out, _ = self._sequences(self.eval_pairs, cut=True)
        arrays = rows.split(self._filled(train), self._filled(held_out) if len(held_out[0]) else {})
        return arrays, {"dropped": dropped, "pairs": total}

    def _sequences(self, pairs: Iterable[Pair], *, cut: bool) -> tuple[list[Sequences], int]:
        """Both sides of the pairs, and how many are left out; those that are too long are, or are cut."""
        limit, dropped = self.max_length - 1, 0

        def kept() -> Iterator[list[Sequences]]:
            nonlocal dropped
            for block in rows.blocks(pairs, _BLOCK):
                sides = [self.vocabulary.sequences(side) for side in zip(*block, strict=True)]
                fits = np.flatnonzero(cut | (np.maximum(*(side.lengths for side in sides)) <= limit))
                dropped += len(block) - len(fits)
                yield [side.select(fits).ended(limit, END) for side in sides]

        kinds = packing.joined(kept(), packing.token_dtype(self.vocab_size))
        return kinds, dropped

    def _filled(self, kinds: list[Sequences]) -> dict[str, np.ndarray]:
        """The rows as they are stored; `_finish` makes the rest of them."""
        sides = packing.filled(kinds, self.row_length, packed=self.packed)
        return dict(zip(_STORED, itertools.chain.from_iterable(sides), strict=True))

    def _finish(self, stored: Batch) -> Batch:
        batch = {key: tf.cast(value, tf.int32) for key, value in stored.items()}
        target, starts = batch.pop("target"), batch["target_positions"] == 0
        before = tf.where(starts, BEGIN, tf.roll(target, 1, axis=1))
        batch |= {"target_in": tf.where(target == 0, 0, before), "target_out": target}
        for name, row in (("source", batch["source"]), ("target", target)):
            positions = batch.pop(f"{name}_positions")
            if self.packed:
                batch |= {f"{name}_segments": rows.segments(row, positions), f"{name}_positions": positions}
        return batch

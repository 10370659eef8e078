"""Running text for language models, bound by gin: a `text_corpus.source` of any kind, or `text_corpus.name`.

    tfds:NAME             any TFDS set with a text: tfds:lm1b
    lines:GLOB            own files, each line a document
    jsonl:GLOB            own files, the field jsonl_corpus.text_feature of each line a document

Batches are {"tokens", "targets", "segments", "positions": int32 [b, length], "weight": float32 [b]}. A document is
BEGIN, its tokens and END, cut into pieces of at most `length` predictions, one segment each; short ones share a row.
Token t of a segment predicts target t, the next token of the document. What is predicted is `targets` wherever it is
not 0: of held-out text, every token and every END exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import gin
import numpy as np
import tensorflow as tf

from launcher.config.bound_types import check_value
from launcher.data.pipeline import Batch
from launcher.data.text import packing, rows, storage
from launcher.data.text.packing import Sequences
from launcher.data.text.patterns import JsonlCorpus, LinesCorpus
from launcher.data.text.source import Source, chosen
from launcher.data.text.tfds_text import TfdsCorpus
from launcher.data.text.vocabulary import BEGIN, END
from launcher.errors import UsageError

_BLOCK = 1_000
_KINDS = {"lines:": LinesCorpus, "jsonl:": JsonlCorpus, "tfds:": TfdsCorpus}


@gin.configurable("text_corpus")
class TextCorpus(rows.TextRows[str]):
    """Running text by name or from a source, as tokens. Reads and trains nothing: that happens with the first batch.

    Args:
      source: where documents come from, such as `@tfds_corpus()`, or a class of yours, as in gin_configs/data.
      name: in place of a source: "tfds:NAME", "lines:GLOB" or "jsonl:GLOB".
      vocab_size: token ids.
      length: tokens of a row.
      eval_context: tokens that a held-out piece repeats from the piece before it, to read and not to predict: more of
        them give every prediction more to go by, and take longer.
      memory_limit_bytes: rows that take more stay on disk.
    """

    def __init__(
        self,
        source: Source[str] | None = None,
        *,
        name: str | None = None,
        vocab_size: int = gin.REQUIRED,
        length: int = gin.REQUIRED,
        eval_context: int = 0,
        memory_limit_bytes: int = 2 * 1024**3,
    ):
        source = chosen("text_corpus", name, source, _KINDS, ["tfds:lm1b"])
        super().__init__(source, binding="text_corpus", vocab_size=vocab_size, memory_limit_bytes=memory_limit_bytes)
        check_value("text_corpus.length", length, length >= 2, "2 or more")
        if not 0 <= eval_context < length:
            raise UsageError(f"text_corpus.eval_context = {eval_context} must be from 0 to length - 1 = {length - 1}")
        self.length = self.max_length = self.row_length = length
        self._eval_context = eval_context
        self._layout = (length, eval_context)

    _keys = ("tokens", "targets", "segments", "positions")

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of the held-out documents for each token predicted of them, their ENDs among these, exact.

        Bits per byte are the mean loss in nats / ln 2 / `bytes_per_token`. No byte is counted for an END.
        """
        _, facts = self._stored
        if not facts["held_out_tokens"]:
            raise UsageError(f"text_corpus.name = {self.name!r} has no held-out text")
        return facts["held_out_bytes"] / facts["held_out_tokens"]

    def _texts(self) -> Iterator[str]:
        return self.source.train()

    def _make(self) -> storage.Built:
        train, _ = self._packed(self.source.train(), context=0)
        if not train:
            raise UsageError(f"{self.name!r} has no training text")
        held_out, size = self._packed(self.source.held_out(), context=self._eval_context)
        predicted = int(np.count_nonzero(held_out["targets"])) if held_out else 0
        return rows.split(train, held_out), {"held_out_bytes": size, "held_out_tokens": predicted}

    def _finish(self, stored: Batch) -> Batch:
        batch = {key: tf.cast(value, tf.int32) for key, value in stored.items()}
        return {**batch, "segments": rows.segments(batch["tokens"], batch["positions"])}

    def _packed(self, texts: Iterable[str], *, context: int) -> tuple[dict[str, np.ndarray], int]:
        """The rows as they are stored, none if there are no texts, and the texts' UTF-8 bytes."""
        size = 0

        def pieces() -> Iterator[tuple[Sequences, Sequences]]:
            nonlocal size
            for block in rows.blocks(texts, _BLOCK):
                size += sum(len(text.encode()) for text in block)
                yield cut(self.vocabulary.sequences(block), length=self.length, context=context)

        kinds = packing.joined(pieces(), packing.token_dtype(self.vocab_size))
        if not len(kinds[0]):
            return {}, 0
        (tokens, positions), (targets, _) = packing.filled(kinds, self.length)
        return {"tokens": tokens, "targets": targets, "positions": positions}, size


def cut(documents: Sequences, *, length: int, context: int) -> tuple[Sequences, Sequences]:
    """The pieces of documents, of at most `length` each: tokens, the first of all BEGIN, and targets, the last END.

    A piece repeats `context` tokens from the end of the one before; their targets are 0.
    """
    starts, step = documents.starts, length - context
    read = np.insert(documents.tokens, starts, BEGIN)
    targets = np.insert(documents.tokens, starts + documents.lengths, END)
    lengths = documents.lengths + 1
    count = 1 + -(-np.maximum(lengths - length, 0) // step)
    before = packing.ranges(np.zeros_like(count), count) * step  # tokens of the document before the piece
    sizes = np.minimum(np.repeat(lengths, count) - before, length)
    places = packing.ranges(np.repeat(starts + np.arange(len(documents)), count) + before, sizes)
    pieces, predicted = Sequences(read[places], sizes), Sequences(targets[places], sizes)
    predicted.tokens[packing.ranges(pieces.starts, (before > 0) * context)] = 0
    return pieces, predicted

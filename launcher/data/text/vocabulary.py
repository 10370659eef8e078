"""Subword vocabularies: trained by sentencepiece on the training text alone, kept in the data directory.

    vocabulary = cached_vocabulary("spoken_numbers", digest, size=2000, texts=lambda: lines)
    vocabulary.decode(vocabulary.encode(["any text at all"])) == ["any text at all"]

Nothing is normalised and bytes stand in for rare characters: every text comes back as it was, no token is unknown.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from launcher.data.text import storage
from launcher.data.text.packing import Sequences
from launcher.errors import UsageError
from launcher.machine import installation

PADDING, UNKNOWN, BEGIN, END = 0, 1, 2, 3

# The four above, the line break and one a byte.
_SPECIAL = 4 + 1 + 256

# Texts that a vocabulary is trained on at most: more change nothing but the time it takes.
_MAX_TEXTS = 2_000_000

# Sentencepiece leaves longer lines out; it means bytes.
_MAX_LINE_BYTES = 16_384

# Sentencepiece writes a space as U+2581 and would read one back as a space. SUB, which no text has, escapes both.
SPACE_MARK, ESCAPE = "\u2581", "\x1a"

# What no token spans, for those of sentencepiece begin with spaces or have none, and a line break is one by itself: a
# word with the spaces before it. Words come again and again, and each is encoded once.
_WORD = re.compile(r"\n| *[^ \n]+| +")
_MAX_WORDS = 2**18


def module(binding: str = "a subword vocabulary") -> types.ModuleType:
    """The module `sentencepiece`; raises UsageError, in which `binding` is named, where it is missing."""
    return installation.required("sentencepiece", by=binding, extra="text")


class Vocabulary:
    """Text to token ids and back, by sentencepiece. Ids 0 to 3 are padding, unknown (never used), begin and end."""

    def __init__(self, model_bytes: bytes):
        self.model_bytes = model_bytes
        self._words: _Words | None = None

    @functools.cached_property
    def processor(self) -> Any:
        """The `sentencepiece.SentencePieceProcessor`."""
        return module().SentencePieceProcessor(model_proto=self.model_bytes)

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.processor.get_piece_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without begin and end. Any text that UTF-8 can hold is encoded without loss."""
        return self.processor.encode([_escaped(text) for text in texts], num_threads=1)

    def sequences(self, texts: Sequence[str]) -> Sequences:
        """The ids that `encode` gives, several times as fast where many texts are encoded block by block."""
        if self._words is None or len(self._words.numbers) > _MAX_WORDS:
            self._words = _Words(self.processor)
        return self._words.sequences(texts)

    def decode(self, ids: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence up to its first END; padding and BEGIN are left out.

        Bytes that are not UTF-8, as a model may put them together, become U+FFFD.
        """
        rows = [_content(row) for row in ids]
        texts = self.processor.decode(rows) if rows else []
        return [text.replace(ESCAPE + "1", SPACE_MARK).replace(ESCAPE + "0", ESCAPE) for text in texts]

    @classmethod
    def train(cls, texts: Iterable[str], *, size: int) -> Vocabulary:
        """Byte-pair encoding of `texts` with `size` ids, special ones too; the same for the same texts in one order.

        Lines of one text are taken apart, and no token but the line break spans them.

        Raises:
          UsageError: `size` is too small for the characters of the texts, or larger than they give tokens for.
        """
        model = io.BytesIO()
        try:
            module().SentencePieceTrainer.train(
                sentence_iterator=iter(_lines(_thinned(texts, _MAX_TEXTS))),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                pad_id=PADDING,
                unk_id=UNKNOWN,
                bos_id=BEGIN,
                eos_id=END,
                byte_fallback=True,
                character_coverage=0.9995,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,  # the indentation of code
                user_defined_symbols=["\n"],
                max_sentence_length=_MAX_LINE_BYTES,
                num_threads=1,
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = str(error).rpartition("] ")[2]  # behind the place in sentencepiece's source
            raise UsageError(
                f"no vocabulary of vocab_size = {size} can be made from the training text: {reason}"
            ) from None
        return cls(model.getvalue())


class _Words:
    """Words with their ids, int32, as they were first seen."""

    def __init__(self, processor: Any):
        self._processor = processor
        self._line_break = processor.piece_to_id("\n")
        self.numbers: collections.defaultdict[str, int] = collections.defaultdict()
        self.numbers.default_factory = self.numbers.__len__
        self.numbers["\n"] = 0
        self._encoded = Sequences(np.array([self._line_break], np.int32), np.array([1]))

    def sequences(self, texts: Sequence[str]) -> Sequences:
        """See `Vocabulary.sequences`."""
        words = [_WORD.findall(" " + _escaped(text)) if text else [] for text in texts]
        numbers = np.fromiter(map(self.numbers.__getitem__, itertools.chain.from_iterable(words)), np.int64)
        self._encoded = self._encode(list(itertools.islice(self.numbers, len(self._encoded), None)))
        ends = np.cumsum([0, *map(len, words)])
        found = self._encoded.select(numbers)
        lengths = np.diff(np.cumsum(np.append(0, found.lengths))[ends])
        return Sequences(found.tokens, lengths)

    def _encode(self, words: list[str]) -> Sequences:
        # Behind a line break sentencepiece adds no space of its own. In long texts it takes longer for each word.
        parts = ["".join(f"\n{word}" for word in words[at : at + 64]) for at in range(0, len(words), 64)]
        tokens, lengths = [self._encoded.tokens], [self._encoded.lengths]
        for ids in map(np.array, self._processor.encode(parts, num_threads=1)):
            breaks = np.flatnonzero(ids == self._line_break)
            tokens.append(np.delete(ids, breaks)[breaks[0] :])
            lengths.append(np.diff(np.append(breaks, len(ids))) - 1)
        return Sequences(np.concatenate(tokens), np.concatenate(lengths))


def check_size(size: int, binding: str) -> None:
    """Raises UsageError for a size that no vocabulary can have."""
    if size <= _SPECIAL:
        raise UsageError(f"{binding} = {size} is too small: {_SPECIAL} ids are bytes and special ones; try 2000")


def cached_vocabulary(name: str, digest: str, *, size: int, texts: Callable[[], Iterable[str]]) -> Vocabulary:
    """The vocabulary of a data set, trained by the first who asks and kept in the data directory.

    The digest is of what its training text is made from; `texts` gives this if there is no such vocabulary yet.
    """
    key = storage.digest(digest, size, _MAX_TEXTS, _MAX_LINE_BYTES)
    path = storage.folder() / f"{storage.file_name(name)}-{size}-{key}.model"
    return Vocabulary(storage.stored_bytes(path, lambda: Vocabulary.train(texts(), size=size).model_bytes))


def _escaped(text: str) -> str:
    return text.replace(ESCAPE, ESCAPE + "0").replace(SPACE_MARK, ESCAPE + "1")


def _content(row: Sequence[int]) -> list[int]:
    ids = [int(token) for token in row]
    if END in ids:
        ids = ids[: ids.index(END)]
    return [token for token in ids if token not in (PADDING, BEGIN)]


def _lines(texts: Iterable[str]) -> Iterable[str]:
    for text in texts:
        for line in text.split("\n"):
            if line:
                yield _escaped(line)


def _thinned(texts: Iterable[str], limit: int) -> list[str]:
    """At most `limit` texts, evenly spread, the same every time."""
    kept: list[str] = []
    stride = 1
    for index, text in enumerate(texts):
        if index % stride:
            continue
        kept.append(text)
        if len(kept) > limit:
            kept, stride = kept[::2], 2 * stride
    return kept

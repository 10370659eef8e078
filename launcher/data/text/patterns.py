"""The user's own text files by a shell pattern: lines, pairs in TSV, and either in JSONL.

Empty lines are left out, and pairs of which one side is empty. Without `eval_files`, a share is held out by a hash of
the text, so that equal ones are on the same side.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import gin

from launcher.data import files
from launcher.data.text import storage
from launcher.errors import UsageError, listed

Pair = tuple[str, str]
Item = TypeVar("Item", str, Pair)


@dataclasses.dataclass(eq=False)
class PatternTexts(abc.ABC, Generic[Item]):
    """Texts of all files that match a pattern; see `launcher.data.text.source.Source`.

    Args:
      pattern: of the files, such as "~/texts/*".
      eval_files: pattern of files to evaluate on.
      eval_share: how much of their texts to hold out instead; 0.1 by default, 0 for none.
    """

    pattern: str
    eval_files: str | None = None
    eval_share: float | None = None

    binding: ClassVar[str]
    """The name that recipes call it by: its kind, as a name begins, and what it gives."""

    def __post_init__(self) -> None:
        self._kind = self.binding.partition("_")[0]
        self.name = f"{self._kind}:{self.pattern}"
        self._share = files.check_share(self.eval_share, self.binding) if self.eval_files is None else 0.0
        self.details = files.share_words(self._share, "text")
        if self.eval_files is not None:
            self.details = f"evaluated on {self.eval_files}"
            if self.eval_share is not None:
                raise UsageError(f"{self.binding}.eval_share and {self.binding}.eval_files: bind one of them")

    @abc.abstractmethod
    def read(self, line: str) -> Item | None:
        """The item of a line, None where there is none; raises ValueError that says what is wrong with the line."""

    @functools.cached_property
    def _paths(self) -> tuple[list[str], list[str]]:
        train = files.matching(self.pattern, self.name)
        return train, files.matching(self.eval_files, f"{self.binding}.eval_files") if self.eval_files else []

    def check(self) -> None:
        """Raises UsageError where no file matches."""
        _ = self._paths

    def digest(self) -> str:
        train, held_out = self._paths
        taken = dataclasses.astuple(self)[len(dataclasses.fields(PatternTexts)) :]  # out of each line
        return storage.digest(self._kind, _content_digest(*train), _content_digest(*held_out), *taken, self._share)

    def train(self) -> Iterator[Item]:
        return (item for item in self._items(self._paths[0]) if not self._is_held_out(item))

    def held_out(self) -> Iterator[Item]:
        train, held_out = self._paths
        if held_out:
            return self._items(held_out)
        return (item for item in self._items(train) if self._is_held_out(item)) if self._share else iter(())

    def _is_held_out(self, item: Item) -> bool:
        return self._share > 0 and files.is_held_out(item if isinstance(item, str) else "\t".join(item), self._share)

    def _items(self, paths: Sequence[str]) -> Iterator[Item]:
        for path in paths:
            for number, line in enumerate(_decoded_lines(path), start=1):
                try:
                    item = self.read(line)
                except ValueError as error:
                    raise UsageError(f"{path} line {number}: {error}") from None
                if item is not None:
                    yield item


@gin.configurable("lines_corpus")
@dataclasses.dataclass(eq=False)
class LinesCorpus(PatternTexts[str]):
    """Documents of own files, each line one: `text_corpus.name = 'lines:GLOB'`."""

    binding = "lines_corpus"

    def read(self, line: str) -> str | None:
        return line or None


@gin.configurable("jsonl_corpus")
@dataclasses.dataclass(eq=False)
class JsonlCorpus(PatternTexts[str]):
    """Documents of own files, a field of each line one: `text_corpus.name = 'jsonl:GLOB'`.

    Args:
      text_feature: the field; "translation.en" is the field "en" of the object "translation".
    """

    text_feature: str = "text"

    binding = "jsonl_corpus"

    def read(self, line: str) -> str | None:
        return (_fields(line, self.text_feature)[0] or None) if line.strip() else None


@gin.configurable("tsv_pairs")
@dataclasses.dataclass(eq=False)
class TsvPairs(PatternTexts[Pair]):
    """Pairs of own files, two columns of each line one: `text_pairs.name = 'tsv:GLOB'`.

    Args:
      columns: which two of more columns are source and target, counted from 0.
    """

    columns: tuple[int, int] | None = None

    binding = "tsv_pairs"

    def read(self, line: str) -> Pair | None:
        if not line:
            return None
        columns = line.split("\t")
        if self.columns is None and len(columns) != 2:
            raise ValueError(f"{len(columns)} columns, and a pair has two; bind tsv_pairs.columns, such as (0, 1)")
        source, target = self.columns or (0, 1)
        if max(source, target) >= len(columns):
            raise ValueError(f"{len(columns)} columns, and tsv_pairs.columns = {self.columns!r} counts them from 0")
        return _if_whole(columns[source], columns[target])


@gin.configurable("jsonl_pairs")
@dataclasses.dataclass(eq=False)
class JsonlPairs(PatternTexts[Pair]):
    """Pairs of own files, two fields of each line one: `text_pairs.name = 'jsonl:GLOB'`.

    Args:
      source_language, target_language: the fields; "translation.en" is the field "en" of the object "translation".
    """

    source_language: str = "source"
    target_language: str = "target"

    binding = "jsonl_pairs"

    def read(self, line: str) -> Pair | None:
        return _if_whole(*_fields(line, self.source_language, self.target_language)) if line.strip() else None


def _if_whole(source: str, target: str) -> tuple[str, str] | None:
    return (source, target) if source and target else None


def _fields(line: str, *names: str) -> list[str]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    return [_field(content, name) for name in names]


def _field(content: Any, name: str) -> str:
    """The text of a field; "translation.en" is the field "en" of the object "translation"."""
    value = content
    for part in [name] if isinstance(content, dict) and name in content else name.split("."):
        if not isinstance(value, dict) or part not in value:
            there = listed(value) if isinstance(value, dict) else f"no object but {type(value).__name__}"
            raise ValueError(f"no field {name!r}: there is {there or 'nothing'}")
        value = value[part]
    if not isinstance(value, str):
        raise ValueError(f"field {name!r} is no text but {type(value).__name__}")
    return value


def _content_digest(*paths: str) -> str:
    """A digest of what the files hold."""
    content = hashlib.sha256()
    for path in paths:
        with files.opened(path) as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                content.update(block)
        content.update(b"\0%d" % files.version(path)[0])  # where one file ends and the next begins
    return content.hexdigest()


def _decoded_lines(path: str) -> Iterator[str]:
    """The lines without their ends; only a line feed, or both with a carriage return, ends one.

    Raises:
      UsageError: the file cannot be read, or is not UTF-8.
    """
    with files.opened(path) as opened:
        file = io.BufferedReader(opened, 1 << 20) if isinstance(opened, io.RawIOBase) else opened
        for number, line in enumerate(file, start=1):
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{path} is not UTF-8: line {number}, {error.reason}; convert it") from None

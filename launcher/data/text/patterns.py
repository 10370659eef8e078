"""The user's own text files by a shell pattern: lines, pairs in TSV, and either in JSONL.

    text_corpus.name = 'lines:~/books/*.txt'       each line is a document
    text_corpus.name = 'jsonl:~/crawl/*.jsonl'     a field of each line, text_corpus.text_feature, is one
    text_pairs.name = 'tsv:~/tatoeba/*.tsv'        two columns of each line are a pair
    text_pairs.name = 'jsonl:~/pairs.jsonl'        two fields are: text_pairs.source_language and target_language

Empty lines are left out, and pairs of which one side is empty. Without `eval_files`, a share is held out by a hash of
the text, so that equal ones are on the same side.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from launcher.data import files
from launcher.data.text import storage
from launcher.data.text.files import content_digest, decoded_lines
from launcher.errors import UsageError, listed

Item = TypeVar("Item", str, tuple[str, str])
Read = Callable[[str], Any]
"""One line to its item, or to None where there is none; raises ValueError that says what is wrong with it."""


class PatternTexts(Generic[Item]):
    """Texts of all files that match a pattern; see `launcher.data.text.source.Source`.

    Args:
      name: as bound, with the pattern to train on after the first colon.
      binding: gin name of what makes it.
      read: takes a line apart.
      fields: what `read` takes out of it.
      eval_files: pattern of files to evaluate on; None to hold some of the others out.
      eval_share: how much of them; None for the usual share.

    Raises:
      UsageError: a share that cannot be, or one beside files to evaluate on.
    """

    def __init__(
        self,
        name: str,
        *,
        binding: str,
        read: Read,
        fields: Sequence[object] = (),
        eval_files: str | None,
        eval_share: float | None,
    ):
        if eval_files is not None and eval_share is not None:
            raise UsageError(f"{binding}.eval_share holds texts out, and {binding}.eval_files has those to evaluate on")
        self.name = name
        self._binding = binding
        self._read = read
        self._fields = fields
        self._eval_files = eval_files
        self._share = 0.0 if eval_files is not None else files.check_share(eval_share, binding)
        how = files.share_words(self._share, "text") if eval_files is None else f"evaluated on {eval_files}"
        self.details = how

    @functools.cached_property
    def _paths(self) -> tuple[list[str], list[str]]:
        train = files.matching(self.name.partition(":")[2], f"{self._binding}.name")
        return train, files.matching(self._eval_files, f"{self._binding}.eval_files") if self._eval_files else []

    def check(self) -> None:
        """Raises UsageError where no file matches."""
        _ = self._paths

    def digest(self) -> str:
        train, held_out = self._paths
        content = content_digest(*train), content_digest(*held_out)
        return storage.digest(self.name.partition(":")[0], *content, *self._fields, self._share)

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
            for number, line in enumerate(decoded_lines(path), start=1):
                try:
                    item = self._read(line)
                except ValueError as error:
                    raise UsageError(f"{path} line {number}: {error}") from None
                if item is not None:
                    yield item


def text_of_line(line: str) -> str | None:
    """A document that is a line."""
    return line or None


def pair_of_columns(columns: tuple[int, int] | None) -> Read:
    """Reads pairs of TSV.

    Args:
      columns: which two of at least so many, counted from 0; None for lines of exactly two.
    """

    def read(line: str) -> tuple[str, str] | None:
        if not line:
            return None
        found = line.split("\t")
        if columns is None and len(found) != 2:
            raise ValueError(
                f"{len(found)} columns, and a pair has two, with a tab between them; bind text_pairs.columns, such as "
                "(0, 1), where there are more"
            )
        source, target = columns or (0, 1)
        if max(source, target) >= len(found):
            raise ValueError(f"{len(found)} columns, and text_pairs.columns = {columns!r} counts them from 0")
        return _if_whole(found[source], found[target])

    return read


def text_of_field(field: str) -> Read:
    """Reads a document out of a field of JSONL."""

    def read(line: str) -> str | None:
        return (_fields(line, field)[0] or None) if line.strip() else None

    return read


def pair_of_fields(source: str, target: str) -> Read:
    """Reads a pair out of two fields of JSONL."""

    def read(line: str) -> tuple[str, str] | None:
        return _if_whole(*_fields(line, source, target)) if line.strip() else None

    return read


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
    found = content
    for part in [name] if isinstance(content, dict) and name in content else name.split("."):
        if not isinstance(found, dict) or part not in found:
            there = listed(found) if isinstance(found, dict) else f"no object but {type(found).__name__}"
            raise ValueError(f"no field {name!r}: there is {there or 'nothing'}")
        found = found[part]
    if not isinstance(found, str):
        raise ValueError(f"field {name!r} is no text but {type(found).__name__}")
    return found

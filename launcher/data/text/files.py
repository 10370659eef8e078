"""The user's own text files: UTF-8, one sentence a line; pairs as two files whose lines belong together."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

from launcher.data import files
from launcher.data.text import storage
from launcher.errors import MissingInputError, UsageError

Pair = tuple[str, str]

DOCUMENTS = ("line", "file")


class FilePairs:
    """Pairs of lines; see `launcher.data.text.source.Source`. Where either line is empty, the pair is left out.

    Args:
      source_file, target_file: to train on.
      eval_source_file, eval_target_file: held out; None for none.

    Raises:
      UsageError: only one file of two is given.
    """

    name = "files"

    def __init__(
        self,
        *,
        source_file: str | None,
        target_file: str | None,
        eval_source_file: str | None,
        eval_target_file: str | None,
    ):
        if not source_file or not target_file:
            raise UsageError(
                "text_pairs.name = 'files' needs text_pairs.source_file and text_pairs.target_file, got "
                f"{source_file!r} and {target_file!r}"
            )
        if (eval_source_file is None) != (eval_target_file is None):
            raise UsageError(
                "text_pairs.eval_source_file and text_pairs.eval_target_file belong together, got "
                f"{eval_source_file!r} and {eval_target_file!r}"
            )
        self._train = _path(source_file), _path(target_file)
        self._held_out = (
            (_path(eval_source_file), _path(eval_target_file)) if eval_source_file and eval_target_file else None
        )

    def check(self) -> None:
        """Raises UsageError for a file that is not there."""
        for path in (*self._train, *(self._held_out or ())):
            _check(path, "text_pairs")

    def digest(self) -> str:
        self.check()
        return content_digest(*self._train, *(self._held_out or ()))

    def train(self) -> Iterator[Pair]:
        return _paired(*self._train)

    def held_out(self) -> Iterator[Pair]:
        return _paired(*self._held_out) if self._held_out else iter(())


class FileCorpus:
    """Documents; see `launcher.data.text.source.Source`.

    Args:
      train_file: to train on.
      eval_file: held out; None for none.
      documents: "line" if each line is a document, "file" if the whole file is one.

    Raises:
      UsageError: no training file, or another value of `documents`.
    """

    name = "files"

    def __init__(self, *, train_file: str | None, eval_file: str | None, documents: str):
        if not train_file:
            raise UsageError("text_corpus.name = 'files' needs text_corpus.train_file")
        if documents not in DOCUMENTS:
            raise UsageError(f"text_corpus.documents = {documents!r} must be {' or '.join(map(repr, DOCUMENTS))}")
        self._train = _path(train_file)
        self._held_out = _path(eval_file) if eval_file else None
        self._documents = documents

    def check(self) -> None:
        """Raises UsageError for a file that is not there."""
        for path in (self._train, self._held_out):
            if path is not None:
                _check(path, "text_corpus")

    def digest(self) -> str:
        self.check()
        paths = [self._train] if self._held_out is None else [self._train, self._held_out]
        return storage.digest(content_digest(*paths), self._documents)

    def train(self) -> Iterator[str]:
        return self._texts(self._train)

    def held_out(self) -> Iterator[str]:
        return self._texts(self._held_out) if self._held_out else iter(())

    def _texts(self, path: Path) -> Iterator[str]:
        if self._documents == "line":
            return (line for line in decoded_lines(path) if line)
        text = "\n".join(decoded_lines(path))
        return iter([text] if text else [])


def _path(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _check(path: Path, binding: str) -> None:
    if not path.is_file():
        raise MissingInputError(f"{binding}.name = 'files': there is no file {str(path)!r} (from {os.getcwd()})")


def content_digest(*paths: str | Path) -> str:
    """Of what the files hold."""
    content = hashlib.sha256()
    for path in map(str, paths):
        with files.opened(path) as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                content.update(block)
        content.update(b"\0%d" % files.version(path)[0])  # where one file ends and the next begins
    return content.hexdigest()


def _paired(source: Path, target: Path) -> Iterator[Pair]:
    try:
        for pair in zip(decoded_lines(source), decoded_lines(target), strict=True):
            if all(pair):
                yield pair
    except ValueError:
        counts = [sum(1 for _ in decoded_lines(path)) for path in (source, target)]
        raise UsageError(
            f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line n of one must translate line n of "
            "the other"
        ) from None


def decoded_lines(path: str | Path) -> Iterator[str]:
    """The lines without their ends; only a line feed, or both with a carriage return, ends one.

    Raises:
      UsageError: the file cannot be read, or is not UTF-8.
    """
    with files.opened(str(path)) as opened:
        file = io.BufferedReader(opened, 1 << 20) if isinstance(opened, io.RawIOBase) else opened
        for number, line in enumerate(file, start=1):
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{path} is not UTF-8: line {number}, {error.reason}; convert it") from None

"""The user's own text files, UTF-8: pairs as two files whose lines belong together."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Iterator

import gin

from launcher.data import files
from launcher.errors import UsageError

Pair = tuple[str, str]


@gin.configurable("file_pairs")
@dataclasses.dataclass(eq=False, kw_only=True)
class FilePairs:
    """Pairs of lines: `text_pairs.name = 'files'`. Where either line is empty, the pair is left out.

    Args:
      source_file, target_file: to train on: line n of one translates line n of the other.
      eval_source_file, eval_target_file: held out; None for none.
    """

    source_file: str = gin.REQUIRED
    target_file: str = gin.REQUIRED
    eval_source_file: str | None = None
    eval_target_file: str | None = None

    name = "files"

    def __post_init__(self) -> None:
        if (self.eval_source_file is None) != (self.eval_target_file is None):
            raise UsageError("file_pairs.eval_source_file and eval_target_file belong together: bind both or none")
        self._train, self._held_out = (
            [os.path.expanduser(path) for path in pair if path]
            for pair in ((self.source_file, self.target_file), (self.eval_source_file, self.eval_target_file))
        )

    def check(self) -> None:
        """Raises UsageError for a file that is not there."""
        for path in (*self._train, *self._held_out):
            files.version(path)

    def digest(self) -> str:
        return content_digest(*self._train, *self._held_out)

    def train(self) -> Iterator[Pair]:
        return _paired(*self._train)

    def held_out(self) -> Iterator[Pair]:
        return _paired(*self._held_out) if self._held_out else iter(())


def content_digest(*paths: str) -> str:
    """A digest of what the files hold."""
    content = hashlib.sha256()
    for path in paths:
        with files.opened(path) as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                content.update(block)
        content.update(b"\0%d" % files.version(path)[0])  # where one file ends and the next begins
    return content.hexdigest()


def _paired(source: str, target: str) -> Iterator[Pair]:
    try:
        for pair in zip(decoded_lines(source), decoded_lines(target), strict=True):
            if all(pair):
                yield pair
    except ValueError:
        counts = [sum(1 for _ in decoded_lines(path)) for path in (source, target)]
        raise UsageError(
            f"{source} has {counts[0]:,} lines and {target} {counts[1]:,}: line n must go with line n"
        ) from None


def decoded_lines(path: str) -> Iterator[str]:
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

"""What `--mode=predict` reads and answers: the protocol of lines of text, image files and rows of arrays."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError, user_code
from launcher.run.session import Session

Batch = dict[str, np.ndarray]


class Inputs(Protocol):
    """One kind of input, and the answers that belong to it.

    Attributes:
      total: how many records there are; None where only reading tells.
    """

    total: int | None = None

    def prepare(self, made: Session) -> None:
        """Checks the input against the model, which is there now."""
        return

    def batches(self, size: int) -> Iterator[list[Any]]:
        """The records, `size` at a time."""

    def encode(self, records: Sequence[Any], rows: int) -> tuple[Batch, dict[int, str]]:
        """A batch of so many rows, of which the first are the records; and what is wrong with which of them."""

    def answer(self, model: Any, batch: Any) -> Any:
        """The model's outputs for one replica's rows, with the rows as their first axis; in replica context."""

    def answers(self, records: Sequence[Any], outputs: Any, damaged: Mapping[int, str]) -> Any:
        """What is written: a line a record, or arrays by output name."""

    def remarks(self) -> list[str]:
        """What to say at the end."""
        return []


def is_pattern(path: str) -> bool:
    """Whether a path is a pattern and no file of such a name."""
    return any(character in path for character in "*?[") and not os.path.exists(path)


def check_readable(path: str) -> None:
    """Raises UsageError where there is no such file or folder."""
    try:
        tf.io.gfile.stat(path)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--input={path} cannot be read: {what_is_wrong(error)}") from None


def what_is_wrong(error: Exception) -> str:
    """What is wrong with a file, of an error of the system or of TensorFlow."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = user_code.summary(error).partition(": ")[2]
    return re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).strip() or type(error).__name__

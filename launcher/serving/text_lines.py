"""Lines of text for `--mode=predict`: for tasks that answer with lines, and for models of one string input."""

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.run.session import Session
from launcher.serving import interface
from launcher.serving.inputs import Batch, Inputs
from launcher.tasks.base import ReadsLines


class _TextFile(Inputs):
    """Lines of a file or of standard input."""

    def __init__(self, path: str | None):
        self._path = path
        self._name = "standard input" if path is None else f"--input={path}"

    def batches(self, size: int) -> Iterator[list[str]]:
        with contextlib.ExitStack() as stack:
            file = sys.stdin.buffer if self._path is None else stack.enter_context(_opened(self._path))
            lines = self._decoded(file)
            while batch := [line.rstrip("\r\n") for line in itertools.islice(lines, size)]:
                yield batch

    def _decoded(self, file: IO[bytes]) -> Iterator[str]:
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{self._name}, line {number}: not UTF-8 ({error.reason})") from None


class Lines(_TextFile):
    """Lines that a task answers with lines; line breaks in an answer become spaces."""

    def __init__(self, path: str | None, task: ReadsLines):
        super().__init__(path)
        self._task = task

    def encode(self, records: Sequence[str], rows: int) -> tuple[Batch, dict[int, str]]:
        return self._task.encode_lines([*records, *[""] * (rows - len(records))]), {}

    def answer(self, model: Any, batch: Any) -> Any:
        return self._task.generate(model, batch)

    def answers(self, records: Sequence[str], outputs: np.ndarray, damaged: Mapping[int, str]) -> list[str]:
        return [" ".join(answer.splitlines()) for answer in self._task.decode_lines(outputs[: len(records)])]


class Texts(_TextFile):
    """Lines for a model whose one input is a string a row; JSON of its outputs out."""

    def prepare(self, made: Session) -> None:
        self._interface = interface.of(made.model, made.plan)
        specs = list(self._interface.inputs.values())
        if len(specs) != 1 or specs[0].dtype != tf.string or specs[0].shape.rank > 2:
            raise UsageError(
                f"--mode=predict: {type(made.plan.recipe.task).__name__} does not answer lines of text; its model "
                f"takes {interface.listed(self._interface.inputs)}: give --input as "
                f"{interface.array_advice(self._interface.inputs)}"
            )

    def encode(self, records: Sequence[str], rows: int) -> tuple[Batch, dict[int, str]]:
        (name, spec), *_ = self._interface.inputs.items()
        texts = np.array([line.encode() for line in [*records, *[""] * (rows - len(records))]], object)
        return {name: texts if spec.shape.rank == 1 else texts[:, np.newaxis]}, {}

    def answer(self, model: Any, batch: Any) -> Any:
        return self._interface.call(batch)

    def answers(self, records: Sequence[str], outputs: Batch, damaged: Mapping[int, str]) -> list[str]:
        rows = [{name: _plain(array[row]) for name, array in outputs.items()} for row in range(len(records))]
        return [json.dumps({"line": line, **row}) for line, row in zip(records, rows, strict=True)]


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"--input={path} cannot be read: {error.strerror or error}") from None

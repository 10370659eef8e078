"""Inputs of `--mode=predict` and the answers that belong to them: rows of arrays, image files, lines of text."""

import contextlib
import itertools
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError, user_code
from launcher.run.session import Session
from launcher.serving import interface
from launcher.tasks.base import ReadsImages, ReadsLines

ARRAY_SUFFIXES = (".npy", ".npz")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_SHOWN = 5

Batch = dict[str, np.ndarray]


class Inputs:
    """One kind of input, and the answers that belong to it.

    Attributes:
      records: all of them; None where only reading tells.
    """

    records: Sequence[Any] | None = None
    _interface: interface.Interface  # of a model that is called by the names of its inputs

    def prepare(self, made: Session) -> None:
        """Checks the input against the model, which is there now."""

    def batches(self, size: int) -> Iterator[Sequence[Any]]:
        """The records, `size` at a time."""
        records = self.records or ()
        return (records[start : start + size] for start in range(0, len(records), size))

    def encode(self, records: Sequence[Any], rows: int) -> Batch:
        """A batch of so many rows, of which the first are the records; empty where none of them can be answered."""
        raise NotImplementedError

    def answer(self, model: Any, batch: Any) -> Any:
        """The model's outputs for one replica's rows, with the rows as their first axis; in replica context."""
        return self._interface.call(batch)

    def answers(self, records: Sequence[Any], outputs: Any) -> Any:
        """The records' answers, to be written: a line a record, or arrays by output name."""
        raise NotImplementedError

    def remarks(self) -> list[str]:
        """Lines to say at the end."""
        return []


def is_pattern(path: str) -> bool:
    """Whether a path is a pattern and no file of such a name."""
    return any(character in path for character in "*?[") and not os.path.exists(path)


def check_readable(path: str) -> None:
    """Raises UsageError where there is no such file or folder."""
    try:
        tf.io.gfile.stat(path)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--input={path} cannot be read: {_what_is_wrong(error)}") from None


def _what_is_wrong(error: Exception) -> str:
    """The fault of a file, by an error of the system or of TensorFlow."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = user_code.summary(error).partition(": ")[2]
    return re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).strip() or type(error).__name__


# ------------------------------------------------------------------------------------------------------ rows of arrays


class Arrays(Inputs):
    """Rows of a .npy file, or of a .npz file whose keys are the model's inputs, for any model; arrays out."""

    records: range

    def __init__(self, path: str):
        self._path = path
        self._arrays = _loaded(path)
        lengths = {name: len(array) if array.ndim else 0 for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or not all(lengths.values()):
            found = ", ".join(f"{count} {name}".strip() for name, count in lengths.items()) or "no array"
            raise UsageError(f"--input={path}: the arrays must have one number of rows, 1 or more; found {found}")
        self.records = range(max(lengths.values()))

    def prepare(self, made: Session) -> None:
        self._interface = interface.of(made.model, made.plan)
        specs = self._interface.inputs
        if self._path.endswith(".npy") and len(specs) == 1:
            self._arrays = dict(zip(specs, self._arrays.values(), strict=True))
        for name in [*self._arrays, *specs]:
            if name not in specs or name not in self._arrays:
                wrong = f"{name!r} is missing" if name in specs else f"the model has no input {name!r}"
                raise UsageError(f"--input={self._path}: {wrong}; give a .npz file of {interface.listed(specs)}")
        for name, spec in specs.items():
            self._check(name, self._arrays[name], spec)

    def _check(self, name: str, array: np.ndarray, spec: tf.TensorSpec) -> None:
        if not spec.shape.is_compatible_with(array.shape):
            wrong = f"has shape {array.shape}"
        elif (array.dtype.kind in "US") != (spec.dtype == tf.string) or not np.can_cast(
            array.dtype, spec.dtype.as_numpy_dtype, "same_kind"
        ):
            wrong = f"is {array.dtype}"
        else:
            return
        shown = interface.shown(spec)
        raise UsageError(f"--input={self._path}: the array for input {name!r} {wrong}, and the model takes {shown}")

    def encode(self, records: Sequence[int], rows: int) -> Batch:
        # A real row repeated: an empty one might not be finite in a norm.
        chosen = [*records, *[records[0]] * (rows - len(records))]
        specs = self._interface.inputs
        return {name: array[chosen].astype(specs[name].dtype.as_numpy_dtype) for name, array in self._arrays.items()}

    def answers(self, records: Sequence[int], outputs: Batch) -> Batch:
        for name, array in outputs.items():
            if array.dtype == object:
                raise UsageError(f"output {name!r} of the model is text, which a .npy file does not hold")
        bfloat16 = tf.bfloat16.as_numpy_dtype  # which .npy files do not have
        rows = {name: array[: len(records)] for name, array in outputs.items()}
        return {name: array.astype(np.float32) if array.dtype == bfloat16 else array for name, array in rows.items()}


def _loaded(path: str) -> Batch:
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        return dict(content.items()) if hasattr(content, "files") else {"": content}
    except OSError as error:
        raise UsageError(f"--input={path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise UsageError(f"--input={path}: no {path[-4:]} file of numbers or strings, as numpy.save has") from None


# --------------------------------------------------------------------------------------------------------- image files


class Images(Inputs):
    """Image files for a task that classifies them, decoded on the host; JSON with class and probability out.

    Args:
      path: a folder, looked through at any depth, a pattern with * or ?, or one file; anything `tf.io.gfile` reads.
      task: with `decode_images`, which is `decode`.
    """

    records: list[str]

    def __init__(self, path: str, task: ReadsImages, decode: Callable[[tf.Tensor], tf.Tensor]):
        self._task = task
        self._damaged: dict[str, str] = {}  # what is wrong with which file
        self._folder = path if tf.io.gfile.isdir(path) else None
        self.records = _image_files(path)
        self._decode = tf.function(decode, input_signature=[tf.TensorSpec([None], tf.string)])

    def encode(self, records: Sequence[str], rows: int) -> Batch:
        with ThreadPoolExecutor() as pool:
            images = dict(zip(records, pool.map(self._decoded, records), strict=True))
        self._damaged |= {path: image for path, image in images.items() if isinstance(image, str)}
        shapes = [image.shape for image in images.values() if not isinstance(image, str)]
        if not shapes:
            return {}
        batch = np.zeros([rows, *shapes[0]], np.float32)
        for index, path in enumerate(records):
            if path not in self._damaged:
                batch[index] = images[path]
        return {"image": batch}

    def _decoded(self, path: str) -> np.ndarray | str:
        """The image in a file, or what is wrong with the file."""
        try:
            with tf.io.gfile.GFile(path, "rb") as file, tf.device("CPU:0"):  # no accelerator takes strings
                return self._decode(tf.constant([file.read()])).numpy()[0]
        except (OSError, tf.errors.OpError) as error:
            return _what_is_wrong(error)

    def answer(self, model: Any, batch: Any) -> Any:
        return self._task.classify(model, batch)

    def answers(self, records: Sequence[str], outputs: Any) -> list[str]:
        names = self._task.class_names
        lines = []
        for index, path in enumerate(records):
            record: dict[str, Any] = {"file": self._name(path)}
            if path in self._damaged:
                record["error"] = self._damaged[path]
            else:
                number = int(np.argmax(outputs[index]))
                label = {"label": names[number]} if number < len(names) else {}
                record |= {"class": number, **label, "probability": float(outputs[index][number])}
            lines.append(json.dumps(record, ensure_ascii=False))
        return lines

    def _name(self, path: str) -> str:
        return os.path.relpath(path, self._folder) if self._folder else path

    def remarks(self) -> list[str]:
        lines = [f"  {self._name(path)}: {error}" for path, error in self._damaged.items()]
        if not lines:
            return []
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        return [f"{len(lines):,} of {len(self.records):,} images could not be read:", *lines[:_SHOWN], *more]


def _image_files(path: str) -> list[str]:
    if tf.io.gfile.isdir(path):
        every = [os.path.join(folder, name) for folder, _, names in tf.io.gfile.walk(path) for name in names]
        files = [file for file in every if file.lower().endswith(IMAGE_SUFFIXES)]
    else:
        every = tf.io.gfile.glob(path) if is_pattern(path) else [path]
        files = [file for file in every if not tf.io.gfile.isdir(file)]
    if not files:
        suffixes = ", ".join(IMAGE_SUFFIXES)
        raise UsageError(f"--input={path}: there is no image among its {len(every)} files ({suffixes})")
    return sorted(files)


# ------------------------------------------------------------------------------------------------------- lines of text


class _TextFile(Inputs):
    """Lines of a file or of standard input."""

    def __init__(self, path: str | None):
        self._path = path

    def batches(self, size: int) -> Iterator[list[str]]:
        name = "standard input" if self._path is None else f"--input={self._path}"
        try:
            with contextlib.nullcontext(sys.stdin.buffer) if self._path is None else open(self._path, "rb") as file:
                lines = (_text(line, f"{name}, line {number}") for number, line in enumerate(file, start=1))
                while batch := list(itertools.islice(lines, size)):
                    yield batch
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror or error}") from None


def _text(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"{place}: not UTF-8 ({error.reason})") from None


class Lines(_TextFile):
    """Lines that a task answers with lines; line breaks in an answer become spaces."""

    def __init__(self, path: str | None, task: ReadsLines):
        super().__init__(path)
        self._task = task

    def encode(self, records: Sequence[str], rows: int) -> Batch:
        return self._task.encode_lines([*records, *[""] * (rows - len(records))])

    def answer(self, model: Any, batch: Any) -> Any:
        return self._task.generate(model, batch)

    def answers(self, records: Sequence[str], outputs: np.ndarray) -> list[str]:
        return [" ".join(answer.splitlines()) for answer in self._task.decode_lines(outputs[: len(records)])]


class Texts(_TextFile):
    """Lines for a model whose one input is a string a row; JSON of its outputs out."""

    def prepare(self, made: Session) -> None:
        self._interface = interface.of(made.model, made.plan)
        specs = list(self._interface.inputs.values())
        if len(specs) != 1 or specs[0].dtype != tf.string or specs[0].shape.rank > 2:
            raise UsageError(
                f"--mode=predict: {type(made.plan.recipe.task).__name__} does not answer lines of text; give --input "
                f"as a .npz file of what its model takes: {interface.listed(self._interface.inputs)}"
            )

    def encode(self, records: Sequence[str], rows: int) -> Batch:
        (name, spec), *_ = self._interface.inputs.items()
        texts = np.array([line.encode() for line in [*records, *[""] * (rows - len(records))]], object)
        return {name: texts if spec.shape.rank == 1 else texts[:, np.newaxis]}

    def answers(self, records: Sequence[str], outputs: Batch) -> list[str]:
        rows = ({name: array[row] for name, array in outputs.items()} for row in range(len(records)))
        return [json.dumps({"line": line, **row}, default=_plain) for line, row in zip(records, rows, strict=True)]


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value.tolist()

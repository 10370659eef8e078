"""What `--mode=predict` reads and writes: lines of text, files of images, rows of arrays, each a `Records`."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Protocol

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError, advice, user_code
from launcher.run.session import Session
from launcher.serving import interface
from launcher.tasks.base import ReadsImages, ReadsLines

Batch = dict[str, np.ndarray]
ARRAY_SUFFIXES = (".npy", ".npz")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
_SHOWN = 5


class Records(Protocol):
    """One kind of input, and the answers that belong to it."""

    @property
    def total(self) -> int | None:
        """How many records there are; None where only reading tells."""

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """What tells this input from another, for JSON; None for one that cannot be read again."""

    def prepare(self, made: Session) -> None:
        """Checks the input against the model, which is there now."""

    def batches(self, start: int, size: int) -> Iterator[list[Any]]:
        """The records from number `start` on, `size` at a time."""

    def encode(self, records: Sequence[Any], rows: int) -> tuple[Batch, dict[int, str]]:
        """A batch of so many rows, of which the first are the records; and what is wrong with which of them."""

    def answer(self, model: Any, batch: Any) -> Any:
        """The model's outputs for one replica's rows, with the rows as their first axis; in replica context."""

    def answers(self, records: Sequence[Any], outputs: Any, damaged: Mapping[int, str]) -> Any:
        """What is written: a line a record, or arrays by output name."""

    def look_at(self, line: str) -> None:
        """Takes notice of a line that an earlier attempt wrote."""

    def remarks(self) -> list[str]:
        """What to say at the end."""


def open_records(path: str | None, task: Any) -> Records:
    """The records that `--input` means for a task.

    Raises:
      UsageError: they cannot be read, or the task does not answer such.
    """
    if path is not None and not _is_pattern(path):
        _stamp(path)
    if path is not None and path.endswith(ARRAY_SUFFIXES):
        return Arrays(path)
    if path is not None and (_is_pattern(path) or tf.io.gfile.isdir(path) or path.lower().endswith(IMAGE_SUFFIXES)):
        decode = task.decode_images if isinstance(task, ReadsImages) else None
        if decode is None:
            raise UsageError(
                f"--input={path}: {type(task).__name__} does not say how image files become its model's inputs; give "
                "arrays, as .npy or .npz"
            )
        return Images(path, task, decode)
    if isinstance(task, ReadsLines):
        return Lines(path, task)
    if isinstance(task, ReadsImages):
        raise UsageError(
            f"--mode=predict: {type(task).__name__} does not answer lines of text; --input is a folder of images, a "
            "glob, an image, or an array as .npy"
        )
    return Texts(path)


class _TextFile:
    """Lines of a file or of standard input."""

    total = None

    def __init__(self, path: str | None):
        self._path = path
        self._name = "standard input" if path is None else f"--input={path}"
        self.identity = None if path is None else {"input": os.path.abspath(path), **_stamp(path)}

    def prepare(self, made: Session) -> None:
        """Any text will do."""

    def look_at(self, line: str) -> None:
        """There is nothing to remark on."""

    def remarks(self) -> list[str]:
        return []

    def batches(self, start: int, size: int) -> Iterator[list[str]]:
        with contextlib.ExitStack() as stack:
            file = sys.stdin.buffer if self._path is None else stack.enter_context(_opened(self._path))
            lines = itertools.islice(self._decoded(file), start, None)
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
                f"takes {_inputs(self._interface.inputs)}: give --input as {_array_advice(self._interface.inputs)}"
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


class Images:
    """Image files for a task that classifies them; JSON with class and probability out.

    Args:
      path: a folder, looked through at any depth, a pattern with * or ?, or one file; anything `tf.io.gfile` reads.
      task: see `ReadsImages`.
      decode: its `decode_images`.
    """

    def __init__(self, path: str, task: ReadsImages, decode: Callable[[tf.Tensor], tf.Tensor]):
        self._task = task
        self._unreadable: list[str] = []
        self._folder = path if tf.io.gfile.isdir(path) else None
        self._files = _image_files(path)
        self.total = len(self._files)
        stamps = hashlib.sha256(json.dumps([_stamp(file) for file in self._files]).encode()).hexdigest()
        self.identity = {"input": path, "files": self._files[0], "count": self.total, "sha256": stamps}
        self._decode = tf.function(decode, input_signature=[tf.TensorSpec([None], tf.string)])

    def prepare(self, made: Session) -> None:
        """What is wrong with a file is said of that file."""

    def batches(self, start: int, size: int) -> Iterator[list[str]]:
        for first in range(start, len(self._files), size):
            yield self._files[first : first + size]

    def encode(self, records: Sequence[str], rows: int) -> tuple[Batch, dict[int, str]]:
        contents: dict[int, bytes] = {}
        damaged: dict[int, str] = {}
        for index, path in enumerate(records):
            try:
                with tf.io.gfile.GFile(path, "rb") as file:
                    contents[index] = file.read()
            except (OSError, tf.errors.OpError) as error:
                damaged[index] = _first_line(error)
        images = self._decoded(contents, damaged)
        shape = next((image.shape for image in images.values()), None)
        if shape is None:  # all are damaged: there is nothing to answer
            return {}, damaged
        batch = np.zeros([rows, *shape], np.float32)
        for index, image in images.items():
            batch[index] = image
        return {"image": batch}, damaged

    def _decoded(self, contents: Mapping[int, bytes], damaged: dict[int, str]) -> dict[int, np.ndarray]:
        """Images by index; where some of them are damaged, one at a time to find out which."""
        try:
            if contents:
                return dict(zip(contents, self._pixels(list(contents.values())), strict=True))
        except tf.errors.OpError as error:
            if len(contents) == 1:
                damaged[next(iter(contents))] = _first_line(error)
                return {}
            single = ({index: content} for index, content in contents.items())
            return {index: image for one in single for index, image in self._decoded(one, damaged).items()}
        return {}

    def _pixels(self, files: list[bytes]) -> np.ndarray:
        with tf.device("CPU:0"):  # no accelerator takes strings
            return self._decode(tf.constant(files)).numpy()

    def answer(self, model: Any, batch: Any) -> Any:
        return self._task.classify(model, batch)

    def answers(self, records: Sequence[str], outputs: Any, damaged: Mapping[int, str]) -> list[str]:
        names = self._task.class_names
        lines = []
        for index, path in enumerate(records):
            record: dict[str, Any] = {"file": os.path.relpath(path, self._folder) if self._folder else path}
            if index in damaged:
                record["error"] = damaged[index]
                self._note(record)
            else:
                number = int(np.argmax(outputs[index]))
                label = {"label": names[number]} if number < len(names) else {}
                record |= {"class": number, **label, "probability": float(outputs[index][number])}
            lines.append(json.dumps(record, ensure_ascii=False))
        return lines

    def look_at(self, line: str) -> None:
        record = json.loads(line)
        if "error" in record:
            self._note(record)

    def _note(self, record: Mapping[str, Any]) -> None:
        self._unreadable.append(f"  {record['file']}: {record['error']}")

    def remarks(self) -> list[str]:
        count = len(self._unreadable)
        if not count:
            return []
        more = [f"  and {count - _SHOWN} more"] if count > _SHOWN else []
        return [f"{count:,} of {self.total:,} images could not be read:", *self._unreadable[:_SHOWN], *more]


class Arrays:
    """Rows of a .npy file, or of a .npz file whose keys are the model's inputs, for any model; arrays out."""

    def __init__(self, path: str):
        self._path = path
        self._arrays = _loaded(path)
        self.identity = {"input": os.path.abspath(path), **_stamp(path)}
        lengths = {name: len(array) if array.ndim else 0 for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or not next(iter(lengths.values())):
            found = ", ".join(f"{count} {name}".strip() for name, count in lengths.items()) or "no array"
            raise UsageError(f"--input={path}: the arrays must have one number of rows, 1 or more; found {found}")
        self.total = next(iter(lengths.values()))

    def prepare(self, made: Session) -> None:
        self._interface = interface.of(made.model, made.plan)
        specs = self._interface.inputs
        if self._path.endswith(".npy"):
            if len(specs) != 1:
                raise UsageError(
                    f"--input={self._path}: the model has the inputs {_inputs(specs)}; give {_array_advice(specs)}"
                )
            self._arrays = dict(zip(specs, self._arrays.values(), strict=True))
        for name in self._arrays:
            if name not in specs:
                raise UsageError(f"--input={self._path}: the model has no input {name!r}{advice(name, specs)}")
        for name, spec in specs.items():
            if name not in self._arrays:
                raise UsageError(f"--input={self._path}: input {name!r} of the model is missing: {_inputs(specs)}")
            self._check(name, self._arrays[name], spec)

    def _check(self, name: str, array: np.ndarray, spec: tf.TensorSpec) -> None:
        of = f"--input={self._path}: the array for input {name!r}"
        if not spec.shape.is_compatible_with(array.shape):
            raise UsageError(f"{of} has shape {array.shape}, and the model takes {_shown(spec)}")
        is_text = array.dtype.kind in "US"
        if is_text != (spec.dtype == tf.string) or (
            not is_text and not np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind")
        ):
            raise UsageError(f"{of} is {array.dtype}, and the model takes {_shown(spec)}; convert it first")

    def batches(self, start: int, size: int) -> Iterator[list[int]]:
        for first in range(start, self.total, size):
            yield list(range(first, min(first + size, self.total)))

    def encode(self, records: Sequence[int], rows: int) -> tuple[Batch, dict[int, str]]:
        # A real row repeated: an empty one might not be finite in a norm.
        chosen = [*records, *[records[0]] * (rows - len(records))]
        return {name: self._as_fed(array[chosen], name) for name, array in self._arrays.items()}, {}

    def _as_fed(self, array: np.ndarray, name: str) -> np.ndarray:
        dtype = self._interface.inputs[name].dtype
        return array if dtype == tf.string else array.astype(dtype.as_numpy_dtype)

    def answer(self, model: Any, batch: Any) -> Any:
        return self._interface.call(batch)

    def answers(self, records: Sequence[int], outputs: Batch, damaged: Mapping[int, str]) -> Batch:
        return {name: _as_numpy(name, array[: len(records)]) for name, array in outputs.items()}

    def look_at(self, line: str) -> None:
        """There are no lines."""

    def remarks(self) -> list[str]:
        return []


def _as_numpy(name: str, array: np.ndarray) -> np.ndarray:
    """An output in a dtype that .npy files have."""
    if array.dtype == object:
        raise UsageError(f"output {name!r} of the model is text, which a .npy file does not hold")
    return array.astype(np.float32) if array.dtype == tf.bfloat16.as_numpy_dtype else array


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _loaded(path: str) -> dict[str, np.ndarray]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays: dict[str, np.ndarray] = dict(found.items()) if hasattr(found, "files") else {"": found}
    except OSError as error:
        raise UsageError(f"--input={path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise UsageError(
            f"--input={path} is no {path[-4:]} file of numbers or strings, as numpy.save writes them; arrays of Python "
            "objects are not read"
        ) from None
    return arrays


def _image_files(path: str) -> list[str]:
    if not tf.io.gfile.isdir(path):
        found = tf.io.gfile.glob(path) if _is_pattern(path) else [path]
        if not found or not tf.io.gfile.exists(found[0]):
            raise UsageError(f"--input={path}: there is no such file")
        return sorted(file for file in found if not tf.io.gfile.isdir(file)) or _no_images(path)
    every = [os.path.join(folder, name) for folder, _, names in tf.io.gfile.walk(path) for name in names]
    return sorted(file for file in every if file.lower().endswith(IMAGE_SUFFIXES)) or _no_images(path, len(every))


def _no_images(path: str, others: int = 0) -> list[str]:
    more = f" among its {others} files" if others else ""
    raise UsageError(f"--input={path}: there is no image{more} ({', '.join(IMAGE_SUFFIXES)})")


def _is_pattern(path: str) -> bool:
    return any(character in path for character in "*?[") and not os.path.exists(path)


def _stamp(path: str) -> dict[str, Any]:
    """Path, size and time of a file."""
    try:
        found = tf.io.gfile.stat(path)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"--input={path} cannot be read: {_first_line(error)}") from None
    return {"path": path, "bytes": found.length, "changed": found.mtime_nsec}


def _opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except OSError as error:
        raise UsageError(f"--input={path} cannot be read: {error.strerror or error}") from None


def _first_line(error: Exception) -> str:
    """What is wrong with a file, of an error of the system or of TensorFlow."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = user_code.summary(error).partition(": ")[2]
    return re.sub(r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*", "", text).strip() or type(error).__name__


def _shown(spec: tf.TensorSpec) -> str:
    return f"{spec.dtype.name} {[None if size is None else int(size) for size in spec.shape]}".replace("None", "n", 1)


def _inputs(specs: Mapping[str, tf.TensorSpec]) -> str:
    return ", ".join(f"{name!r} ({_shown(spec)})" for name, spec in specs.items())


def _array_advice(specs: Mapping[str, tf.TensorSpec]) -> str:
    return "a .npy file" if len(specs) == 1 else "a .npz file with these keys"

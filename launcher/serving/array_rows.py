"""Rows of NumPy files for `--mode=predict`, checked against the inputs of the model."""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError, advice
from launcher.run.session import Session
from launcher.serving import interface
from launcher.serving.inputs import Batch, Inputs

ARRAY_SUFFIXES = (".npy", ".npz")


class Arrays(Inputs):
    """Rows of a .npy file, or of a .npz file whose keys are the model's inputs, for any model; arrays out."""

    total: int

    def __init__(self, path: str):
        self._path = path
        self._arrays = _loaded(path)
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
                    f"--input={self._path}: the model has the inputs {interface.listed(specs)}; give "
                    f"{interface.array_advice(specs)}"
                )
            self._arrays = dict(zip(specs, self._arrays.values(), strict=True))
        for name in self._arrays:
            if name not in specs:
                raise UsageError(f"--input={self._path}: the model has no input {name!r}{advice(name, specs)}")
        for name, spec in specs.items():
            if name not in self._arrays:
                raise UsageError(f"--input={self._path}: {name!r} is missing: {interface.listed(specs)}")
            self._check(name, self._arrays[name], spec)

    def _check(self, name: str, array: np.ndarray, spec: tf.TensorSpec) -> None:
        of = f"--input={self._path}: the array for input {name!r}"
        if not spec.shape.is_compatible_with(array.shape):
            raise UsageError(f"{of} has shape {array.shape}, and the model takes {interface.shown(spec)}")
        is_text = array.dtype.kind in "US"
        if is_text != (spec.dtype == tf.string) or (
            not is_text and not np.can_cast(array.dtype, spec.dtype.as_numpy_dtype, "same_kind")
        ):
            raise UsageError(f"{of} is {array.dtype}, and the model takes {interface.shown(spec)}; convert it first")

    def batches(self, size: int) -> Iterator[list[int]]:
        for first in range(0, self.total, size):
            yield list(range(first, min(first + size, self.total)))

    def encode(self, records: Sequence[int], rows: int) -> tuple[Batch, dict[int, str]]:
        # A real row repeated: an empty one might not be finite in a norm.
        chosen = [*records, *[records[0]] * (rows - len(records))]
        dtypes = {name: spec.dtype for name, spec in self._interface.inputs.items()}
        return {
            name: array[chosen] if dtypes[name] == tf.string else array[chosen].astype(dtypes[name].as_numpy_dtype)
            for name, array in self._arrays.items()
        }, {}

    def answer(self, model: Any, batch: Any) -> Any:
        return self._interface.call(batch)

    def answers(self, records: Sequence[int], outputs: Batch, damaged: Mapping[int, str]) -> Batch:
        return {name: _as_numpy(name, array[: len(records)]) for name, array in outputs.items()}


def _as_numpy(name: str, array: np.ndarray) -> np.ndarray:
    """An output in a dtype that .npy files have."""
    if array.dtype == object:
        raise UsageError(f"output {name!r} of the model is text, which a .npy file does not hold")
    return array.astype(np.float32) if array.dtype == tf.bfloat16.as_numpy_dtype else array


def _loaded(path: str) -> dict[str, np.ndarray]:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays: dict[str, np.ndarray] = dict(found.items()) if hasattr(found, "files") else {"": found}
    except OSError as error:
        raise UsageError(f"--input={path} cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile):
        raise UsageError(f"--input={path}: no {path[-4:]} file of numbers or strings, as numpy.save has") from None
    return arrays

"""The output of `--mode=predict`: written in the folder OUTPUT.partial, in its place when it is whole."""

import contextlib
import io
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from launcher.errors import UsageError


def write_lines(file: TextIO, answers: Sequence[str]) -> None:
    """Writes a line a record, at once."""
    file.writelines(f"{line}\n" for line in answers)
    file.flush()


class AnswerArrays:
    """A row a record of one array each output: a .npy file of one, a .npz file of any number.

    The folder of the partial output gets a .npy file an output: its header, for so many rows, then the rows so far.
    """

    def __init__(self, folder: Path, path: str, rows: int):
        self._folder, self._path, self._rows = folder, path, rows
        self._names: list[str] = []

    def append(self, answers: Mapping[str, np.ndarray]) -> None:
        """Adds the answers to some records, in their order."""
        self._names = self._names or list(answers)
        if self._path.endswith(".npy") and len(self._names) > 1:
            raise UsageError(f"--output={self._path}: name a .npz file for {', '.join(self._names)}")
        for index, array in enumerate(answers.values()):
            with open(self._folder / f"{index}.npy", "ab") as file:
                if not file.tell():
                    file.write(_npy_header(array, self._rows))
                file.write(np.ascontiguousarray(array).tobytes())

    def finish(self) -> None:
        """Puts the answers in their place."""
        if self._path.endswith(".npy"):
            os.replace(self._folder / "0.npy", self._path)
            return
        partial = self._folder / "outputs.npz"
        with zipfile.ZipFile(partial, "w") as file:
            for index, name in enumerate(self._names):
                file.write(self._folder / f"{index}.npy", f"{name}.npy")
        os.replace(partial, self._path)


def _npy_header(array: np.ndarray, rows: int) -> bytes:
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(header, {**described, "shape": (rows, *array.shape[1:])})
    return header.getvalue()


@contextlib.contextmanager
def partial_folder(path: str) -> Iterator[Path]:
    """The folder OUTPUT.partial, empty; gone at the end. UsageError where it cannot be made or written to."""
    folder = Path(f"{path}.partial")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
        folder.mkdir()
        yield folder
    except OSError as error:
        raise UsageError(f"--output={path} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)

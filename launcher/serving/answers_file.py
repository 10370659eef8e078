"""The output of `--mode=predict`: written in the folder OUTPUT.partial, in its place when it is whole."""

import contextlib
import io
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from launcher.errors import UsageError


class AnswersFile(Protocol):
    """Where answers go, in the order of their records."""

    def append(self, answers: Any) -> None:
        """Adds what `Inputs.answers` gave for some records."""

    def finish(self) -> None:
        """Puts the answers in their place."""
        return


class Printed(AnswersFile):
    """A line a record, on standard output."""

    def __init__(self) -> None:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]

    def append(self, answers: Sequence[str]) -> None:
        sys.stdout.writelines(f"{line}\n" for line in answers)
        sys.stdout.flush()


class AnswerLines(AnswersFile):
    """A line a record, in the folder of the partial output until it is put at `path`."""

    def __init__(self, folder: Path, path: str):
        self._partial, self._path = folder / "answers", path
        self._file = open(self._partial, "w", encoding="utf-8")  # noqa: SIM115 - closed by finish

    def append(self, answers: Sequence[str]) -> None:
        self._file.writelines(f"{line}\n" for line in answers)

    def finish(self) -> None:
        self._file.close()
        os.replace(self._partial, self._path)


class AnswerArrays(AnswersFile):
    """A row a record of one array each output: a .npy file of one, a .npz file of any number.

    The folder of the partial output gets a .npy file an output: its header, for so many rows, then the rows so far.
    """

    def __init__(self, folder: Path, path: str, rows: int):
        self._folder, self._path, self._rows = folder, path, rows
        self._names: list[str] = []

    def append(self, answers: Mapping[str, np.ndarray]) -> None:
        self._names = self._names or list(answers)
        if self._path.endswith(".npy") and len(self._names) > 1:
            raise UsageError(f"--output={self._path}: name a .npz file for {', '.join(self._names)}")
        for index, array in enumerate(answers.values()):
            with open(self._folder / f"{index}.npy", "ab") as file:
                if not file.tell():
                    file.write(_npy_header(array, self._rows))
                file.write(np.ascontiguousarray(array).tobytes())

    def finish(self) -> None:
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

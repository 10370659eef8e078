"""The output of `--mode=predict`: written beside its place, gone on with after an interruption, whole when it is there.

What is done so far lies in the folder OUTPUT.partial, with a note of what it belongs to.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from launcher.errors import UsageError

_HEADER = "belongs_to.json"


class AnswersFile(Protocol):
    """Where answers go, in the order of their records."""

    def keep(self, step: int, look_at: Callable[[str], None]) -> int:
        """Keeps of what an earlier attempt has written a multiple of `step` records, shows each kept line to `look_at`,
        and returns how many records they are."""

    def append(self, answers: Any) -> None:
        """Adds what `Inputs.answers` gave for some records."""

    def finish(self) -> None:
        """Puts the answers in their place."""


class AnswerLines:
    """A line a record.

    Args:
      folder: of the partial output.
      path: where the lines go in the end.
    """

    def __init__(self, folder: Path, path: str):
        self._partial, self._path = folder / "answers", path
        self._file: IO[str] | None = None

    def keep(self, step: int, look_at: Callable[[str], None]) -> int:
        kept = 0
        with contextlib.suppress(FileNotFoundError), open(self._partial, "rb+") as file:
            kept = sum(line.endswith(b"\n") for line in file) // step * step
            file.seek(0)
            for _ in range(kept):
                look_at(file.readline().decode())
            file.truncate()
        self._file = open(self._partial, "a", encoding="utf-8")  # noqa: SIM115 - closed by finish
        return kept

    def append(self, answers: Sequence[str]) -> None:
        assert self._file is not None, "after keep()"
        self._file.writelines(f"{line}\n" for line in answers)
        self._file.flush()

    def finish(self) -> None:
        assert self._file is not None, "after keep()"
        self._file.close()
        os.replace(self._partial, self._path)


class Printed:
    """A line a record, on standard output."""

    def keep(self, step: int, look_at: Callable[[str], None]) -> int:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        return 0

    def append(self, answers: Sequence[str]) -> None:
        sys.stdout.writelines(f"{line}\n" for line in answers)
        sys.stdout.flush()

    def finish(self) -> None:
        """All is written."""


class AnswerArrays:
    """A row a record of one array each output: a .npy file of one, a .npz file of any number.

    Args:
      folder: of the partial output, which gets a .npy file an output: its header, then the rows so far.
      path: where the arrays go in the end.
      rows: how many there will be.
    """

    def __init__(self, folder: Path, path: str, rows: int):
        self._folder, self._path, self._rows = folder, path, rows
        self._names: list[str] = []

    def keep(self, step: int, look_at: Callable[[str], None]) -> int:
        found = sorted(self._folder.glob("*.npy"))
        whole = [_rows_in(file) for file in found]
        kept = min((rows for *_, rows in whole), default=0) // step * step
        for file, (start, row_bytes, _) in zip(found, whole, strict=True):
            os.truncate(file, start + kept * row_bytes)
        return kept

    def append(self, answers: Mapping[str, np.ndarray]) -> None:
        self._names = self._names or self._checked(list(answers))
        for index, array in enumerate(answers.values()):
            with open(self._folder / f"{index}.npy", "ab") as file:
                if not file.tell():
                    file.write(_npy_header(array, self._rows))
                file.write(np.ascontiguousarray(array).tobytes())

    def _checked(self, names: list[str]) -> list[str]:
        (self._folder / "outputs.json").write_text(json.dumps(names))
        if self._path.endswith(".npy") and len(names) > 1:
            raise UsageError(
                f"--output={self._path}: the model has the outputs {', '.join(names)}; name a .npz file for them"
            )
        return names

    def finish(self) -> None:
        if self._path.endswith(".npy"):
            os.replace(self._folder / "0.npy", self._path)
            return
        partial = self._folder / "outputs.npz"
        names = json.loads((self._folder / "outputs.json").read_text())
        with zipfile.ZipFile(partial, "w") as file:
            for index, name in enumerate(names):
                file.write(self._folder / f"{index}.npy", f"{name}.npy")
        os.replace(partial, self._path)


def _npy_header(array: np.ndarray, rows: int) -> bytes:
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False}
    np.lib.format.write_array_header_1_0(header, {**described, "shape": (rows, *array.shape[1:])})
    return header.getvalue()


def _rows_in(path: Path) -> tuple[int, int, int]:
    """Where the rows of a partial .npy file begin, bytes a row, and how many whole rows there are."""
    with open(path, "rb") as file:
        try:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        except ValueError:  # killed while the header was written
            return 0, 1, 0
        start, row_bytes = file.tell(), dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        return start, row_bytes, (os.fstat(file.fileno()).st_size - start) // max(1, row_bytes)


@contextlib.contextmanager
def partial_folder(path: str, belongs_to: Mapping[str, Any] | None) -> Iterator[Path]:
    """The folder OUTPUT.partial, with what an earlier attempt left there if it belongs to the same; gone at the end.

    Args:
      path: of the output.
      belongs_to: what the answers depend on, for JSON; None where no attempt can go on with another's.

    Raises:
      UsageError: the folder cannot be made or written to.
    """
    folder = Path(f"{path}.partial")
    header = folder / _HEADER
    try:
        if belongs_to is None or _read(header) != json.loads(json.dumps(belongs_to)):
            if header.exists():
                sys.stderr.write(f"{folder} is of another input or other weights: starting anew\n")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            header.write_text(json.dumps(belongs_to))
        yield folder
    except OSError as error:
        raise UsageError(f"--output={path} cannot be written: {error.strerror or error}") from None
    except BaseException as error:
        if belongs_to is None or isinstance(error, UsageError):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _read(header: Path) -> Any:
    try:
        return json.loads(header.read_bytes())
    except (OSError, ValueError):
        return None

"""Prediction by a trained model: records in, as many answers out, in their order.

They are written in the folder OUTPUT.partial, and stand in their place when all are there.
"""

import contextlib
import dataclasses
import io
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine.no_autograph import call_converted
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.runtime import Rows
from launcher.serving.inputs import (
    ARRAY_SUFFIXES,
    IMAGE_SUFFIXES,
    Arrays,
    Images,
    Inputs,
    Lines,
    Texts,
    check_readable,
    is_pattern,
)
from launcher.serving.weights import trained
from launcher.tasks.base import ReadsImages, ReadsLines

_PROGRESS_SECONDS = 10.0


def run(plan: RunPlan, model_dir: str, *, input_path: str | None, output_path: str | None) -> None:
    """Answers every record of the input; see `open_records` for what these can be.

    Records are read as they are needed, in batches of the evaluation's size. What is answered stays in OUTPUT.partial
    until all is.

    Args:
      plan: of one process, on any of its devices; every replica answers its part of a batch.
      input_path: text, images or arrays; None for text on standard input.
      output_path: written as a whole; None for lines on standard output.

    Raises:
      UsageError: the task does not answer such records, there are no weights, or a file cannot be read or written.
    """
    _check_output(input_path, output_path)
    records = open_records(input_path, plan.recipe.task)
    made, weights = trained(plan, model_dir, "predict")
    records.prepare(made)
    sys.stderr.write(f"predicting with step {weights.step} of {model_dir}\n")
    if output_path is None:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        _write_lines(made, records, sys.stdout)
        return
    with partial_folder(output_path) as folder:
        if isinstance(records, Arrays):
            arrays = AnswerArrays(folder, output_path, len(records.records))
            for answers in _answered(made, records):
                arrays.append(answers)
            arrays.finish()
            return
        with open(folder / "answers", "w", encoding="utf-8") as file:
            _write_lines(made, records, file)
        os.replace(folder / "answers", output_path)


def _write_lines(made: Session, records: Inputs, file: TextIO) -> None:
    for answers in _answered(made, records):
        file.writelines(f"{line}\n" for line in answers)
        file.flush()


def open_records(path: str | None, task: Any) -> Inputs:
    """The records that `--input` means for a task; UsageError where it cannot read or answer them."""
    if path is not None and not is_pattern(path):
        check_readable(path)
    if path is not None and path.endswith(ARRAY_SUFFIXES):
        return Arrays(path)
    if path is not None and (is_pattern(path) or tf.io.gfile.isdir(path) or path.lower().endswith(IMAGE_SUFFIXES)):
        decode = task.decode_images if isinstance(task, ReadsImages) else None
        if decode is None:
            raise UsageError(f"--input={path}: {type(task).__name__} reads no image files; give a .npy or .npz")
        return Images(path, task, decode)
    if isinstance(task, ReadsLines):
        return Lines(path, task)
    if isinstance(task, ReadsImages):
        raise UsageError(f"--mode=predict: {type(task).__name__} takes no lines; --input is images or an array")
    return Texts(path)


def _check_output(input_path: str | None, output_path: str | None) -> None:
    is_array = input_path is not None and input_path.endswith(ARRAY_SUFFIXES)
    if is_array and (output_path is None or not output_path.endswith(ARRAY_SUFFIXES)):
        raise UsageError(
            f"--input={input_path}: name the answers --output=FILE.npy or .npz, not {output_path or 'standard output'}"
        )
    if output_path is None:
        return
    if not is_array and output_path.endswith(ARRAY_SUFFIXES):
        raise UsageError(f"--output={output_path}: answers to --input={input_path or 'standard input'} are text")
    if os.path.isdir(output_path):
        raise UsageError(f"--output={output_path} is a folder; name a file")
    if not os.path.isdir(os.path.dirname(os.path.abspath(output_path))):
        raise UsageError(f"--output={output_path}: its folder does not exist")


def _answered(made: Session, records: Inputs) -> Iterator[Any]:
    """Answers to all records, a batch at a time; says every few seconds how far it is."""
    size, done = made.plan.eval_batch_size, 0
    write = writer(made, records.answer)
    total = "" if records.records is None else f" of {len(records.records):,}"
    began = told = time.monotonic()
    for batch in records.batches(size):
        # Padded to one size, so that the last batch needs no program of its own.
        rows = 1 if len(batch) == made.trainer.num_replicas == 1 else size
        inputs = records.encode(batch, rows)
        yield records.answers(batch, write(inputs) if inputs else None)
        done += len(batch)
        if (now := time.monotonic()) - told >= _PROGRESS_SECONDS:
            told = now
            sys.stderr.write(f"answered {done:,}{total}, {done / (now - began):.3g}/s\n")
    sys.stderr.writelines(f"{remark}\n" for remark in records.remarks())


def on_all_replicas(made: Session, answer: Callable[[Any, Any], Any]) -> Rows:
    """Has the model answer every replica's part of a batch, each replica its own."""

    def write(batch: Any) -> Any:
        return call_converted(answer, made.model, batch)

    compiles = made.plan.jit_compile and not made.runtime.traits.compiles
    compiled = tf.function(write, jit_compile=True, autograph=False) if compiles else write

    def on_replica(batch: Any) -> Any:
        has_text = any(tensor.dtype == tf.string for tensor in tf.nest.flatten(batch))  # which XLA does not know
        return write(batch) if has_text else compiled(batch)

    return made.runtime.rows(on_replica)


def writer(made: Session, answer: Callable[[Any, Any], Any]) -> Callable[[Mapping[str, np.ndarray]], Any]:
    """A function of a batch, of rows divisible by the replicas, that has the model `answer` it, in NumPy arrays."""
    run = on_all_replicas(made, answer).begin()
    return lambda inputs: run(made.runtime.batch_of(inputs))


# -------------------------------------------------------------------------------------------------------- the output


@dataclasses.dataclass
class AnswerArrays:
    """A row a record of one array each output: a .npy file of one, a .npz file of any number.

    The folder of the partial output gets a .npy file an output: its header, for so many rows, then the rows so far.
    """

    folder: Path
    path: str
    rows: int
    names: Sequence[str] = ()

    def append(self, answers: Mapping[str, np.ndarray]) -> None:
        """Adds the answers to some records, in their order."""
        self.names = self.names or list(answers)
        if self.path.endswith(".npy") and len(self.names) > 1:
            raise UsageError(f"--output={self.path}: name a .npz file for {', '.join(self.names)}")
        for index, array in enumerate(answers.values()):
            with open(self.folder / f"{index}.npy", "ab") as file:
                if not file.tell():
                    file.write(_npy_header(array, self.rows))
                file.write(np.ascontiguousarray(array).tobytes())

    def finish(self) -> None:
        """Puts the answers in their place."""
        if self.path.endswith(".npy"):
            os.replace(self.folder / "0.npy", self.path)
            return
        partial = self.folder / "outputs.npz"
        with zipfile.ZipFile(partial, "w") as file:
            for index, name in enumerate(self.names):
                file.write(self.folder / f"{index}.npy", f"{name}.npy")
        os.replace(partial, self.path)


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

"""`--mode=predict`: lines in, as many lines out, in their order."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import IO

import tensorflow as tf

from launcher.errors import UsageError
from launcher.plan import RunPlan
from launcher.serving.weights import trained
from launcher.tasks.base import ReadsLines


def run(plan: RunPlan, model_dir: str, *, input_path: str | None, output_path: str | None) -> None:
    """Answers every line of the input with one line of output.

    Line breaks in an answer become spaces. Lines are read as they are needed, in batches of the evaluation's size.

    Args:
      plan: of one process on one device.
      model_dir: of the run that trained the weights.
      input_path: UTF-8 text; None for standard input.
      output_path: written as a whole; None for standard output.

    Raises:
      UsageError: the task does not read lines, there are no weights, or a file cannot be read or written.
    """
    task = plan.recipe.task
    if not isinstance(task, ReadsLines):
        raise UsageError(f"--mode=predict: {type(task).__name__} does not answer lines of text")
    if output_path is not None and not os.path.isdir(os.path.dirname(os.path.abspath(output_path))):
        raise UsageError(f"--output={output_path}: its folder does not exist")
    with _opened_input(input_path) as lines, trained(plan, model_dir, "predict") as (made, step):
        sys.stderr.write(f"predicting with step {step} of {model_dir}\n")
        generate = tf.function(
            lambda batch: task.generate(made.model, batch), jit_compile=plan.recipe.jit_compile, reduce_retracing=True
        )
        with _opened_output(output_path) as output:
            for batch in _batches(lines, plan.eval_batch_size):
                # Padded to one size, so that the last batch needs no program of its own.
                padded = [*batch, *[""] * (plan.eval_batch_size - len(batch))] if len(batch) > 1 else batch
                inputs = {name: tf.constant(array) for name, array in task.encode_lines(padded).items()}
                for answer in task.decode_lines(generate(inputs).numpy()[: len(batch)]):
                    output.write(" ".join(answer.splitlines()) + "\n")
                output.flush()


def _batches(lines: Iterator[str], size: int) -> Iterator[list[str]]:
    while batch := [line.rstrip("\r\n") for line in itertools.islice(lines, size)]:
        yield batch


@contextlib.contextmanager
def _opened_input(path: str | None) -> Iterator[Iterator[str]]:
    if path is None:
        yield _decoded(sys.stdin.buffer, "standard input")
        return
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise UsageError(f"--input={path} cannot be read: {error.strerror or error}") from None
    with file:
        yield _decoded(file, f"--input={path}")


def _decoded(file: IO[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{name}, line {number}: not UTF-8 ({error.reason})") from None


@contextlib.contextmanager
def _opened_output(path: str | None) -> Iterator[IO[str]]:
    if path is None:
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        yield sys.stdout
        return
    partial = f"{path}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            yield file
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(f"--output={path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)

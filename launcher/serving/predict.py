"""Prediction by a trained model: lines in, as many lines out, in their order."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.run.plan import RunPlan
from launcher.run.session import Session
from launcher.serving import trained
from launcher.tasks.base import ReadsLines


def run(plan: RunPlan, model_dir: str, *, input_path: str | None, output_path: str | None) -> None:
    """Answers every line of the input with one line of output.

    Line breaks in an answer become spaces. Lines are read as they are needed, in batches of the evaluation's size.

    Args:
      plan: of one process, on any of its devices; every replica answers its part of a batch.
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
    with _opened_input(input_path) as lines, trained(plan, model_dir, "predict", replicas_allowed=True) as (made, step):
        sys.stderr.write(f"predicting with step {step} of {model_dir}\n")
        generate = writer(made)
        with _opened_output(output_path) as output:
            for batch in _batches(lines, plan.eval_batch_size):
                # Padded to one size, so that the last batch needs no program of its own.
                size = 1 if len(batch) == made.strategy.num_replicas_in_sync == 1 else plan.eval_batch_size
                inputs = task.encode_lines([*batch, *[""] * (size - len(batch))])
                for answer in task.decode_lines(generate(inputs)[: len(batch)]):
                    output.write(" ".join(answer.splitlines()) + "\n")
                output.flush()


def on_all_replicas(made: Session) -> Callable:
    """A `tf.function` that takes every replica's part of a batch and has the model write, each replica for its own.

    Every new shape is traced anew, so that all of them are known: a TPU compiles nothing else.
    """
    write = functools.partial(made.plan.recipe.task.generate, made.model)
    if made.plan.jit_compile:
        write = tf.function(write, jit_compile=True)

    # Functions of their own: of a `tf.function`, MirroredStrategy would compile all replicas together; of a lambda,
    # TPUStrategy makes a name that its own checks refuse.
    def on_replica(batch: Any) -> Any:
        return write(batch)

    def on_all(batch: Any) -> Any:
        return made.strategy.run(on_replica, args=(batch,))

    return tf.function(on_all)


def writer(made: Session) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
    """A function that has the model write on all replicas.

    Returns:
      Takes a batch as the task's `encode_lines` gives it, rows divisible by the replicas; returns what `generate` gives
      for it, int32 [rows, length].
    """
    strategy, generate = made.strategy, on_all_replicas(made)

    def write(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        outputs = generate(parts(strategy, inputs))
        return np.concatenate([output.numpy() for output in strategy.experimental_local_results(outputs)])

    return write


def parts(strategy: tf.distribute.Strategy, inputs: Mapping[str, np.ndarray]) -> Any:
    """The batch with its rows divided among the replicas, in their order."""

    def part(context: tf.distribute.experimental.ValueContext) -> dict[str, tf.Tensor]:
        each, number = context.num_replicas_in_sync, context.replica_id_in_sync_group
        return {name: tf.constant(np.split(array, each)[number]) for name, array in inputs.items()}

    return strategy.experimental_distribute_values_from_function(part)


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

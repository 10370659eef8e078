"""Imports TensorFlow and Keras in about half the time, on machines where scikit-learn, matplotlib or JAX is installed.

Keras imports scikit-learn for its wrappers, matplotlib for its plots of images and pandas for the frames that `fit` is
given, TensorFlow Lite imports JAX for its converter, and TensorFlow's own old copy of Keras imports SciPy, each only if
it is there; nothing here uses them. Every worker of every attempt of a job would pay for them before its first step.
Seen with TensorFlow 2.21 and Keras 3.15; `benchmarks/starts.py` measures it.
"""

from __future__ import annotations

import builtins
import functools
import gc
import logging
import os
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.errors import UsageError
from launcher.machine import installation, versions
from launcher.machine.stderr_filter import without_early_log

# Leans on TensorFlow, Keras: importing them works without these packages. Noticed by
# tests/machine/test_tensorflow_import.py. Then: take the one that is needed out of this list; starts get slower.
_OPTIONAL = ("sklearn", "matplotlib", "jax", "pandas", "scipy")


def require_tensorflow() -> None:
    """Imports both, with little in the log; UsageError where TensorFlow is not there or Keras has another backend."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if os.environ["KERAS_BACKEND"] != "tensorflow":
        raise UsageError(f"KERAS_BACKEND={os.environ['KERAS_BACKEND']}: Launcher needs KERAS_BACKEND=tensorflow")
    try:
        import_tensorflow()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "tensorflow":
            raise
        raise UsageError(
            f"TensorFlow is not installed. Choose the extra for this machine: {installation.tensorflow_command()}"
        ) from None
    except Exception as error:  # of theirs, such as a NumPy that they were not built for
        raise UsageError(
            f"{installation.version_text()}: TensorFlow and Keras cannot be imported together "
            f"({type(error).__name__}: {error}). --mode=doctor says what does not fit; anew: "
            f"{installation.tensorflow_command()}"
        ) from error
    versions.check()
    logging.getLogger("tensorflow").setLevel(logging.ERROR)


def import_tensorflow() -> None:
    """Imports both, for the whole process. What was passed over can be imported afterwards as ever.

    Keras keeps in mind what it did not find: `keras.wrappers.SKLearn*` and `keras.visualization` say that their package
    is missing, unless that package was imported before. It takes pandas' frames as the arrays that they hold.

    Raises:
        ModuleNotFoundError: TensorFlow is not installed, or not whole.
    """
    with _absent(*_OPTIONAL), _uncollected(), _annotations_compiled_once(), without_early_log():
        import keras  # noqa: F401
        import tensorflow  # noqa: F401


@contextmanager
def _absent(*packages: str) -> Iterator[None]:
    """While it is open, importing one of the packages fails as if it were not installed, unless it was imported."""
    hidden = [package for package in packages if package not in sys.modules]
    # None is what the import system documents for "may not be found".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Objects that are made while it is open stay: modules are no garbage, and looking whether they are takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _annotations_compiled_once() -> Iterator[None]:
    """Has `typing` compile equal annotations once: TensorFlow's operations write a few dozen of them 18,000 times."""
    typing.compile = functools.cache(builtins.compile)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del typing.compile  # type: ignore[attr-defined]

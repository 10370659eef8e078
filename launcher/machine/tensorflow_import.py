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
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from launcher.errors import UsageError
from launcher.machine import child_process, installation, versions

# Leans on TensorFlow, Keras: importing them works without these packages. Noticed by
# tests/machine/test_tensorflow_import.py. Then: take the one that is needed out of this list; starts get slower.
_OPTIONAL = ("sklearn", "matplotlib", "jax", "pandas", "scipy")

_STDERR = 2
_PATIENCE_SECONDS = 5.0
# What absl's C++ logging writes before a program initialises it, whatever TF_CPP_MIN_LOG_LEVEL says. Seen with
# TensorFlow 2.21: the preamble, and "I0000 00:00:1795351047.083791    4814 port.cc:153] oneDNN custom operations …".
# Leans on TensorFlow: the log lines before absl is initialised have this form. Noticed by
# tests/machine/test_tensorflow_import.py. Then: change the pattern; nothing but the console is affected.
_PREAMBLE = r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
_LINE = r"{}[0-9]{{4}} [0-9:.]+ +[0-9]+ [A-Za-z0-9_.]+:[0-9]+\] .*"
# What is sent to all processes must not take away the last words of the one that it filters for.
_FILTER = 'trap "" INT TERM HUP; LC_ALL=C exec sed -u -E "$0"'


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


@contextmanager
def without_early_log() -> Iterator[None]:
    """Holds TensorFlow's early log lines to TF_CPP_MIN_LOG_LEVEL, which C++ code ignores while it is being loaded.

    At 1, lines of level INFO are left out, from 2 on those of level WARNING, too. Errors, fatal ones and whatever is
    not such a line are passed on, also where the process is killed by them: another process does it.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
    levels = {"0": "", "1": "I"}.get(level, "[IW]") if level.isdecimal() else ""
    if not levels:
        yield
        return
    try:
        own = os.dup(_STDERR)
    except OSError:  # it is closed
        yield
        return
    script = f"/^({_PREAMBLE}|{_LINE.format(levels)})$/d"
    process = child_process.start(["sh", "-c", _FILTER, script], stdout=own, stderr=own)
    assert process.stdin is not None
    os.dup2(process.stdin.fileno(), _STDERR)
    process.stdin.close()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(own, _STDERR)
        os.close(own)
        # It ends with its input; only what was started meanwhile, and is still there, could keep that open.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)

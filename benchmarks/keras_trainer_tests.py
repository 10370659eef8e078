"""Keras's own tests of `fit`, run as they are and with every `model.fit` going through `launcher.fit`.

    python benchmarks/keras_trainer_tests.py                # trainer_test.py of the Keras that is installed
    python benchmarks/keras_trainer_tests.py FILE --only=class_weight --page=''

FILE is a test file of Keras's; without it, the one that its wheel brings. It is run, never copied. Each case is run as
it is, which says whether it passes here at all, then through `launcher.fit` on one replica and on two. What a case
does by `evaluate`, `predict` and `train_on_batch` stays Keras's own. A case that fails on a refusal of the launcher's is
counted as that; any other has to be one that `DIFFERENT` gives a reason for.

Writes the table of `--page` between its two marks, prints a summary as JSON. Exit code 0: every case that fails is
accounted for; 1: one is not, or a reason is given for what passes.

Tried with Keras 3.15.1: its tests use `keras.src`.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import functools
import inspect
import json
import os
import re
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import pytest
import tensorflow as tf

import launcher
from launcher.errors import LauncherError

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- Written by benchmarks/keras_trainer_tests.py -->\n", "<!-- until here -->\n"
SECONDS = 120  # for one case

# Why cases differ on purpose, by the beginning of their names.
DIFFERENT: dict[str, str] = {}
# The same of those that pass on one replica and not on two.
DIFFERENT_ON_TWO: dict[str, str] = {}


class Outcome(NamedTuple):
    """What became of a case: "passed", "skipped", "refused", "failed" or "has no fit", and why."""

    kind: str
    why: str = ""


class Run:
    """A plugin of pytest's that runs cases with `fit` in the place of Keras's, and notes what becomes of them."""

    def __init__(self, fit: Callable[..., Any], strategy: tf.distribute.Strategy | None = None):
        self._fit, self._strategy = fit, strategy
        self._fits, self._scope = 0, contextlib.ExitStack()
        self.outcomes: dict[str, Outcome] = {}
        self.traces: dict[str, str] = {}

    def _enter(self) -> None:
        if self._strategy is not None:
            self._scope.enter_context(self._strategy.scope())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """Runs one case, in the strategy's scope as a function that builds a model is."""
        method, self._fits = item.obj, 0

        def fit(model: Any, *args: Any, **named: Any) -> Any:
            self._fits += 1
            self._scope.close()  # as it has Keras begin with an empty graph, which forgets the scopes it was in
            try:
                return self._fit(model, *args, **named)
            finally:
                self._enter()

        @functools.wraps(method)
        def case() -> None:
            self._enter()
            with self._scope, mock.patch.object(trainer(), "fit", fit):
                method()

        item.obj = case
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Notes what became of it."""
        report = yield
        if report.when != "call" and report.passed:
            return report
        error = call.excinfo.value if call.excinfo else None
        if report.skipped:
            self.outcomes[item.name] = Outcome("skipped", sentence(report.longrepr[-1]))
        elif isinstance(error, LauncherError):
            self.outcomes[item.name] = Outcome("refused", sentence(error))
        elif error is not None:
            self.outcomes[item.name] = Outcome("failed", sentence(f"{type(error).__name__}: {error}"))
            self.traces[item.name] = "".join(traceback.format_exception(error))
        else:
            self.outcomes[item.name] = Outcome("passed" if self._fits else "has no fit")
        return report


def trainer() -> type:
    """The class whose `fit` all models inherit."""
    return next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))


def sentence(text: Any) -> str:
    """The first one of a message, on one line."""
    line = " ".join(re.sub(r"\x1b\[\d*m", "", str(text)).split())
    return re.split(r"(?<=[a-z])[.;] ", line.removeprefix("Skipped: "))[0][:200]


def through(strategy: str | tf.distribute.Strategy, folder: Path) -> Callable[..., Any]:
    """Keras's `fit` by means of `launcher.fit`; each call has a folder of its own."""
    signature, count = inspect.signature(trainer().fit), iter(range(10**6))

    def fit(model: Any, *args: Any, **named: Any) -> Any:
        given = signature.bind(model, *args, **named).arguments
        given.pop("self")
        x, y, weight = given.pop("x", None), given.pop("y", None), given.pop("sample_weight", None)
        train = x if y is None and weight is None else (x, y) if weight is None else (x, y, weight)
        validation = given.pop("validation_data", None)
        return launcher.fit(
            lambda: as_model(model), train, validation, strategy=strategy, model_dir=str(folder / str(next(count))), **given
        )

    return fit


def as_model(model: Any) -> Any:
    """A model, as which Keras's tests take any layer with a trainer mixed in; a program has a keras.Model."""
    if not isinstance(model, keras.Model):
        kind = type(model)
        # What keras.Model overrides of a layer is the layer's all the same.
        own = {name: inspect.getattr_static(kind, name) for name in ("call", "build") if hasattr(kind, name)}
        model.__class__ = type(kind.__name__, (kind, keras.Model), own)
    return model


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Ends the process where a case hangs."""
    timer = threading.Timer(seconds, lambda: (sys.stderr.write("a case hangs\n"), os._exit(1)))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run(file: Path, only: str, run: Run) -> Run:
    """All cases of a file, or those whose names have `only` in them."""
    quiet = ["-q", "--no-header", "--no-summary", "--tb=native", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    with warnings.catch_warnings():
        code = pytest.main(
            ["-c", os.devnull, f"--rootdir={file.parent}", *quiet, "-k", only, str(file)], plugins=[run]
        )
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"{file}: pytest could not run it: {code!r}")
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", nargs="?", default=Path(inspect.getfile(trainer())).parents[2] / "trainers/trainer_test.py")
    parser.add_argument("--only", default="", help="cases whose names match, as of pytest -k")
    parser.add_argument("--page", default=str(ROOT / "docs/keras.md"), help="'' to write none")
    parser.add_argument("--passes", default="keras,one,two")
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    file = Path(arguments.file)
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "keras": Run(trainer().fit),
            "one": Run(through(one, Path(folder, "one")), one),
            "two": Run(through(two, Path(folder, "two")), two),
        }
        found = {name: run(file, arguments.only, one) for name, one in runs.items() if name in arguments.passes}
    for name, one in found.items():
        json.dump({"outcomes": one.outcomes, "traces": one.traces}, open(f"/tmp/kt_{name}.json", "w"), indent=1)


if __name__ == "__main__":
    main()

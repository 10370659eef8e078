"""Keras's own tests of `fit`, run as they are and with each `model.fit` going through `launcher.fit`.

    python benchmarks/keras_trainer_tests.py                                # writes benchmarks/notes/keras_tests.md
    python benchmarks/keras_trainer_tests.py FILE --only=raggeds --page=''

FILE is a file of Keras's tests; without it, the `trainer_test.py` that the installed wheel brings. It is run, never
copied. Each case runs as it is, which says whether it passes here at all, then through `launcher.fit` on one replica,
and, where it passes, on two. What a case does by `evaluate`, `predict` and `train_on_batch` stays Keras's own.

A case that ends with an error of the launcher's is refused. Any other that fails has to be one that `DIFFERENT` gives a
reason for. Prints a summary as JSON. Exit code 0: each case is accounted for; 1: one is not, or a reason has no case.

Tried with Keras 3.15.1.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import fnmatch
import functools
import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

_EPOCH = (
    "an epoch is `steps_per_epoch` steps, and goes on with the next pass over the data; Keras's is short where the "
    "data ends, and longer where `steps_per_execution` does not divide it"
)
_METRIC = "a metric is that of its epoch, also where a `reset_state` of its own would keep what was before"
DIFFERENT = {
    "test_fit_flow_steps_per_epoch": _EPOCH,
    "test_steps_per_epoch_not_match": _EPOCH,
    "test_steps_per_epoch_match_multi_epoch": _METRIC,
    "test_steps_per_execution_steps_per_epoch_match_multi_epoch": _EPOCH,
    "test_steps_per_execution_steps_per_epoch_not_match": _EPOCH,
    "test_steps_per_execution_steps_per_epoch_unknown_data_size_match": _METRIC,
    "test_steps_per_execution_steps_per_epoch_unknown_data_size_not_match": _EPOCH,
    "test_max_epochs_and_steps": "Keras's limits for trials, `keras.config.set_max_epochs`, are not read: say `steps`",
    "test_retracing": "a `train_step` is traced once before, to find what it applies",
}
"""Why cases differ on purpose, by the beginning of their names."""
_OWN = "Keras's own `evaluate`, `predict` and `train_on_batch` in the case fail on two replicas"
DIFFERENT_ON_TWO = {
    "test_compute_loss_no_training_backwards_compatibility": _OWN,
    "test_nested_inputs": _OWN,
    "test_recompile": _OWN,
    "test_steps_per_*_jit": _OWN,
    "test_steps_per_execution_unrolled": _OWN,
}
"""Of those that pass on one replica."""


class Outcome(NamedTuple):
    """What became of a case: "passed", "skipped", "refused", "failed" or "has no fit", why, and where."""

    kind: str
    why: str = ""
    trace: str = ""


class Run:
    """A plugin of pytest's that runs cases with `fit` in the place of Keras's, and notes what becomes of them."""

    def __init__(
        self,
        fit: Callable[..., Any],
        strategy: tf.distribute.Strategy | None = None,
        wanted: Collection[str] | None = None,
    ):
        self._fit, self._strategy, self._wanted = fit, strategy, wanted
        self._fits, self._scope = 0, contextlib.ExitStack()
        self.outcomes: dict[str, Outcome] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leaves out what is not wanted."""
        items[:] = [one for one in items if self._wanted is None or one.name in self._wanted]

    def of(self, kind: str) -> list[str]:
        """Names of the cases of which this became."""
        return [name for name, outcome in self.outcomes.items() if outcome.kind == kind]

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
            outcome = Outcome("skipped", sentence(report.longrepr[-1]))
        elif error is None:
            outcome = Outcome("passed" if self._fits else "has no fit")
        else:
            # What a callback of the case's raises is the launcher's message, too.
            is_refusal = isinstance(error, LauncherError) and not str(error).startswith("callbacks:")
            outcome = Outcome(
                "refused" if is_refusal else "failed", sentence(error), "".join(traceback.format_exception(error))
            )
        self.outcomes[item.name] = outcome
        return report


def trainer() -> type:
    """The class whose `fit` all models inherit."""
    return next(kind for kind in keras.Model.__mro__ if "fit" in vars(kind))


def sentence(text: Any) -> str:
    """The first one of a message, on one line."""
    line = " ".join(re.sub(r"\x1b\[\d*m", "", str(text)).split())
    return re.split(r"(?<=[a-z)])[.;] ", line.removeprefix("Skipped: "))[0]


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
            lambda: as_model(model),
            train,
            validation,
            strategy=strategy,
            model_dir=str(folder / str(next(count))),
            **given,
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


def run(file: Path, only: str, cases: Run) -> Run:
    """Runs the cases of a file whose names match."""
    options = [
        "-q",
        "--no-header",
        "--no-summary",
        "--tb=no",
        "--assert=plain",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
    ]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(["-c", os.devnull, f"--rootdir={file.parent}", *options, "-k", only, str(file)], [cases])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"{file}: pytest could not run it: {code!r}")
    return cases


def reason(name: str, reasons: Mapping[str, str]) -> str:
    """The one that is given for a case, or ""."""
    found = [start for start in reasons if _begins(name, start)]
    return reasons[max(found, key=len)] if found else ""


def _begins(name: str, start: str) -> bool:
    return fnmatch.fnmatchcase(name, f"{start}*")


def behaviours(file: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """The cases of each test, which has several where it has parameters."""
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    tests = [node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test")]
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(max(filter(name.startswith, tests), key=len), []).append(name)
    return found


def table(file: Path, own: Run, one: Run, two: Run) -> Iterator[str]:
    """The lines of the page."""
    yield f"Keras {keras.version()}, `{file.name}`, through `launcher.fit`; numbers are of cases:\n\n"
    yield "| test of Keras's | as Keras | also on two replicas | different on purpose | refused | why |\n"
    yield "|---|---|---|---|---|---|\n"
    for test, names in behaviours(file, own.of("passed")).items():
        kinds = collections.Counter(one.outcomes[name].kind for name in names)
        on_two = sum(two.outcomes[name].kind == "passed" for name in names if name in two.outcomes)
        why = [reason(name, DIFFERENT) for name in names if one.outcomes[name].kind == "failed"]
        why += [one.outcomes[name].why for name in names if one.outcomes[name].kind == "refused"]
        why += [reason(name, DIFFERENT_ON_TWO) for name in names if name in two.of("failed")]
        numbers = kinds["passed"], on_two, kinds["failed"], kinds["refused"]
        cells = [test.removeprefix("test_").replace("_", " "), *(str(number or "") for number in numbers)]
        yield f"| {' | '.join([*cells, '; '.join(dict.fromkeys(why)).replace('|', '/')])} |\n"
    yield f"\n{len(own.of('has no fit'))} more cases call no `fit`: `evaluate`, `predict`, `train_on_batch` and "
    yield "`compile` are Keras's own, and untouched. "
    yield f"{len(own.of('skipped'))} are for other backends or skipped by Keras.\n"
    if failed := own.of("failed"):
        whys = ", ".join(sorted({own.outcomes[name].why for name in failed}))
        yield f"{len(failed)} fail with Keras itself where this was run: {whys}.\n"


def unaccounted(runs: Mapping[str, tuple[Run, Mapping[str, str]]], whole: bool) -> Iterator[tuple[str, str]]:
    """Cases that fail without a reason, and, of a whole file, reasons without a case."""
    for where, (cases, reasons) in runs.items():
        for name in [*cases.of("failed"), *(cases.of("refused") if reasons is DIFFERENT_ON_TWO else ())]:
            if not reason(name, reasons):
                yield f"{name} on {where}", cases.outcomes[name].trace
        for start in reasons if whole else ():
            if not any(_begins(name, start) for name in cases.of("failed")):
                yield f"{start} on {where}", "a reason is given, and no such case fails"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    default = Path(inspect.getfile(keras.Model)).parents[1] / "trainers/trainer_test.py"
    parser.add_argument("file", nargs="?", type=Path, default=default, help="Keras's tests; those of the installed one")
    parser.add_argument("--only", default="", help="cases whose names match, as of pytest's -k")
    parser.add_argument(
        "--page",
        default=str(ROOT / "benchmarks/notes/keras_tests.md"),
        help="what the table is written to; '' for none",
    )
    arguments = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    file, only, folder = arguments.file, arguments.only, Path(tempfile.mkdtemp())
    try:
        own = run(file, only, Run(trainer().fit))
        on_one, on_two = tf.distribute.OneDeviceStrategy("CPU:0"), tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        one = run(file, only, Run(through(on_one, folder / "one"), on_one, own.of("passed")))
        two = run(file, only, Run(through(on_two, folder / "two"), on_two, one.of("passed")))
    finally:
        shutil.rmtree(folder)
    runs = {"one replica": (one, DIFFERENT), "two replicas": (two, DIFFERENT_ON_TWO)}
    left = dict(unaccounted(runs, whole=file == default and not only))
    if arguments.page:
        page = Path(arguments.page)
        before, begin, rest = page.read_text("utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{page} has no {BEGIN.strip()} and {END.strip()}")
        page.write_text(before + begin + "".join(table(file, own, one, two)) + end + after, encoding="utf-8")
    counts = {
        name: collections.Counter(found.kind for found in cases.outcomes.values())
        for name, cases in {"Keras": own, "one replica": one, "two replicas": two}.items()
    }
    versions = {"keras": keras.version(), "tensorflow": tf.__version__}
    print(json.dumps({**versions, "cases": counts, "unaccounted for": [*left]}, indent=2))
    for name, trace in left.items():
        print(f"\n{name}\n{trace}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())

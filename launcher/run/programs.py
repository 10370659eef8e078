"""Python programs that call `launcher.fit`, in the place of a recipe: `--gin_file=train.py`."""

import dataclasses
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.config import gin_bindings
from launcher.errors import UsageError
from launcher.run.recipe import Recipe

GROUPS: dict[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(Recipe)
    if dataclasses.is_dataclass(field.default_factory)
}
"""The class of each group of the recipe's settings, by its name."""
_UNBOUND = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitCall:
    """A call of `launcher.fit`, as what it asks for.

    Bindings of `train` go before its settings, in which a group, such as `clipping`, may be a mapping.
    """

    settings: dict[str, Any]
    model_dir: str | None = None
    replicas: int | None = None

    def recipe(self) -> Recipe:
        """The recipe that the call makes, with the bindings of gin where there are any."""
        settings = dict(self.settings)
        if _is_bound("train.steps") or _is_bound("train.epochs"):
            settings = {name: value for name, value in settings.items() if name not in ("steps", "epochs")}
        for name, make in GROUPS.items():
            if isinstance(settings.get(name), Mapping):
                settings[name] = make(**_unbound(make.__name__, settings[name]))
        return Recipe(**_unbound("train", settings))


def _unbound(configurable: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that no binding of gin goes before."""
    return {name: value for name, value in arguments.items() if not _is_bound(f"{configurable}.{name}")}


def _is_bound(parameter: str) -> bool:
    return gin_bindings.bound(parameter, _UNBOUND) is not _UNBOUND


AtFit = Callable[[FitCall], str]  # does what is asked, and returns the folder of the run
_at_fit: AtFit | None = None


class _Found(BaseException):
    """Leaves a program where it calls `fit`."""

    def __init__(self, call: FitCall):
        super().__init__()
        self.call = call


def split(gin_files: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The program among what `--gin_file` names, and the gin files; UsageError for two, or one that is not there."""
    named = [name for name in gin_files if name.endswith(".py")]
    if len(named) > 1:
        raise UsageError(f"--gin_file names two programs, {' and '.join(named)}: one run has one")
    if named and not os.path.isfile(named[0]):
        raise UsageError(f"--gin_file={named[0]}: there is no such program in {os.getcwd()}")
    return next(iter(named), None), tuple(name for name in gin_files if name not in named)


def handler() -> AtFit | None:
    """The function that does the work of `launcher.fit` in a program that the launcher runs; None in any other."""
    return _at_fit


def run(path: str, at_fit: AtFit) -> None:
    """Runs a program, as `python PATH`, whose calls of `launcher.fit` give what `at_fit` gives."""
    global _at_fit
    before, arguments, search = _at_fit, sys.argv, list(sys.path)
    _at_fit, sys.argv, sys.path[:0] = at_fit, [path], [os.path.dirname(os.path.abspath(path))]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        _at_fit, sys.argv, sys.path[:] = before, arguments, search


def first_call(path: str) -> FitCall:
    """Runs a program up to its first call of `launcher.fit`; UsageError where it ends without one."""

    def leave(call: FitCall) -> str:
        raise _Found(call)

    try:
        run(path, leave)
    except _Found as found:
        return found.call
    raise UsageError(f"--gin_file={path}: the program ended and did not call launcher.fit")

"""Python programs that call `launcher.fit`, in the place of a recipe: `--gin_file=train.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from launcher.config import gin_bindings, renamed
from launcher.errors import UsageError
from launcher.run.recipe import Recipe

GROUPS: dict[str, Any] = {
    field.name: field.default_factory
    for field in dataclasses.fields(Recipe)
    if dataclasses.is_dataclass(field.default_factory)
}
"""What makes each group of the recipe's settings, by its name."""
_UNBOUND = object()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitCall:
    """What a call of `launcher.fit` asks for.

    Attributes:
      settings: the recipe's, by name, which bindings of `train` go before; a group, such as `clipping`, may be a
        mapping.
      model_dir: the folder of the run.
      replicas: as the flag of this name.
    """

    settings: dict[str, Any]
    model_dir: str | None = None
    replicas: int | None = None

    def recipe(self) -> Recipe:
        """The recipe that the call makes, with the bindings of gin where there are any."""
        settings = renamed.grouped(self.settings, GROUPS)
        for rival in ("steps", "epochs"):
            if gin_bindings.bound(f"train.{rival}", _UNBOUND) is not _UNBOUND:
                settings.pop("steps", None)
                settings.pop("epochs", None)
        for name, make in GROUPS.items():
            if isinstance(settings.get(name), Mapping):
                settings[name] = make(**_unbound(make.__name__, settings[name]))
        return Recipe(**_unbound("train", settings))


def _unbound(configurable: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that no binding of gin goes before."""
    return {
        name: value
        for name, value in arguments.items()
        if gin_bindings.bound(f"{configurable}.{name}", _UNBOUND) is _UNBOUND
    }


AtFit = Callable[[FitCall], str]
"""Does what is asked, and returns the folder of the run."""
_at_fit: AtFit | None = None


class _Found(BaseException):
    """Leaves a program where it calls `fit`."""

    def __init__(self, call: FitCall):
        super().__init__()
        self.call = call


def split(gin_files: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """The program among what `--gin_file` names, and the gin files.

    Raises:
      UsageError: there are two programs, or it is not there.
    """
    found = [name for name in gin_files if name.endswith(".py")]
    if len(found) > 1:
        raise UsageError(f"--gin_file names two programs, {' and '.join(found)}: one run has one")
    if found and not os.path.isfile(found[0]):
        raise UsageError(f"--gin_file={found[0]}: there is no such program in {os.getcwd()}")
    return (found[0] if found else None), tuple(name for name in gin_files if name not in found)


def handler() -> AtFit | None:
    """What does the work of `launcher.fit` in a program that the launcher runs; None in any other."""
    return _at_fit


def run(path: str, at_fit: AtFit) -> None:
    """Runs a program, as `python PATH`, whose calls of `launcher.fit` give what `at_fit` gives."""
    with _handling(at_fit), _as_main(path):
        runpy.run_path(path, run_name="__main__")


def first_call(path: str) -> FitCall:
    """Runs a program up to its first call of `launcher.fit`.

    Raises:
      UsageError: it ends without one.
    """

    def leave(call: FitCall) -> str:
        raise _Found(call)

    try:
        run(path, leave)
    except _Found as found:
        return found.call
    raise UsageError(f"--gin_file={path}: the program ended and did not call launcher.fit")


@contextlib.contextmanager
def _handling(at_fit: AtFit) -> Iterator[None]:
    global _at_fit
    before, _at_fit = _at_fit, at_fit
    try:
        yield
    finally:
        _at_fit = before


@contextlib.contextmanager
def _as_main(path: str) -> Iterator[None]:
    arguments, search = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = [path], [os.path.dirname(os.path.abspath(path))]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, search

"""Users' modules that gin files import, and users' errors: what their Python raised, as what they can do about it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import gin

from launcher.config.gin_files import Import, defines
from launcher.config.gin_private import internals
from launcher.errors import LauncherError, UsageError, failures, user_code


def import_module(wanted: Import, foreign: str | None = None) -> None:
    """Imports what a gin file imports.

    Args:
      wanted: the statement.
      foreign: a folder whose modules are not run, whatever path leads to them; then no module is looked for beside the
        gin file. None where the gin file is the user's own.

    Raises:
      UsageError: there is no such module, it is one of those, or it failed.
    """
    if wanted.module.startswith("__gin__"):
        raise UsageError(f"{wanted.where}: {wanted.text}: not supported; decorate with @gin.configurable instead")
    if foreign is None and wanted.folder and wanted.folder not in sys.path:
        sys.path.insert(0, wanted.folder)  # for good: the module may import others beside it, also later
    try:
        place = None if foreign is None else _place_in(foreign, wanted.module)
        if place is None:
            importlib.import_module(wanted.module)
    except ModuleNotFoundError as error:
        if error.name and f"{wanted.module}.".startswith(f"{error.name}."):
            own = foreign is None and wanted.folder not in ("", os.getcwd())
            beside = f"beside the gin file ({wanted.folder}), " if own else ""
            raise UsageError(
                f"{wanted.where}: no module named {wanted.module!r}; it was looked for {beside}in the working "
                f"directory ({os.getcwd()}), along PYTHONPATH and among the installed packages (sys.path)"
            ) from None
        raise UsageError(f"{wanted.where}: {wanted.text} failed: {_at_fault(error)}") from error
    except Exception as error:
        raise UsageError(f"{wanted.where}: {wanted.text} failed: {_at_fault(error)}") from error
    if place is not None:
        raise UsageError(
            f"{wanted.where}: {wanted.text}: {place} lies in {foreign}, whose Python is run only with trust=True; give "
            "that if you trust whoever made this folder"
        )
    internals().imports.add(wanted.statement)


def _place_in(folder: str, module: str) -> str | None:
    """Where a module, or a package around it, lies in the folder, if it does; runs nothing that lies there."""
    for end in (*(dot.start() for dot in re.finditer(r"\.", module)), None):
        name = module[:end]
        if name in sys.modules:
            continue
        # Of a module in a package this imports the package, which has been looked at by then.
        spec = importlib.util.find_spec(name) or importlib.machinery.PathFinder.find_spec(name, [folder])
        if spec is None:
            return None  # there is no such module, as its import will say
        for place in [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations or ():
            if any(of(Path(place)).is_relative_to(of(Path(folder))) for of in (Path.absolute, Path.resolve)):
                return place
    return None


def _at_fault(error: Exception) -> str:
    place = user_code.raised_at(error)
    return f"{f'{place}: ' if place and not place.is_ours else ''}{user_code.summary(error)}"


def in_a_file(selector: str, gin_files: Sequence[str]) -> str:
    """What to do where a file beside the gin files or in the working directory defines the name; "" if none does."""
    folders = dict.fromkeys([*(os.path.dirname(os.path.abspath(file)) for file in gin_files), os.getcwd()])
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.py"))):
        if defines(path, selector.rpartition(".")[2]):
            if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
                return f": {path.name} defines it, without @gin.configurable; put that above it"
            return f": {path.name} defines it; add 'import {path.stem}' to the gin file"
    return ""


def missing_bindings(configurable: str, parameters: Sequence[str]) -> UsageError:
    """What to tell of parameters that must be bound and are not."""
    names = ", ".join(f"{configurable}.{parameter}" for parameter in parameters)
    return UsageError(
        f"required and not bound: {names}; bind it in a gin file "
        f"or with --gin_param '{configurable}.{parameters[0]} = ...'"
    )


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what comes out of configurables that gin called into what the user did wrong.

    Launcher's errors come out as they were raised, without gin's additions. A missing required binding, arguments that
    do not fit a configurable's signature, and what the user's own Python raised become a UsageError. All else passes
    unchanged.
    """
    try:
        yield
    except Exception as error:
        problem = _as_usage_error(error)
        if problem is error:
            raise
    else:
        return
    raise problem from problem.__cause__


def _as_usage_error(error: Exception) -> Exception:
    original = failures.unwrap(error)
    if isinstance(original, LauncherError):
        return original
    required = re.match(r"Required bindings for `(.*)` not provided in config: \[(.*)\]$", str(original))
    if isinstance(original, RuntimeError) and required:
        return missing_bindings(required[1], re.findall(r"'(\w+)'", required[2]))
    frames = traceback.extract_tb(original.__traceback__)
    if isinstance(original, TypeError) and frames and frames[-1].filename == gin.config.__file__:
        return UsageError(f"{original}: bind the parameter, or take the binding away")
    problem = failures.explained(error)
    return problem if isinstance(problem, Exception) else error


def clean_message(error: BaseException) -> str:
    """The message as it was raised, without the lines that gin adds on its way through configurables."""
    return str(failures.unwrap(error))

"""Users' modules that gin files import, and where a name might be that no module has."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.config.gin_files import Import, defines
from launcher.config.gin_private import internals
from launcher.errors import UsageError, user_code


def import_module(wanted: Import, foreign: str | None = None) -> None:
    """Imports what a gin file imports.

    Args:
      foreign: a folder whose modules are not run, whatever path leads to them; then no module is looked for beside the
        gin file. None where the gin file is the user's own.
    """
    if wanted.module.startswith("__gin__"):
        raise UsageError(f"{wanted.where}: {wanted.text}: not supported; decorate with @gin.configurable instead")
    if foreign is None and wanted.folder and wanted.folder not in sys.path:
        sys.path.insert(0, wanted.folder)  # for good: the module may import others beside it, also later
    try:
        place = None if foreign is None else _place_in(foreign, wanted.module)
        if place is None:
            importlib.import_module(wanted.module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{wanted.module}.".startswith(f"{missing}."):
            own = foreign is None and wanted.folder not in ("", os.getcwd())
            beside = f"beside the gin file ({wanted.folder}), " if own else ""
            raise UsageError(
                f"{wanted.where}: no module named {wanted.module!r}; it was looked for {beside}in the working "
                f"directory ({os.getcwd()}), along PYTHONPATH and among the installed packages (sys.path)"
            ) from None
        at = user_code.raised_at(error)
        place = f"{at}: " if at and not at.is_ours else ""
        raise UsageError(f"{wanted.where}: {wanted.text} failed: {place}{user_code.summary(error)}") from error
    if place is not None:
        raise UsageError(f"{wanted.where}: {wanted.text}: {place} lies in {foreign}; trust=True would run it")
    if wanted.statement is not None:
        internals().imports.add(wanted.statement)


def _place_in(folder: str, module: str) -> str | None:
    """File of a module, or of a package around it, that lies in the folder, or None; runs nothing that lies there."""
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


def in_a_file(selector: str, gin_files: Sequence[str]) -> str:
    """Advice where a file beside the gin files or in the working directory defines the name; "" if none does."""
    folders = dict.fromkeys([*(os.path.dirname(os.path.abspath(file)) for file in gin_files), os.getcwd()])
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.py"))):
        if defines(path, selector.rpartition(".")[2]):
            if getattr(sys.modules.get(path.stem), "__file__", None) == str(path):
                return f": {path.name} defines it, without @gin.configurable; put that above it"
            return f": {path.name} defines it; add 'import {path.stem}' to the gin file"
    return ""

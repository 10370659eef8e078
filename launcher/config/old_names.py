"""Old names of modules: `models` and `gin_configs`, which are in `launcher` now.

A module of the user's own, wherever Python finds it, has the name.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from launcher.errors import deprecation

_MOVED = ("models", "gin_configs")


class OldNames:
    """Finds, and loads, the module that has another name now.

    Args:
      folder: where both folders are, which is on Python's path where it is a checkout's.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """As Python asks it of each in `sys.meta_path`; None for what is the user's, or nobody's."""
        top = name.partition(".")[0]
        if top not in _MOVED:
            return None
        is_old = not self._is_users(name) if name == top else sys.modules.get(top) is sys.modules.get(f"launcher.{top}")
        if not is_old:
            return None
        return ModuleSpec(name, self) if importlib.util.find_spec(f"launcher.{name}") else None  # type: ignore

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to Python, for a moment."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Gives the name to the module that there is already."""
        name = module.__name__
        sys.modules[name] = importlib.import_module(f"launcher.{name}")
        if name in _MOVED:
            deprecation.tell(name, f"launcher.{name}")

    def _is_users(self, name: str) -> bool:
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, None)
            if spec is not None:
                folders = [*filter(os.path.isdir, spec.submodule_search_locations or ())]
                is_ours = os.path.realpath(os.path.join(self._folder, name)) in map(os.path.realpath, folders)
                holds_python = any(file.endswith(".py") for folder in folders for file in os.listdir(folder))
                return not is_ours and (spec.loader is not None or holds_python)
        return False

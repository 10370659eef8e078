"""End of a program that Python runs by itself, on an error of Launcher's: one message and its exit code."""

import os
import sys
from typing import Any

from launcher.errors import TRACEBACK, Interrupted, LauncherError, failures

CODE = "launcher_exit_code"
"""Attribute of another exception that ended `launcher.fit`, and is told by its traceback: the exit code."""


def install() -> None:
    """Has Python's hook for exceptions that nobody caught know Launcher's; any other is told as before."""
    before = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_ours, is_prompt = isinstance(error, LauncherError | Interrupted), hasattr(sys, "ps1")
        if not is_ours or is_prompt or os.environ.get(TRACEBACK) == "1":
            before(kind, error, trace)
        code = getattr(error, "exit_code" if is_ours else CODE, 0)
        if code and not is_prompt:
            if is_ours:
                sys.stderr.write(f"error: {failures.unwrap(error)}\n")
            sys.exit(code)  # which Python takes from its hook, after the functions of `atexit`

    if before.__module__ != __name__:
        sys.excepthook = end

"""CannotLowerError: what XLA says of a step that it cannot compile, in words and with the line of the user's code."""

from __future__ import annotations

import re

from launcher.errors import UsageError

_UNSUPPORTED = re.compile(r"Detected unsupported operations .*?: (\w+) \(")
_NOT_CONSTANT = re.compile(r"Input \d+ to node `\S+` with op (\w+) must be a compile-time constant")
# The frames are those of the user and of Launcher, the innermost last; TensorFlow takes its own out.
_FRAME = re.compile(r'^File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_NO_FILE = "dummy_file_name"


class CannotLowerError(UsageError):
    """XLA cannot compile the step.

    Attributes:
      operation: type of the TensorFlow operation that is to blame; None if it does not say.
      where: "file:line, in function" of the code that made it; None if it does not say.
    """

    def __init__(self, message: str, *, operation: str | None = None, where: str | None = None):
        super().__init__(message)
        self.operation = operation
        self.where = where


def explain(error: Exception) -> CannotLowerError:
    """The message of a failed `experimental_get_compiler_ir` of TensorFlow 2.21, for the user."""
    said = str(error)
    frames = [found for found in _FRAME.findall(said) if found[0] != _NO_FILE]
    where = None
    if frames:
        path, line, function = frames[-1]
        # Written without the slash in front.
        where = f"/{path.lstrip('/')}:{line}, in {function}"
    at = f" ({where})" if where else ""
    if found := _UNSUPPORTED.search(said):
        operation = found.group(1)
        # TensorFlow's own name for what is handed in from outside.
        lacks = "takes no strings" if operation == "_Arg" else f"has no operation {operation}"
        return CannotLowerError(
            f"the step cannot be compiled for an accelerator: XLA {lacks}{at}; strings, printing and Python functions "
            "belong into the data, or out of the step",
            operation=operation,
            where=where,
        )
    if found := _NOT_CONSTANT.search(said):
        operation = found.group(1)
        return CannotLowerError(
            f"the step cannot be compiled for an accelerator: a shape or an axis given to {operation} is a tensor "
            f"whose value XLA does not know{at}; give Python numbers instead",
            operation=operation,
            where=where,
        )
    first = said.strip().splitlines()[0] if said.strip() else type(error).__name__
    return CannotLowerError(f"the step cannot be compiled for an accelerator: {first}{at}", where=where)

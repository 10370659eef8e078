"""Which line of a model each operation is from: HLO's own metadata knows only the innermost frame, TensorFlow's."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import tensorflow as tf

import launcher

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python")
_OURS = f"{Path(launcher.__file__).parent}{os.sep}"
_GRADIENT = "gradient_tape/"


def user_lines(graph: tf.Graph) -> dict[str, str]:
    """ "file:line" by the operation's name, for operations that the code of a model or a task made.

    The line is the innermost that is neither a library's nor the launcher's own.
    """
    found = {}
    for operation in graph.get_operations():
        if not operation.name.startswith(_GRADIENT):
            line = _line([(frame.filename, frame.lineno) for frame in operation.traceback])
            if line:
                found[operation.name] = line
    return found


def _line(frames: Sequence[tuple[str, int]]) -> str:
    for file, line in reversed(frames):
        if file.startswith((_OURS, "<")) or any(part in file for part in _LIBRARIES):
            continue
        return f"{_relative(file)}:{line}"
    return ""


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def look_up(lines: Mapping[str, str], op_name: str) -> str:
    """The line of an operation by its name in HLO; of a gradient, the line of what it is the gradient of."""
    name = op_name.removeprefix(_GRADIENT)
    if name == op_name:
        return lines.get(name, "")
    while name:
        if name in lines:
            return lines[name]
        name = name.rpartition("/")[0]
    return ""

"""Where an operation of the compiled step is from: its layer's short name, and the line of user code that made it.

HLO's own metadata knows only the innermost frame, which is TensorFlow's, so the lines are read off TensorFlow's graph.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

import launcher
from launcher.errors.user_code import Place

_LAUNCHER = f"{Path(launcher.__file__).resolve().parent}{os.sep}"
_GRADIENT_TAPE = "gradient_tape/"
# Around what stands in the loop over microbatches.
_AROUND = re.compile(r"^(?:while(?:/body)?(?:/_\d+)?/|(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
_GRADIENT = ("gradient_tape/", "gradients/")
# A layer that is called again gets its name with a number; the step calls each for the second time.
_CALLED_AGAIN = re.compile(r"_1(?=/)")
_COUNTER = re.compile(r"_\d+$")


def short_name(op_name: str) -> str:
    """The layer's path without the counters of calls, "(backward)" behind what only the backward pass computes.

    "gradient_tape/resnet50_1/stem_1/convolution_12" gives "resnet50/stem/convolution (backward)".
    """
    # Of operations that a compiler made one of, it keeps all names.
    path = inner_name(op_name.partition(" at ")[0].partition(";")[0])
    backward = any(part in path for part in _GRADIENT)
    for part in _GRADIENT:
        path = path.replace(part, "")
    path = _COUNTER.sub("", _CALLED_AGAIN.sub("", path))
    return f"{path} (backward)" if backward and path else path


def inner_name(op_name: str) -> str:
    """The operation's name in the function that it stands in, without those of the loops and calls around it."""
    return _AROUND.sub("", op_name)


def user_lines(graph: tf.Graph) -> dict[str, str]:
    """ "file:line" by the operation's name, for operations that the code of a model or a task made.

    The line is the innermost that is neither a library's nor the launcher's own.
    """
    found = {}
    for operation in graph.get_operations():
        if not operation.name.startswith(_GRADIENT_TAPE):
            for frame in reversed(list(operation.traceback)):
                if _is_of_a_model(frame.filename):
                    found[operation.name] = f"{_relative(frame.filename)}:{frame.lineno}"
                    break
    return found


@functools.cache
def _is_of_a_model(file: str) -> bool:
    return not file.startswith(_LAUNCHER) and not Place(file, 0, "").is_library


def _relative(file: str) -> str:
    path = os.path.relpath(file)
    return file if path.startswith("..") else path


def line_of(lines: Mapping[str, str], op_name: str) -> str:
    """The line of an operation by its name in HLO; of a gradient, the line of what it is the gradient of."""
    name = op_name.removeprefix(_GRADIENT_TAPE)
    if name == op_name:
        return lines.get(name, "")
    while name:
        if name in lines:
            return lines[name]
        name = name.rpartition("/")[0]
    return ""

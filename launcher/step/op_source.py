"""Where an operation of the compiled step is from: its layer's short name, and the line of user code that made it.

HLO's own metadata knows only the innermost frame, which is TensorFlow's, so the lines are read off TensorFlow's graph.
"""

import functools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import keras
import tensorflow as tf

import launcher
from launcher.errors import UsageError
from launcher.errors.user_code import Place
from launcher.step.layers import Placed, walk

_LAUNCHER = f"{Path(launcher.__file__).resolve().parent}{os.sep}"
_GRADIENT_TAPE = "gradient_tape/"
# Around what stands in the loop over microbatches.
# Leans on TensorFlow: names of operations in loops and functions begin so. Noticed by
# tests/step/test_op_source.py. Then: find the new prefixes; only layers in preflight's tables are affected.
_AROUND = re.compile(r"^(?:while(?:/body)?(?:/_\d+)?/|(?:Stateful)?PartitionedCall(?:_\d+)?/)+")
_GRADIENT = ("gradient_tape/", "gradients/")
# A layer that is called again gets its name with a number; the step calls each for the second time.
_CALLED_AGAIN = re.compile(r"_1(?=/)")
_COUNTER = re.compile(r"_\d+$")
# Leans on TensorFlow: its error says so. Noticed by tests/step/test_op_source.py. Then: take the new words; without
# them it is raised as it is.
_NO_GRADIENT = re.compile(r"(?:registry has no entry for: |\(op type: )(\w+)")


def short_name(op_name: str) -> str:
    """The layer's path without the counters of calls, "(backward)" behind what only the backward pass computes.

    "gradient_tape/resnet50_1/stem_1/convolution_12" gives "resnet50/stem/convolution (backward)".
    """
    # Of operations that a compiler made one of, it keeps all names.
    path = inner_name(op_name.partition(" at ")[0].partition(";")[0]).partition("/XlaCallModule/")[0]
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
            frames = list(operation.traceback)
            place = user_frame([frame.filename for frame in frames])
            if place is not None:
                found[operation.name] = f"{_relative(frames[place].filename)}:{frames[place].lineno}"
    return found


def user_frame(files: Sequence[str]) -> int | None:
    """Of the frames in these files that Launcher led to, the innermost that is no library's and not Launcher's own."""
    first = next((place for place, file in enumerate(files) if file.startswith(_LAUNCHER)), 0)
    return next((place for place in reversed(range(first, len(files))) if _is_of_a_model(files[place])), None)


def layer_of(op_name: str, model: keras.Model) -> Placed | None:
    """The innermost layer that an operation is a part of, by its name; None for what stands outside of all layers."""
    scopes = [_COUNTER.sub("", scope) for scope in op_name.split("/")]
    found: dict[tuple[int, int], Placed] = {}
    for placed in walk(model):
        place = -1
        try:
            for layer in (*placed.around, placed.layer)[1:]:
                place = scopes.index(layer.name, place + 1)
        except ValueError:
            continue
        # Of layers side by side that have the names of scopes inside of one another, the outer one.
        found.setdefault((len(placed.around), -place), placed)
    depth, _ = deepest = max(found)
    return found[deepest] if depth else None


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


def at(where: str | None, layer: Placed | None) -> str:
    """What is known of a place, in brackets: the layer, and the user's line."""
    named = f"layer {layer.place!r} of type {type(layer.layer).__name__}" if layer else None
    told = "; ".join(filter(None, (named, where)))
    return f" ({told})" if told else ""


def without_gradient(error: LookupError, model: keras.Model) -> Exception:
    """The refusal of an operation, of the graph that is traced, that TensorFlow has no gradient of; else the error."""
    if not (found := _NO_GRADIENT.search(str(error))):
        return error
    graph, operation = tf.compat.v1.get_default_graph(), found.group(1)
    name = next((one.name for one in graph.get_operations() if one.type == operation), "")
    known = at(user_lines(graph).get(name), layer_of(name, model))
    return UsageError(
        f"TensorFlow has no gradient of {operation}{known}; use another operation, or tf.stop_gradient in front of it"
    )

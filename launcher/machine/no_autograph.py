"""AutoGraph, kept to the functions that users write: `call_converted` is where the step and the data call one.

AutoGraph parses, rewrites and compiles each Python function that a traced one calls, so that `if` and `for` work on
tensors: for the launcher's own functions, over two seconds of processor time before the first step of every worker. So
the graphs are traced with `autograph=False` or `no_autograph`, and only what users bring (tasks, schedules, data) is
converted, so that users may write what TensorFlow's guides show.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_AS_WRITTEN = "launcher_as_written"


def no_autograph(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: the function, and all that it calls, runs as it is written when it is traced."""
    made = tf.autograph.experimental.do_not_convert(function)
    setattr(made, _AS_WRITTEN, True)
    return made


def call_converted(
    function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Calls what a user may have written, converted by AutoGraph with all that it calls but `no_autograph`."""
    if hasattr(function, _AS_WRITTEN):  # not even the first conversion of a process, which takes a tenth of a second
        return function(*args, **kwargs)
    return _converted_call()(function, args, kwargs)


@functools.cache
def _converted_call() -> Callable[..., Any]:
    # Converted itself, so that the call in it is one that AutoGraph sees, and converts.
    return tf.autograph.to_graph(_call)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)

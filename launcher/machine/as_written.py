"""Keeps AutoGraph away from functions that need none of it: no control flow on tensors, and no call of users' code.

AutoGraph parses, rewrites and compiles each Python function that a traced one calls, so that `if` and `for` work on
tensors, at the start of every worker: seconds of processor time before the first step. The functions that call what
users bring (tasks, schedules, penalties) are left to it, so that users may write what TensorFlow's guides show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def as_written(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: the function, and all that it calls, runs as it is written when it is traced."""
    return tf.autograph.experimental.do_not_convert(function)

"""First values of variables from the host, whatever device the variables are on.

TensorFlow computes them where the variable will be. On a TPU that would be another generator of random numbers than on
CPUs and GPUs (`tf.random.Algorithm.AUTO_SELECT`), so other weights from one seed, and a compilation for each shape.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from launcher.machine import host_arrays

_LEFT_OUT = contextvars.ContextVar("first values are left out", default=False)
_LARGE = 4096  # elements


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Large variables that are made inside have no value: of memory that nobody writes, a host has enough.

    It is NumPy's, as TensorFlow's allocator with oneDNN gives no more than the host has.
    """
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def are_left_out() -> bool:
    return _LEFT_OUT.get()


@contextlib.contextmanager
def scope(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """`strategy.scope()`, in which this process's CPU computes first values for a TPU, unless they are left out."""
    creator = _from_host if isinstance(strategy, tf.distribute.TPUStrategy) else None
    creator = _without_value if are_left_out() else creator
    with strategy.scope(), contextlib.ExitStack() as inside:
        if creator is not None:
            inside.enter_context(tf.variable_creator_scope(creator))
        yield


def _from_host(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    initial_value = kwargs.get("initial_value")
    if callable(initial_value):
        # Here and now, as the strategy would otherwise call it in the scope of its first device.
        with tf.init_scope(), tf.device(None), tf.device("CPU:0"):
            kwargs["initial_value"] = initial_value()
    return next_creator(**kwargs)


def _without_value(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    value, dtype = kwargs["initial_value"], kwargs.get("dtype")
    with tf.Graph().as_default() if callable(value) else contextlib.nullcontext():
        found = tf.convert_to_tensor(value() if callable(value) else value, dtype=dtype)
    if found.shape.is_fully_defined() and found.shape.num_elements() > _LARGE:
        kwargs["initial_value"] = host_arrays.shared_tensor(np.empty(found.shape, found.dtype.as_numpy_dtype))
    return next_creator(**kwargs)

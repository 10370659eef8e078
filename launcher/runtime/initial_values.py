"""First values of variables from the host, whatever device the variables are on.

TensorFlow computes them where the variable will be. On a TPU that would be another generator of random numbers than on
CPUs and GPUs (`tf.random.Algorithm.AUTO_SELECT`), so other weights from one seed, and a compilation for each shape.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from launcher.errors import UsageError
from launcher.machine import host_arrays
from launcher.optimizers.weight_shards import WeightShard

_LEFT_OUT = contextvars.ContextVar("first values are left out", default=False)
_LARGE = 4096  # elements
_LATER = 2**22  # elements
_READS = ("value", "read_value")  # what all else that reads a variable calls, in eager mode


@dataclasses.dataclass(frozen=True)
class FirstValue:
    """What makes the first value of a variable that has none yet, but memory that nobody has written."""

    make: Callable[[], np.ndarray]
    unwritten: tf.Tensor

    def is_due(self, variable: tf.Variable) -> bool:
        """Whether nobody has given the variable another value: none is written to this memory while it is held."""
        return _address(type(variable).read_value(variable)) == _address(self.unwritten)

    def make_when_read(self, variable: tf.Variable) -> None:
        """Has who reads the variable find its first value, as `quantize` does; until `settle`."""
        for name in _READS:
            how = functools.partial(self._read, weakref.ref(variable), getattr(type(variable), name))
            vars(variable)[name] = how

    def _read(self, of: weakref.ref[tf.Variable], read: Callable[[tf.Variable], tf.Tensor]) -> tf.Tensor:
        variable = cast(tf.Variable, of())  # which is being read
        if tf.executing_eagerly() and self.is_due(variable):
            variable.assign(self.make())
        return read(variable)

    def forget(self, variable: tf.Variable) -> None:
        """Has the variable no value again, and take no memory."""
        variable.assign(self.unwritten)


FirstValues = dict[int, FirstValue]
"""By the ids of TensorFlow's variables."""


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
def scope(
    strategy: tf.distribute.Strategy | None, later: FirstValues | None = None, *, from_host: bool = False
) -> Iterator[None]:
    """The strategy's scope, if there is one, in which first values may be left out.

    Args:
      from_host: this process's CPU computes them, as for a TPU.
      later: takes what makes the first values of large variables, which have none before, and take no memory; where
        that gives the same bits whenever it is called.
    """
    creator = _from_host if from_host else None
    creator = _without_value if are_left_out() else creator
    if later is not None:
        creator = functools.partial(_with_value_later, later)
    with contextlib.ExitStack() as inside:
        if strategy is not None:
            inside.enter_context(strategy.scope())
        if creator is not None:
            inside.enter_context(tf.variable_creator_scope(creator))
        v1 = tf.compat.v1  # of which Keras's clear_session calls this
        inside.callback(setattr, v1, "reset_default_graph", v1.reset_default_graph)
        v1.reset_default_graph = _refuse
        yield


def _refuse() -> None:
    raise UsageError(
        "keras.utils.clear_session() where the model is made takes its devices and dtype policy away: call it before"
    )


def settle(later: FirstValues, model: keras.Model, divided: Sequence[WeightShard]) -> None:
    """Gives variables their first values, all but weights that are divided and have none yet."""
    parts = {id(shard.whole.value) for shard in divided}
    for variable in [one.value for one in model.variables if id(one.value) in later]:
        for name in _READS:
            vars(variable).pop(name, None)
        if not later[id(variable)].is_due(variable):  # the program has loaded or read it
            del later[id(variable)]
        elif id(variable) not in parts:
            variable.assign(later.pop(id(variable)).make())


def _from_host(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    initial_value = kwargs.get("initial_value")
    if callable(initial_value):
        # Here and now, as the strategy would otherwise call it in the scope of its first device.
        with tf.init_scope(), tf.device(None), tf.device("CPU:0"):
            kwargs["initial_value"] = initial_value()
    return next_creator(**kwargs)


def _without_value(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    found = _traced(**kwargs)
    if _is_large(found):
        kwargs["initial_value"] = _unwritten(found)
    return next_creator(**kwargs)


def _with_value_later(later: FirstValues, next_creator: Callable[..., tf.Variable], **kwargs: Any) -> tf.Variable:
    value, dtype = kwargs["initial_value"], kwargs.get("dtype")
    if not callable(value):
        return next_creator(**kwargs)
    drawn = _numbers_drawn()
    found = _traced(**kwargs)
    is_another = _numbers_drawn() != drawn  # of Python's and NumPy's generators, of which the next call is another
    random.setstate(drawn[0])
    np.random.set_state(drawn[1])
    if is_another or not _is_large(found, _LATER) or not all(map(_is_repeatable, found.graph.get_operations())):
        return next_creator(**kwargs)
    kwargs["initial_value"] = unwritten = _unwritten(found)
    variable = next_creator(**kwargs)
    later[id(variable)] = first = FirstValue(functools.partial(_made, value, dtype), unwritten)
    first.make_when_read(variable)
    return variable


def _made(value: Callable[[], Any], dtype: Any) -> np.ndarray:
    with tf.init_scope(), tf.device(None), tf.device("CPU:0"):
        return tf.convert_to_tensor(value(), dtype=dtype).numpy()


def _traced(**kwargs: Any) -> tf.Tensor:
    """What a variable begins with, of which nothing is computed."""
    value = kwargs["initial_value"]
    with tf.Graph().as_default() if callable(value) else contextlib.nullcontext():
        return tf.convert_to_tensor(value() if callable(value) else value, dtype=kwargs.get("dtype"))


def _is_large(tensor: tf.Tensor, least: int = _LARGE + 1) -> bool:
    return tensor.shape.is_fully_defined() and tensor.shape.num_elements() >= least


def _unwritten(like: tf.Tensor) -> tf.Tensor:
    return host_arrays.shared_tensor(host_arrays.aligned(like.shape, like.dtype.as_numpy_dtype))


def _address(tensor: tf.Tensor) -> int:
    return int(np.asarray(tensor).__array_interface__["data"][0])


def _numbers_drawn() -> tuple[Any, Any]:
    """The states of the generators that a program may draw from besides TensorFlow's, to be compared."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, tuple(keys), *rest)


def _is_repeatable(operation: tf.Operation) -> bool:
    """Whether it gives the same whenever it runs; a large constant may be from a generator of the program's own."""
    if operation.type == "Const":
        return not _is_large(operation.outputs[0])
    return not operation.op_def.is_stateful

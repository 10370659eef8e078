"""State of callbacks in a checkpoint: their attributes that are not as they were made, where these are plain values.

Plain are numbers, text, functions of Keras's, arrays, tensors and variables, and lists, tuples, sets and dicts of them.
What is not plain, such as a model or an open file, is of this process. No pickle: a checkpoint may be a stranger's.
"""

import collections
import contextlib
import copy
import hashlib
import inspect
import io
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.checkpoints import array_of, record_of

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_NOT_KEPT = ("params", "append_header")  # what this call says, and what CSVLogger reads off its file


def digests(callback: keras.callbacks.Callback) -> dict[str, bytes]:
    """A digest of each attribute that is plain."""
    digested = {}
    for name, value in vars(callback).items():
        with contextlib.suppress(TypeError, ValueError, NotImplementedError, RecursionError):
            arrays: list[np.ndarray] = []
            text = json.dumps(_plain(value, arrays))
            digest = hashlib.blake2b(text.encode(), digest_size=16)
            for array in arrays:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
            digested[name] = digest.digest()
    return digested


def changed(callback: keras.callbacks.Callback, first: Mapping[str, bytes], names: set[str]) -> dict[str, Any]:
    """The attributes whose digests are not the first ones, and those of these names, to which the others are added."""
    now = digests(callback)
    names |= {name for name, digest in now.items() if first.get(name) != digest and name not in _NOT_KEPT}
    return {name: vars(callback)[name] for name in sorted(now.keys() & names)}


def copied(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """All attributes, the plain ones as they are now."""
    plain = digests(callback)
    return {name: copy.deepcopy(value) if name in plain else value for name, value in vars(callback).items()}


def put(callback: keras.callbacks.Callback, state: Mapping[str, Any]) -> None:
    """Gives a callback attributes; what is a container or a variable of a kind of its own stays that."""
    for name, value in state.items():
        if name in _NOT_KEPT:  # version 0.1.0 kept all
            continue
        current = vars(callback).get(name)
        if isinstance(current, tf.Variable | keras.Variable):
            current.assign(value)
        elif isinstance(current, dict) and isinstance(value, dict) and type(current) is not dict:
            current.clear()
            current.update(value)
        elif isinstance(current, collections.deque):
            current.clear()
            current.extend(value)
        else:
            vars(callback)[name] = value


def packed(records: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Records of plain values as the bytes of a NumPy archive: JSON text, and the arrays that it names."""
    arrays: list[np.ndarray] = []
    plain = [{name: _plain(value, arrays) for name, value in record.items()} for record in records]
    named = {str(index): array for index, array in enumerate(arrays)}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, text=array_of(plain), **named)
    return np.frombuffer(file.getvalue(), np.uint8)


def unpacked(archive: np.ndarray) -> list[dict[str, Any]]:
    """The records that were packed."""
    with np.load(io.BytesIO(archive.tobytes()), allow_pickle=False) as file:

        def value_of(plain: Any) -> Any:
            match plain:
                case list():
                    return [value_of(item) for item in plain]
                case {"function": [module, name]}:
                    return _function(module, name)
                case {"array": index, "scalar": is_scalar}:
                    array = file[str(index)]
                    array = array.view(_BFLOAT16) if plain.get("bfloat16") else array
                    return array[()] if is_scalar else array
                case {"dict": dict(items)}:  # as version 0.1.0 wrote it
                    return {name: value_of(item) for name, item in items.items()}
                case {"dict": items}:
                    return dict(map(value_of, items))
                case {"tuple": items}:
                    return tuple(map(value_of, items))
                case {"set": items}:
                    return set(map(value_of, items))
            return plain

        records = record_of(file["text"])
        return [{name: value_of(value) for name, value in record.items()} for record in records]


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    """A value as JSON can hold it, with its arrays beside; TypeError where there is no such form."""
    if isinstance(value, tf.Tensor | tf.Variable | keras.Variable):
        # To read what replicas add up takes all workers.
        held = value.value if isinstance(value, keras.Variable) else value
        if isinstance(held, tf.distribute.DistributedValues):
            raise TypeError("variable of several replicas")
        value = keras.ops.convert_to_numpy(value)
    if isinstance(value, np.ndarray | np.generic):
        array, dtype = np.asarray(value), np.asarray(value).dtype
        if dtype == _BFLOAT16:  # which a NumPy archive would forget
            array = array.view(np.uint16)
        elif dtype.kind in "OV":
            raise TypeError(f"array of {dtype}")
        arrays.append(array)
        return {"array": len(arrays) - 1, "scalar": isinstance(value, np.generic), "bfloat16": dtype == _BFLOAT16}
    if isinstance(value, list | collections.deque):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, dict):
        return {"dict": [{"tuple": [_plain(part, arrays) for part in item]} for item in value.items()]}
    for kind, name in ((tuple, "tuple"), (set, "set")):
        if type(value) is kind:
            return {name: [_plain(item, arrays) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    # Such as the comparison that goes with a sign of min_delta.
    if inspect.isfunction(value) and _function(value.__module__, value.__qualname__) is value:
        return {"function": [value.__module__, value.__qualname__]}
    raise TypeError(type(value).__name__)


def _function(module: str, name: str) -> Any:
    """A function of Keras's; None for any other, which a checkpoint has no business with."""
    return getattr(sys.modules.get(module), name, None) if module.startswith("keras.") else None

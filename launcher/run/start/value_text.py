"""A value of a program as a text that is the same in every process: without addresses, counts or line numbers.

An object is told by its class and what it was made with; code of the user's own by a digest of its instructions, and of
the functions, classes and plain values that they refer to; code of libraries by its name.
"""

import argparse
import collections
import contextlib
import dataclasses
import dis
import functools
import hashlib
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launcher.config.gin_bindings import MACRO
from launcher.config.gin_private import internals
from launcher.errors.user_code import Place
from launcher.step.layers import layers_of

# By these, code changes what it refers to, whose contents are no part of the program then.
_CHANGES = ("append", "add", "extend", "insert", "update", "setdefault", "pop")
_PLAIN = bool | int | float | complex | str | bytes | None | types.EllipsisType
_STATE = keras.Variable | tf.Variable | keras.random.SeedGenerator | keras.Model
_OF_SETTINGS = type | types.SimpleNamespace | argparse.Namespace
_NOT_TOLD = ("name", "seed", "dtype", "trainable", "args", "kwargs")
_SAID = 300


def text_of(value: Any) -> str:
    """The text; of a long one its beginning, and a digest."""
    try:
        text = _text(value, {})
    except RecursionError:  # how deep it went is no matter of the value alone
        text = type(value).__name__
    return text if len(text) <= _SAID else f"{text[: _SAID // 2]}... {_digest(text.encode())}"


def settings_of(value: Any) -> dict[str, Any]:
    """Settings of an object, by name: arguments of its class that it keeps, and what `get_config` says."""
    held, config, names = getattr(value, "__dict__", {}), dict[str, Any](), list[str]()
    with contextlib.suppress(Exception):  # of a user's class
        names += inspect.signature(type(value)).parameters
        config |= value.get_config()
        config["vocabulary"] = [*map(str, value.get_vocabulary(include_special_tokens=False))]  # learned ones, too
    kept = {name: held.get(name, held.get(f"_{name}")) for name in (*names, *config)}
    # A function or an object tells more than its name in a config.
    told = {name: setting if callable(setting) else config.get(name, setting) for name, setting in kept.items()}
    return {name: setting for name, setting in told.items() if name not in _NOT_TOLD}


def of_layers(model: keras.Model) -> Iterator[tuple[str, keras.layers.Layer, dict[str, Any]]]:
    """Layers, each with its class and its number among those of its class, as names are counted in each process."""
    counts: collections.Counter[str] = collections.Counter()
    for layer in layers_of(model):
        kind = type(layer).__name__
        counts[kind] += 1
        yield f"{kind} {counts[kind]}", layer, settings_of(layer)


def is_own(value: Any) -> bool:
    """Whether a function, class or module is the user's own."""
    name = getattr(value, "__module__", None) or value.__name__
    code, module = getattr(value, "__code__", None), sys.modules.get(name)
    place = Place((code.co_filename if code else getattr(module, "__file__", None)) or "<none>", 0, "")
    return name == "__main__" or not (place.is_ours or place.is_library)


def _text(value: Any, seen: dict[int, Any]) -> str:
    try:
        return _told(value, seen)
    except RecursionError:  # else, each level would go on with the next of its parts
        raise
    except Exception:  # of a user's object
        return type(value).__name__


def _told(value: Any, seen: dict[int, Any]) -> str:
    if isinstance(value, tf.Tensor | np.ndarray | np.generic):
        array = np.asarray(value)
        if array.ndim:
            return f"{array.dtype}{list(array.shape)} {_digest(array.tobytes())}"
        value = array.item()
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, internals().reference):
        macro = internals().operative.get((repr(value)[1:], MACRO))
        return repr(value) if macro is None else _text(macro["value"], seen)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        if value.keys() >= {"class_name", "config"}:  # as Keras tells an object
            return f"{value['class_name']}({_text(value['config'], seen)})"
        return f"{{{', '.join(sorted(f'{_text(key, seen)}: {_text(item, seen)}' for key, item in value.items()))}}}"
    if isinstance(value, list | tuple | Set):
        parts = [_text(part, seen) for part in value]
        return f"[{', '.join(sorted(parts) if isinstance(value, Set) else parts)}]"
    if isinstance(value, functools.partial):
        return _text([value.func, value.args, value.keywords], seen)
    value = getattr(value, "__func__", value)
    is_known = id(value) in seen
    seen[id(value)] = value  # kept, so that no other object has this number
    if hasattr(value, "__name__"):
        code = "" if is_known else "\n".join(_code(value, seen))
        return value.__name__ + (code and f" {{code {_digest(code.encode())}}}")
    given = {} if is_known or isinstance(value, _STATE) else settings_of(value)
    parts = [f"{name}={_text(setting, seen)}" for name, setting in given.items() if setting is not None]
    return f"{_text(type(value), seen)}({', '.join(parts)})"


def _code(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Instructions and values that a function or class of the user's consists of; nothing of a library's."""
    if inspect.isclass(value):
        members = {name: member for kind in value.__mro__[::-1] if is_own(kind) for name, member in vars(kind).items()}
        members = {
            name: getattr(member, "fget", None) or getattr(member, "__func__", member)
            for name, member in members.items()
        }
        functions = {name: member for name, member in members.items() if inspect.isfunction(member)}
        counted = {
            it.argval
            for function in functions.values()
            for it in dis.get_instructions(function)
            if "STORE" in it.opname
        }
        for name, member in sorted(members.items()):
            is_plain = isinstance(member, _PLAIN | tuple) and not name.startswith("__") and name not in counted
            if callable(member) or is_plain:
                yield f"{name} {_text(member, seen)}"
        return
    function = inspect.unwrap(
        getattr(value, "python_function", value), stop=lambda one: hasattr(one, "__code__") and is_own(one)
    )
    if hasattr(function, "__code__") and is_own(function):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        scope = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
        yield from _instructions(function.__code__, scope, seen)
        yield _text([function.__defaults__, function.__kwdefaults__], seen)


def _instructions(code: types.CodeType, scope: Mapping[str, Any], seen: dict[int, Any]) -> Iterator[str]:
    """Each with what it is about; names with what they stand for, unless this code gives them another meaning."""
    instructions = [*dis.get_instructions(code)]
    words = {it.argval for it in instructions if isinstance(it.argval, str)}
    set_here = {it.argval for it in instructions if it.opname in ("STORE_GLOBAL", "STORE_DEREF")}
    sets_items = any(it.opname == "STORE_SUBSCR" for it in instructions)
    for it, following in itertools.zip_longest(instructions, instructions[1:]):
        if isinstance(it.argval, types.CodeType):
            yield from _instructions(it.argval, scope, seen)
            continue
        yield f"{it.opname} {_text(it.argval, seen)}"
        if it.opname not in ("LOAD_GLOBAL", "LOAD_DEREF") or it.argval in set_here:
            continue
        value = scope.get(it.argval)
        if isinstance(value, dict):  # of settings, those that are named here, if any are
            value = {word: value[word] for word in words & value.keys()} or value
        part, has_settings = value, isinstance(value, _OF_SETTINGS) or dataclasses.is_dataclass(value)
        if has_settings and following.opname in ("STORE_ATTR", "COPY"):
            continue  # it is set here
        if has_settings and following.opname == "LOAD_ATTR":
            part = getattr(value, following.argval, value)
        if isinstance(part, _PLAIN | tuple):
            yield _text(part, seen)
        elif isinstance(value, types.ModuleType):
            yield from (_text(vars(value)[word], seen) for word in sorted(words & vars(value).keys()) if is_own(value))
        elif following.argval not in _CHANGES and not (sets_items and isinstance(value, dict | list)):
            yield _text(value, seen)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=4).hexdigest()

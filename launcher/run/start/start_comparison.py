"""Weights of a model beside stored ones: what fits, what does not, and what has no counterpart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from launcher.checkpoints.weight_files import Stored
from launcher.errors import UsageError, advice, nearest
from launcher.reporting.units import first
from launcher.run.start.layer_pairs import Chain

BINDING, ALLOW = "StartFrom.path", "StartFrom.allow_missing"
_SHOWN = 5


class Own(NamedTuple):
    """A variable of the model or its optimizer, and where its value is looked for.

    Attributes:
      names: what patterns may call it; the first is for people.
      layer, key: as those of a `Stored`.
    """

    variable: Any
    names: tuple[str, ...]
    layer: Chain
    key: str


class Allowance:
    """Which names may be without a counterpart, and which patterns said so of none."""

    def __init__(self, patterns: Sequence[str]):
        self._unused = dict.fromkeys(patterns)
        self._patterns = patterns
        self._seen: list[str] = []

    def __call__(self, *names: str) -> bool:
        self._seen += names
        found = [one for one in self._patterns if any(re.fullmatch(one, name) for name in names)]
        for pattern in found:
            self._unused.pop(pattern, None)
        return bool(found)

    def check(self) -> None:
        """Raises UsageError where a pattern has matched nothing that it was asked about."""
        for pattern in self._unused:
            raise UsageError(
                f"{ALLOW}: {pattern!r} matches the whole name of no weight, of the model or of what it starts from"
                f"{advice(pattern, set(self._seen))}"
            )


class Comparison:
    """The model's variables and the stored arrays, with what fits, what does not, and what has no counterpart."""

    def __init__(self, allow: Allowance):
        self._allow = allow
        self.matched: list[tuple[Own, Stored, np.ndarray]] = []
        self._initial: list[Own] = []
        self._left: list[Stored] = []
        # Of another shape; as the recipe allows, and not.
        self._excused: list[tuple[Own, Stored]] = []
        self._different: list[tuple[Own, Stored]] = []

    def add(self, own: Sequence[Own], stored: Sequence[Stored], pairs: Mapping[Chain, Chain]) -> None:
        """Compares variables with arrays, whose layers go together as `layer_pairs.pair` says."""
        by_place = {(one.layer, one.key): one for one in stored}
        for one in own:
            layer = pairs.get(one.layer)
            found = by_place.pop((layer, one.key), None) if layer is not None else None
            value = None if found is None else _fitted(found.value, one.variable)
            if found is not None and value is not None:
                self.matched.append((one, found, value))
            elif found is None:
                self._initial.append(one)
            else:
                excused = self._allow(*one.names) or self._allow(*names_of(found))
                (self._excused if excused else self._different).append((one, found))
        self._left += by_place.values()

    def check(self, source: str) -> None:
        """Raises UsageError where something has no counterpart although no pattern allows it, or nothing has one."""
        initial = [one.names[0] for one in self._initial if not self._allow(*one.names)]
        left = [one.name for one in self._left if not self._allow(*names_of(one))]
        self._allow.check()
        if not self.matched and not initial + left and not self._different:
            raise UsageError(f"{BINDING}: no weight of {source} is one of the model's, and {ALLOW} allows that of all")
        here, there = [one.names[0] for one in self._initial], [one.name for one in self._left]
        problems = [
            *_listed("of the model are not there", [_beside(name, there) for name in initial]),
            *_listed("there are not of the model", [_beside(name, here) for name in left]),
            *_listed(
                "have another shape or kind",
                [
                    f"{one.names[0]} {_shown(one.variable)} ({found.name} {_shown(found.value)} there)"
                    for one, found in self._different
                ],
            ),
        ]
        if problems:
            example = (initial or left or [one.names[0] for one, _ in self._different])[0]
            example = re.sub(r"[/.][^/.]*$", "/.*", example)
            raise UsageError(
                f"{BINDING}: {source} does not fit the model.{''.join(problems)}\nTo accept weights of the model that "
                f"stay as initialised, and stored ones that are not used, list patterns of their names: {ALLOW} = "
                f"({example!r},)"
            )

    def describe(self, source: str) -> str:
        """What was found, in a line."""
        reshaped = [one.names[0] for one, found, value in self.matched if found.value.shape != value.shape]
        texts = [f"started from {source}: {len(self.matched)} weights"]
        for what, names in (
            ("reshaped", reshaped),
            ("as initialised", [one.names[0] for one in self._not_given()]),
            ("not taken from there", [one.name for one in self._not_taken()]),
        ):
            texts += [f"{len(names)} {what}: {first(names)}"] if names else []
        return "; ".join(texts)

    def listing(self) -> str:
        """What was found, a line for each weight: what is done, its name, and where its value is from."""
        lines = [
            f"loaded\t{one.names[0]} {_shown(one.variable)}\tfrom {found.name} {_shown(found.value)}"
            for one, found, _ in self.matched
        ]
        lines += [f"as initialised\t{one.names[0]} {_shown(one.variable)}" for one in self._not_given()]
        lines += [f"not taken\t{one.name} {_shown(one.value)}" for one in self._not_taken()]
        return "\n".join([*lines, ""])

    def _not_given(self) -> list[Own]:
        return [*self._initial, *(one for one, _ in self._excused)]

    def _not_taken(self) -> list[Stored]:
        return [*self._left, *(found for _, found in self._excused)]


def names_of(stored: Stored) -> tuple[str, str]:
    """What patterns may call it: its name there, and the path of its layer's names."""
    return stored.name, "/".join((*stored.layer, stored.key))


def _fitted(value: np.ndarray, variable: Any) -> np.ndarray | None:
    """The value in the variable's shape and dtype; None where more than axes of length 1 or the width differs."""
    shape, dtype = tuple(variable.shape), tf.dtypes.as_dtype(variable.dtype)
    if [size for size in value.shape if size != 1] != [size for size in shape if size != 1]:
        return None
    if tf.dtypes.as_dtype(value.dtype).is_floating != dtype.is_floating:
        return None
    return value.reshape(shape).astype(dtype.as_numpy_dtype)


def _listed(what: str, names: Sequence[str]) -> list[str]:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"\n  {len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"] if names else []


def _beside(name: str, others: Sequence[str]) -> str:
    close = nearest(name, others)
    return f"{name} (nearest: {close})" if close else name


def _shown(array: Any) -> str:
    return f"{tf.dtypes.as_dtype(array.dtype).name}{list(array.shape)}"

"""Weights that a run starts with in place of initial ones: those of a file, or of another run."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from launcher.checkpoints import CheckpointStore, weight_files
from launcher.checkpoints.weight_files import Stored
from launcher.errors import UsageError, advice, nearest
from launcher.run.layer_pairs import Chain, Layer, counted_base, pair
from launcher.step import layer_patterns
from launcher.step.freezing import first
from launcher.step.layers import Placed, owners, walk
from launcher.step.trainer import unique_name

BINDING, ALLOW, WHICH = "train.start_from", "train.start_allow", ("best", "last")
LISTING = "started_from.txt"
OPTIMIZER = "optimizer/"
_MODEL, _AVERAGE = "model/", "ema/"
_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartFrom:
    """What a recipe says of the weights to start with.

    Attributes:
      path, which, averaged, optimizer, allow: as `train.start_from`, `start_which`, … of `launcher.run.recipe.Recipe`.
    """

    path: str
    which: str
    averaged: bool
    optimizer: bool
    allow: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.which not in WHICH:
            raise UsageError(f"train.start_which = {self.which!r}: must be {' or '.join(map(repr, WHICH))}")
        if self.optimizer and self.path.endswith(weight_files.SUFFIXES):
            raise UsageError(
                f"train.start_optimizer = True: {self.path!r} is a file of weights, and the state of an optimizer is "
                f"taken from the model_dir of a run; bind {BINDING} to one"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """The weights that were found.

    Attributes:
      weights: value by the id of the model's variable, of its shape and dtype.
      slots: of the optimizer, by their names in a checkpoint.
      note: what was done, for a person.
      listing: the same, a line for each weight.
    """

    weights: dict[int, np.ndarray]
    slots: dict[str, np.ndarray]
    note: str
    listing: str


class _Source(NamedTuple):
    """What can be started from: its name for people, and its arrays. Files of Keras number a layer's weights."""

    text: str
    numbered: bool
    weights: list[Stored]
    slots: list[Stored]


class _Own(NamedTuple):
    """A variable of the model or its optimizer and where its value is looked for."""

    variable: Any
    names: tuple[str, ...]
    layer: Chain
    key: str


def read(start: StartFrom, model: keras.Model, slots: Mapping[str, Any] | None) -> Start:
    """Reads the weights and finds out which of the model's each one is; changes nothing.

    Args:
      start: what the recipe says.
      model: built.
      slots: the optimizer's variables by their names in a checkpoint; None where there is no optimizer yet.

    Raises:
      UsageError: the source cannot be read, or it has weights that the model has not, or the other way round, or of
        other shapes, and the recipe does not allow it.
    """
    source = _read(start)
    own, layers = _of_model(model, numbered=source.numbered)
    allow = _Allowance(start.allow)
    exempt = {one.layer for one in own if allow(*one.names)} | {
        one.layer for one in source.weights if allow(*_names(one))
    }
    pairs, by_order = pair(layers, _layers(source.weights), exempt)
    comparison = _Comparison(allow)
    comparison.add(own, source.weights, pairs)
    by_name = {name: _Own(variable, (name,), (), name) for name, variable in (slots or {}).items()}
    for one in source.slots:
        allow(*_names(one))
    if start.optimizer and slots is not None:
        comparison.add(list(by_name.values()), source.slots, {(): ()})
    comparison.check(source.text)
    taken = {id(one.variable): value for one, _, value in comparison.matched}
    slots_taken = {name: taken.pop(id(one.variable)) for name, one in by_name.items() if id(one.variable) in taken}
    note = comparison.describe(source.text)
    if by_order:
        shown = [f"{'/'.join(pairs[chain])} as {'/'.join(chain)}" for chain in by_order]
        note += f"; {len(by_order)} layers by their order, as Keras numbered them otherwise: {first(shown)}"
    return Start(weights=taken, slots=slots_taken, note=note, listing=comparison.listing())


def write_listing(model_dir: str, listing: str) -> None:
    """Writes what was done with each weight beside the checkpoints, if anything was.

    Raises:
      UsageError: the folder cannot be written to.
    """
    if not listing:
        return
    try:
        with tf.io.gfile.GFile(os.path.join(model_dir, LISTING), "w") as file:
            file.write(listing)
    except (OSError, tf.errors.OpError) as error:
        raise UsageError(f"{LISTING} cannot be written to --model_dir={model_dir}: {error}") from None


def _read(start: StartFrom) -> _Source:
    if not tf.io.gfile.isdir(start.path):
        return _Source(start.path, not start.path.endswith(".safetensors"), weight_files.read(start.path), [])
    store = CheckpointStore(os.path.join(start.path, "checkpoints"), is_chief=False)
    best = store.best() if start.which == "best" else None
    step = best if best is not None else store.latest()
    if step is None:
        raise UsageError(
            f"{BINDING} = {start.path!r}: there is no checkpoint in this folder; name the model_dir of a run"
        )
    arrays = store.read(step, lambda name: start.optimizer or not name.startswith(OPTIMIZER))
    averages = {f"{_MODEL}{n.removeprefix(_AVERAGE)}": a for n, a in arrays.items() if n.startswith(_AVERAGE)}
    if start.averaged:
        arrays |= averages
    weights = [weight_files.named(n.removeprefix(_MODEL), a) for n, a in arrays.items() if n.startswith(_MODEL)]
    slots = [Stored(n, (), n, a) for n, a in arrays.items() if n.startswith(OPTIMIZER)]
    which = "the best" if step == best else "the last"
    average = ", averaged" if averages and start.averaged else ""
    return _Source(f"{start.path} (step {step}, {which}{average})", False, weights, slots)


def _of_model(model: keras.Model, *, numbered: bool) -> tuple[list[_Own], list[Layer]]:
    """The weights of a model, trained or not, and its layers, as the source has their names and keys."""
    holders = owners(model, lambda layer: layer.weights)
    numbers = {id(v): key for placed in walk(model) for key, v in _numbers(placed) if id(v) in holders}
    own: list[_Own] = []
    bases: dict[Chain, str | None] = {}
    taken: dict[str, object] = {}
    for item in layer_patterns.weights(model):
        variable, holder = item.thing, holders[id(item.thing)]
        name = unique_name(item.path, taken)
        taken[name] = variable
        *around, key = (item.place if numbered else name.removeprefix(f"{model.name}/")).split("/")
        chain = tuple(around)
        key = numbers.get(id(variable), key) if numbered else key
        own.append(_Own(variable, (item.path, item.place), chain, key))
        bases[chain] = counted_base(chain[-1], type(holder.layer).__name__) if chain else None
    shapes: dict[Chain, dict[str, tuple[int, ...]]] = {chain: {} for chain in bases}
    for one in own:
        shapes[one.layer][one.key] = tuple(one.variable.shape)
    return own, [Layer(chain, base, shapes[chain]) for chain, base in bases.items()]


def _numbers(placed: Placed) -> Iterable[tuple[str, keras.Variable]]:
    """A layer's own weights by the numbers that they have in a file of Keras's."""
    found: dict[str, Any] = {}
    placed.layer.save_own_variables(found)
    return found.items()


def _layers(stored: Sequence[Stored]) -> list[Layer]:
    shapes: dict[Chain, dict[str, tuple[int, ...]]] = {}
    for one in stored:
        shapes.setdefault(one.layer, {})[one.key] = one.value.shape
    return [Layer(chain, None, found) for chain, found in shapes.items()]


class _Allowance:
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
        for pattern in self._unused:
            raise UsageError(
                f"{ALLOW}: {pattern!r} matches the whole name of no weight, of the model or of what it starts from"
                f"{advice(pattern, set(self._seen))}"
            )


class _Comparison:
    """The model's variables and the stored arrays, with what fits, what does not, and what has no counterpart."""

    def __init__(self, allow: _Allowance):
        self._allow = allow
        self.matched: list[tuple[_Own, Stored, np.ndarray]] = []
        self._initial: list[_Own] = []
        self._left: list[Stored] = []
        # Of another shape, as the recipe allows.
        self._excused_initial: list[_Own] = []
        self._excused_left: list[Stored] = []
        self._different: list[tuple[_Own, Stored]] = []

    def add(self, own: Sequence[_Own], stored: Sequence[Stored], pairs: Mapping[Chain, Chain]) -> None:
        by_place = {(one.layer, one.key): one for one in stored}
        for one in own:
            layer = pairs.get(one.layer)
            found = by_place.pop((layer, one.key), None) if layer is not None else None
            value = None if found is None else _fitted(found.value, one.variable)
            if found is not None and value is not None:
                self.matched.append((one, found, value))
            elif found is None:
                self._initial.append(one)
            elif self._allow(*one.names) or self._allow(*_names(found)):
                self._excused_initial.append(one)
                self._excused_left.append(found)
            else:
                self._different.append((one, found))
        self._left += by_place.values()

    def check(self, source: str) -> None:
        initial = [one.names[0] for one in self._initial if not self._allow(*one.names)]
        left = [one.name for one in self._left if not self._allow(*_names(one))]
        self._allow.check()
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
                f"{BINDING}: {source} does not fit the model.{''.join(problems)}\nThose of the model that may stay as "
                f"initialised, and those there that may be left out, are allowed by patterns: {ALLOW} = "
                f"({example!r},)"
            )

    def describe(self, source: str) -> str:
        reshaped = [one.names[0] for one, found, value in self.matched if found.value.shape != value.shape]
        texts = [f"started from {source}: {len(self.matched)} weights"]
        for what, names in (
            ("reshaped", reshaped),
            ("as initialised", [one.names[0] for one in (*self._initial, *self._excused_initial)]),
            ("not taken from there", [one.name for one in (*self._left, *self._excused_left)]),
        ):
            texts += [f"{len(names)} {what}: {first(names)}"] if names else []
        return "; ".join(texts)

    def listing(self) -> str:
        lines = [
            f"loaded\t{one.names[0]} {_shown(one.variable)}\tfrom {found.name} {_shown(found.value)}"
            for one, found, _ in self.matched
        ]
        lines += [
            f"as initialised\t{one.names[0]} {_shown(one.variable)}" for one in (*self._initial, *self._excused_initial)
        ]
        lines += [f"not taken\t{one.name} {_shown(one.value)}" for one in (*self._left, *self._excused_left)]
        return "\n".join([*lines, ""])


def _names(stored: Stored) -> tuple[str, str]:
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

"""Weights that a run starts with in place of initial ones: those of a file, or of another run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.checkpoints import PROGRAM, CheckpointStore, weight_files
from launcher.checkpoints.weight_files import Stored
from launcher.config.bound_types import check_value, checked_patterns, one_of
from launcher.errors import UsageError
from launcher.machine.replaced import put
from launcher.reporting.units import first
from launcher.run.start.start_comparison import (
    ALLOW,
    BINDING,
    Chain,
    Layer,
    Own,
    check,
    compare,
    counted_base,
    is_allowed,
    names_of,
    pair,
    told,
)
from launcher.run.start.value_text import of_layers, text_of
from launcher.step import layers
from launcher.step.layers import Placed, owners, walk
from launcher.step.state import unique_name

WHICH = ("best", "last")
LISTING = "started_from.txt"
OPTIMIZER = "optimizer/"
_MODEL, _AVERAGE = "model/", "ema/"
# Settings of layers without which weights behind them mean something else.
_MEANING = re.compile(
    r"(\w+Lookup|TextVectorization)\.(vocabulary|num_oov_indices|mask_token)|Hash\w+\.(num_bins|salt)"
    r"|Discretization\.bin_boundaries|Normalization\.(mean|variance)"
)


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class StartFrom:
    """The weights that a run starts with when it starts anew.

    Attributes:
      path: a `.keras`, `.weights.h5` or `.safetensors` file, or the model_dir of another run. Names tell which weight
        is which. None for initial weights.
      which: of a model_dir, "best" for its best checkpoint, if it has one, or "last" for its newest.
      averaged: of a model_dir, whether the averaged weights are taken, if the run averaged them.
      optimizer: of a model_dir, whether the state of the optimizer is taken, too.
      allow_missing: regular expressions on whole names of weights: of the model's, which may stay as initialised, and
        of those in `path`, which may be left there. What matches is taken all the same; anything else without a
        counterpart is an error.
    """

    path: str | None = None
    which: str = "best"
    averaged: bool = True
    optimizer: bool = False
    allow_missing: Sequence[str] = ()

    def __post_init__(self) -> None:
        checked_patterns(ALLOW, self.allow_missing)
        check_value("StartFrom.which", self.which, self.which in WHICH, one_of(WHICH))
        if self.optimizer and self.path is not None and self.path.endswith(weight_files.SUFFIXES):
            raise UsageError(
                f"StartFrom.optimizer = True: {self.path!r} is a file of weights, and the state of an optimizer is "
                f"taken from the model_dir of a run; bind {BINDING} to one"
            )


class Start(NamedTuple):
    """The weights that were found.

    Attributes:
      weights: value by the id of the model's variable, of its shape and dtype.
      slots: of the optimizer, by their names in a checkpoint.
      note, listing: what was done, for a person; a line for each weight.
    """

    weights: dict[int, np.ndarray]
    slots: dict[str, np.ndarray]
    note: str
    listing: str


class _Source(NamedTuple):
    """A source of weights: its name for people, its arrays, and texts of its layers' settings. Files of Keras number a
    layer's weights.
    """

    text: str
    numbered: bool
    weights: list[Stored]
    slots: list[Stored]
    settings: list[tuple[str, str]]
    note: str = ""


def read(start: StartFrom, model: keras.Model, slots: Mapping[str, Any] | None) -> Start:
    """Reads the weights and finds out which of the model's each one is; changes nothing.

    Args:
      slots: the optimizer's variables by their names in a checkpoint; None where there is no optimizer yet.

    Raises:
      UsageError: the source cannot be read, or it has weights that the model has not, or the other way round, or of
        other shapes, and the recipe does not allow it.
    """
    source, allowed = _read(start), start.allow_missing
    own, layers = _of_model(model, numbered=source.numbered)
    exempt = {weight.layer for weight in own if is_allowed(allowed, weight.names)}
    exempt |= {array.layer for array in source.weights if is_allowed(allowed, names_of(array))}
    pairs, by_order = pair(layers, _layers((one.layer, one.key, one.value) for one in source.weights), exempt)
    matches, by_name = compare(own, source.weights, pairs), dict[str, Own]()
    if start.optimizer and slots is not None:
        by_name = {name: Own(variable, (name,), (), name) for name, variable in slots.items()}
        matches += compare([*by_name.values()], source.slots, {(): ()})
    settings = list(_settings(model))
    check(
        matches, allowed, source.text, [*source.slots, *(Stored(name, (), name, np.zeros(0)) for name, *_ in settings)]
    )
    _check_settings(settings, source, allowed)
    taken = {id(match.own.variable): match.value for match in matches if match.own and match.value is not None}
    slots_taken = {name: taken.pop(id(slot.variable)) for name, slot in by_name.items() if id(slot.variable) in taken}
    note, listing = told(matches, source.text)
    if by_order:
        shown = [f"{'/'.join(pairs[chain])} as {'/'.join(chain)}" for chain in by_order]
        note += f"; {len(by_order)} layers by their order, as Keras numbered them otherwise: {first(shown)}"
    note += source.note and f"; {source.note}"
    return Start(taken, slots_taken, note, listing)


def write_listing(model_dir: str, listing: str) -> None:
    """Writes what was done with each weight beside the checkpoints, if anything was."""
    if not listing:
        return
    try:
        Path(model_dir, LISTING).write_text(listing, "utf-8")
    except OSError as error:
        raise UsageError(f"{LISTING} cannot be written to --model_dir={model_dir}: {error}") from None


def _read(start: StartFrom) -> _Source:
    assert start.path is not None
    if not tf.io.gfile.isdir(start.path):
        weights, (layers, note) = weight_files.read(start.path), weight_files.told(start.path)
        given = [(f"{kind}.{name}", value) for kind, config in layers for name, value in config.items()]
        texts = [
            (name, text_of([*map(str, value)] if name.endswith("vocabulary") else value))
            for name, value in given
            if _MEANING.fullmatch(name) and (isinstance(value, list) or not name.endswith("vocabulary"))
        ]
        return _Source(start.path, not start.path.endswith(".safetensors"), weights, [], texts, note)
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
    program = (store.manifest(step).get("run") or {}).get(PROGRAM) or {"stop": {}}
    settings = [(re.sub(r" \d+\.", ".", name), text) for name, text in program["stop"].items()]
    return _Source(f"{start.path} (step {step}, {which}{average})", False, weights, slots, settings)


def _settings(model: keras.Model) -> Iterator[tuple[str, str, set[str]]]:
    """Settings that weights have their meaning from: layer and name, class and name, and the texts that it may have."""
    for kind, layer, settings in of_layers(model):
        for name, value in settings.items():
            if _MEANING.fullmatch(setting := f"{kind.split()[0]}.{name}"):
                texts = {text_of(value)}
                if name == "vocabulary":  # Keras takes one with what stands for unknown words in front, too
                    texts.add(text_of([*map(str, layer.get_vocabulary())]))
                yield f"{layer.name}/{name}", setting, texts


def _check_settings(settings: list[tuple[str, str, set[str]]], source: _Source, allowed: Sequence[str]) -> None:
    """Raises UsageError for a setting of which the source has another value, and none of its layers has this one."""
    used = {(setting, text) for _, setting, texts in settings for text in texts}
    for name, setting, texts in settings:
        others = [text for key, text in source.settings if key == setting and (key, text) not in used]
        if others and not any((setting, text) in source.settings for text in texts) and not is_allowed(allowed, [name]):
            raise UsageError(
                f"{BINDING}: the weights of {source.text} mean something else here: {name} is {min(texts, key=len)}, "
                f"and was {others[0]} there. Give the layer what it had there; or take the weights all the same, by "
                f"{ALLOW} = ({name!r},)"
            )


def _of_model(model: keras.Model, *, numbered: bool) -> tuple[list[Own], list[Layer]]:
    """The weights of a model, trained or not, and its layers, as the source has their names and keys."""
    holders = owners(model, lambda layer: layer.weights)
    numbers = {id(v): key for placed in walk(model) for key, v in _numbers(placed) if id(v) in holders}
    own: list[Own] = []
    bases: dict[Chain, str | None] = {}
    taken: dict[str, object] = {}
    for item in layers.weights(model):
        variable, holder = item.layer, holders[id(item.layer)]
        name = unique_name(item.path, taken)
        taken[name] = variable
        *around, key = (item.place if numbered else name.removeprefix(f"{model.name}/")).split("/")
        chain = tuple(around)
        key = numbers.get(id(variable), key) if numbered else key
        own.append(Own(variable, (item.path, item.place), chain, key))
        bases[chain] = counted_base(chain[-1], type(holder.layer).__name__) if chain else None
    return own, _layers(((weight.layer, weight.key, weight.variable) for weight in own), bases)


def _numbers(placed: Placed) -> Iterable[tuple[str, keras.Variable]]:
    """A layer's own weights by the numbers that they have in a file of Keras's."""
    numbered: dict[str, Any] = {}
    with contextlib.ExitStack() as undo:
        if getattr(placed.layer, "lora_enabled", False):  # else Keras gives a kernel that its matrices are merged into
            put(undo, placed.layer, "lora_enabled", False)
        placed.layer.save_own_variables(numbered)
    return numbered.items()


def _layers(weights: Iterable[tuple[Chain, str, Any]], bases: Mapping[Chain, str | None] | None = None) -> list[Layer]:
    """The layers of weights, each weight with the chain and the key that it goes by."""
    shapes: dict[Chain, dict[str, tuple[int, ...]]] = {}
    for chain, key, array in weights:
        shapes.setdefault(chain, {})[key] = tuple(array.shape)
    return [Layer(chain, (bases or {}).get(chain), sizes) for chain, sizes in shapes.items()]

"""A model's layers: all of them, at any depth, each once.

Keras has a public list of the layers of a model, `model.layers`, and none of those that another layer holds in its
attributes, lists or dicts: a block, a wrapper such as TimeDistributed, an attention layer. Those are found here in the
layer's own attributes, which is where Keras looks for weights to train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import keras


class Placed(NamedTuple):
    """A layer, or a weight, and its place in the model.

    Attributes:
      layer: found here first; a layer that is shared has no other place.
      path: as Keras has it, also of a functional model inside of another one: as if its layers were outside. What has
        nothing to build, such as an activation, is given no path by Keras: it stands beside those that have.
      around: the layers that it is a part of, the outermost first: the model.
    """

    layer: keras.layers.Layer | keras.Variable
    path: str
    around: tuple[keras.layers.Layer, ...]

    @property
    def place(self) -> str:
        """The names of the layers around it and its own, without that of the model; of the model, its name."""
        return "/".join(layer.name for layer in (*self.around, self.layer)[1 if self.around else 0 :])

    @property
    def is_leaf(self) -> bool:
        """Whether it has no layers inside."""
        return next(_parts(self.layer), None) is None


def walk(
    model: keras.layers.Layer, *, enter: Callable[[keras.layers.Layer], bool] = lambda layer: True
) -> Iterator[Placed]:
    """The model and every layer in it, parents before their parts; `enter` says whether to look into one."""
    seen: set[int] = set()

    def visit(layer: keras.layers.Layer, path: str, around: tuple[keras.layers.Layer, ...]) -> Iterator[Placed]:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        yield Placed(layer, path, around)
        if not enter(layer):
            return
        parts = list(_parts(layer))
        beside = next((part.path for part in parts if part.path), f"{path}/")
        for part in parts:
            inside = part.path or f"{beside.rpartition('/')[0]}/{part.name}".lstrip("/")
            yield from visit(part, inside, (*around, layer))

    yield from visit(model, model.path or model.name, ())


def _trained(layer: keras.layers.Layer) -> list[keras.Variable]:
    return list(layer.trainable_variables)


def owners(
    model: keras.layers.Layer, weights: Callable[[keras.layers.Layer], list[keras.Variable]] = _trained
) -> dict[int, Placed]:
    """The layer that each weight belongs to, by the weight's id: the innermost of those around it.

    A weight that another layer uses too, as tied embeddings are, belongs to the layer that comes first. Asked for are
    the `weights` of a layer and what is inside of it, by default the trained ones.
    """
    found: dict[int, Placed] = {}
    for placed in walk(model):
        for variable in weights(placed.layer):
            outer = found.get(id(variable))
            if outer is None or any(one is outer.layer for one in placed.around):
                found[id(variable)] = placed
    return found


def group_size(layer: keras.layers.Layer) -> int | None:
    """How many consecutive examples a layer takes its statistics over; None where it has no such groups."""
    size = getattr(layer, "group_size", None)
    return size if isinstance(size, int) and size > 0 else None


def _parts(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """The layers that a layer is made of."""
    if isinstance(layer, keras.Model):
        yield from layer.layers
    # Beside its layers, a Sequential holds a functional model of the same ones.
    if not isinstance(layer, keras.Sequential):
        yield from _held(list(vars(layer).values()))


def _held(value: Any) -> Iterator[keras.layers.Layer]:
    if isinstance(value, keras.layers.Layer):
        yield value
    elif isinstance(value, Mapping):
        yield from _held(list(value.values()))
    elif isinstance(value, (list, tuple, Set)):
        for part in value:
            yield from _held(part)

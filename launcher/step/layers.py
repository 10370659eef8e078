"""A model's layers: all of them, at any depth, each once; and layers and weights named by patterns in a recipe.

Keras has a public list of the layers of a model, `model.layers`, and none of those that another layer holds in its
attributes, lists or dicts: a block, a wrapper such as TimeDistributed, an attention layer. Those are found here in the
layer's own attributes, which is where Keras looks for weights to train. Patterns have one meaning for dtype policies,
freezing and learning rates.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from launcher.errors import UsageError, advice
from launcher.machine import versions
from launcher.machine.replaced import Shared, put

_AUGMENTS = tuple(
    layer
    for name, layer in sorted(vars(keras.layers).items())
    if name.startswith("Random") or name in ("AugMix", "CutMix", "MixUp", "RandAugment")
)
_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
_RANDOM = (
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.GRUCell,
    keras.layers.LSTMCell,
    keras.layers.SimpleRNNCell,
)
# Kinds as Keras's; of abstract ones, to ask costs more than all the rest.
_HOLDERS = keras.layers.Layer, dict, list, tuple, set, frozenset


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


def layers_of(model: keras.layers.Layer, kind: Any = keras.layers.Layer) -> list[Any]:
    """All layers of a kind that `walk` finds."""
    return [layer for layer, *_ in walk(model) if isinstance(layer, kind)]


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


_penalties = Shared()


def activity_penalties(model: keras.Model, parts: float) -> contextlib.AbstractContextManager[None]:
    """Has activity regularisers count as on one device while one of `parts` equal parts of a batch is traced.

    Where Keras adds up what one says of a batch, it is the sum over the global batch; where it divides by the rows,
    their mean. What else is added to a loss is a mean over the examples beside it.
    """

    def multiply(undo: contextlib.ExitStack) -> None:
        for layer in layers_of(model) if parts > 1 and versions.sums_activity_penalties() else ():
            if (penalty := getattr(layer, "activity_regularizer", None)) is not None:
                put(undo, layer, "activity_regularizer", lambda outputs, penalty=penalty: parts * penalty(outputs))

    return _penalties.standing(multiply)


def turn_off_dropout(model: keras.Model) -> contextlib.ExitStack:
    """Turns off dropout, noise and random augmentation until what it returns is closed; before the model is traced."""
    undo = contextlib.ExitStack()
    for layer in layers_of(model, _AUGMENTS):
        put(undo, layer, "call", _never_training(layer.call))
    for layer in layers_of(model, _RANDOM):
        for name in _RATES:
            if isinstance(getattr(layer, name, None), float):
                put(undo, layer, name, 0.0)
    return undo


def _never_training(call: Callable[..., Any]) -> Callable[..., Any]:
    def inference(inputs: Any, training: bool | None = None) -> Any:
        return call(inputs, training=False)

    return inference


def owners(
    model: keras.layers.Layer,
    weights: Callable[[keras.layers.Layer], list[keras.Variable]] = lambda layer: layer.trainable_variables,
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
    """Number of consecutive examples that a layer takes its statistics over; None where it has no such groups."""
    size = getattr(layer, "group_size", None)
    return size if isinstance(size, int) and size > 0 else None


def group_sizes(model: keras.layers.Layer) -> set[int]:
    """Sizes of the groups of all layers that have such."""
    return {size for layer in layers_of(model) if (size := group_size(layer))}


def _parts(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """The layers that a layer is made of."""
    if isinstance(layer, keras.Model):
        yield from layer.layers
    # Beside its layers, a Sequential holds a functional model of the same ones.
    if not isinstance(layer, keras.Sequential):
        yield from _held(list(vars(layer).values()))


def _held(value: Any) -> list[keras.layers.Layer]:
    if isinstance(value, keras.layers.Layer):
        return [value]
    parts = list(value.values()) if isinstance(value, dict) else value
    return [one for part in parts if isinstance(part, _HOLDERS) for one in _held(part)]


def weights(model: keras.Model) -> list[Placed]:
    """The weights of a model, trained or not, in its order, each in the place of a layer inside of the one it is of."""
    found = owners(model, lambda layer: layer.weights)
    pairs = [(variable, found[id(variable)]) for variable in model.weights]
    return [Placed(variable, variable.path, (*owner.around, owner.layer)) for variable, owner in pairs]


def named(
    binding: str, patterns: Mapping[str, Any], items: Sequence[Placed], *, what: str, value: str = "values"
) -> Iterator[tuple[Placed, str]]:
    """The items that patterns name, each with its pattern, in the order of the items.

    Args:
      binding: of the patterns, for messages.
      patterns: regular expression to value. A pattern names an item when it matches its whole path or place, and with
        a layer every layer and weight inside, but those that are named themselves. A pattern that is a path, letter by
        letter, goes before others, as in `keras.dtype_policies.DTypePolicyMap`.
      items: layers before those inside of them.
      what: the items, for messages, such as "layer of mlp".
      value: what a pattern gives, for messages.

    Raises:
      UsageError: a pattern names nothing, or two give one item different values.
    """
    unused = dict.fromkeys(patterns)
    chosen: dict[int, str | None] = {}
    for item in items:
        matching = _matching(binding, item, patterns, value)
        for pattern in matching:
            unused.pop(pattern, None)
        inherited = next((chosen[id(one)] for one in reversed(item.around) if chosen.get(id(one))), None)
        chosen[id(item.layer)] = matching[0] if matching else inherited
    for pattern in unused:
        paths = {path for item in items for path in (item.path, item.place)}
        inside = any(re.fullmatch(f".*/({pattern})", path) for path in paths)
        hint = f"; did you mean {f'.*/{pattern}'!r}?" if inside else advice(pattern, paths)
        raise UsageError(f"{binding}: {pattern!r} matches the whole path of no {what}{hint}")
    for item in items:
        if (by := chosen[id(item.layer)]) is not None:
            yield item, by


def _matching(binding: str, item: Placed, patterns: Mapping[str, Any], value: str) -> list[str]:
    exact = [path for path in (item.path, item.place) if path in patterns]
    if exact:
        return exact[:1]
    found = [one for one in patterns if re.fullmatch(one, item.path) or re.fullmatch(one, item.place)]
    if len({str(patterns[one]) for one in found}) > 1:
        kind = "layer" if isinstance(item.layer, keras.layers.Layer) else "weight"
        raise UsageError(f"{binding}: {' and '.join(map(repr, found))} give {kind} {item.path} different {value}")
    return found

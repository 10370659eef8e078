"""Layers and weights named by patterns in a recipe: one meaning for dtype policies, freezing and learning rates."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from launcher.errors import UsageError, advice
from launcher.step.layers import Placed, owners


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
        raise UsageError(
            f"{binding}: {kind} {item.path} is named by {' and by '.join(map(repr, found))}, with different {value}"
        )
    return found

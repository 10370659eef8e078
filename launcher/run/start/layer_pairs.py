"""Which layer of stored weights is which layer of a model, by their names."""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

Chain = tuple[str, ...]


class Layer(NamedTuple):
    """A layer with weights.

    Attributes:
      chain: the names of the layers around it, the outermost first, and its own.
      base: what Keras counts its name up from where nobody gave it one, such as "dense" for dense_3; None where that is
        not known or the layer has a name of its own.
      shapes: of its weights, by their keys.
    """

    chain: Chain
    base: str | None
    shapes: Mapping[str, tuple[int, ...]]


def counted_base(name: str, class_name: str) -> str | None:
    """What Keras counts up, if that is where a layer of this class has its name from."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", class_name))
    base = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    return base if re.fullmatch(rf"{re.escape(base)}(_\d+)?", name) else None


def pair(
    mine: Sequence[Layer], theirs: Sequence[Layer], exempt: Collection[Chain] = ()
) -> tuple[dict[Chain, Chain], list[Chain]]:
    """Finds the stored layer of each of the model's.

    Names that Keras counted up differ between builds. Where those of one kind (dense, dense_1, …) are the same on both
    sides, or one side has the first of the other's, they go by name; where they are as many and of the same shapes, in
    their order; otherwise they have no counterpart, as each guess could be wrong. All other layers go by their name and
    those around them, of which one side may have more, as when a model has become a part of another.

    Args:
      exempt: layers of either side that may be without a counterpart, and do not count in an order.

    Returns:
      The stored layer's chain by the model's, and the model's chains that were found by order.
    """
    pairs: dict[Chain, Chain] = {}
    by_order: list[Chain] = []
    unclear: set[Chain] = set()
    for base in sorted({layer.base for layer in mine if layer.base}):
        own = _in_order([layer for layer in mine if layer.base == base and layer.chain not in exempt], base)
        other = _in_order([layer for layer in theirs if layer.chain not in exempt], base)
        count = min(len(own), len(other))
        names, other_names = ([layer.chain[-1] for layer in side] for side in (own, other))
        if names[:count] == other_names[:count] or len(set(names)) < len(own) or len(set(other_names)) < len(other):
            continue
        if [layer.shapes for layer in own] == [layer.shapes for layer in other]:
            found = {one.chain: another.chain for one, another in zip(own, other, strict=True)}
            pairs |= found
            by_order += found
        else:
            unclear |= {layer.chain for layer in own}
    known = {layer.chain for layer in theirs} - set(pairs.values())
    pairs |= {
        layer.chain: layer.chain for layer in mine if layer.chain in known and layer.chain not in unclear | set(pairs)
    }
    left = [layer.chain for layer in mine if layer.chain not in pairs and layer.chain not in unclear]
    pairs |= dict(_part_of_another(left, sorted(known - set(pairs.values()))))
    return pairs, by_order


def _in_order(layers: Sequence[Layer], base: str) -> list[Layer]:
    """Those whose name is counted up from the base, by their number."""
    counted = re.compile(rf"{re.escape(base)}(?:_(\d+))?")
    found = [(int(match[1] or 0), one) for one in layers if one.chain and (match := counted.fullmatch(one.chain[-1]))]
    return [layer for _, layer in sorted(found, key=operator.itemgetter(0))]


def _part_of_another(mine: Sequence[Chain], theirs: Sequence[Chain]) -> Iterator[tuple[Chain, Chain]]:
    """Chains of which one is the end of the other, where that is said of no third one."""

    def related(one: Chain, other: Chain) -> bool:
        count = min(len(one), len(other))
        return count > 0 and one[-count:] == other[-count:]

    for chain in mine:
        candidates = [other for other in theirs if related(chain, other)]
        if len(candidates) == 1 and [one for one in mine if related(one, candidates[0])] == [chain]:
            yield chain, candidates[0]

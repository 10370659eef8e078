"""Weights of a model beside stored ones: which is which by its layer's name, what fits, what has no counterpart."""

import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from launcher.checkpoints.weight_files import NOT_READ, Stored
from launcher.errors import UsageError, advice, nearest
from launcher.reporting.units import first

BINDING, ALLOW = "StartFrom.path", "StartFrom.allow_missing"
_SHOWN = 5


Chain = tuple[str, ...]


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


class Match(NamedTuple):
    """A variable and the stored array for it; one of them is None where it has no counterpart.

    Attributes:
      value: the array in the variable's shape and dtype; None where it cannot be.
    """

    own: Own | None
    stored: Stored | None
    value: np.ndarray | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names that patterns may call it by; the first is for people."""
        return (*(self.own.names if self.own else ()), *(names_of(self.stored) if self.stored else ()))


def is_allowed(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """Whether a pattern says of one of these names that it may be without a counterpart."""
    return any(re.fullmatch(pattern, name) for pattern in patterns for name in names)


def compare(own: Sequence[Own], stored: Sequence[Stored], pairs: Mapping[Chain, Chain]) -> list[Match]:
    """Finds the array of each variable; layers go together as `pair` says."""
    by_place = {(array.layer, array.key): array for array in stored}
    matches = []
    for mine in own:
        array = by_place.pop((pairs[mine.layer], mine.key), None) if mine.layer in pairs else None
        matches.append(Match(mine, array, None if array is None else _fitted(array.value, mine.variable)))
    return [*matches, *(Match(None, array) for array in by_place.values())]


def check(matches: Sequence[Match], patterns: Sequence[str], source: str, others: Sequence[Stored]) -> None:
    """Raises UsageError where something has no counterpart although no pattern allows it, or nothing has one.

    Patterns may be about `others`, too, which are not compared.
    """
    names = {name for match in [*matches, *(Match(None, array) for array in others)] for name in match.names}
    for pattern in patterns:
        if not is_allowed([pattern], names):
            raise UsageError(
                f"{ALLOW}: {pattern!r} matches the whole name of no weight, of the model or of what it starts from"
                f"{advice(pattern, names)}"
            )
    without = [match for match in matches if match.value is None]
    wrong = [match for match in without if not is_allowed(patterns, match.names)]
    if not wrong and len(without) == len(matches):
        raise UsageError(f"{BINDING}: no weight of {source} is one of the model's, and {ALLOW} allows that of all")
    if not wrong:
        return
    here = [match.names[0] for match in without if match.stored is None]
    there = [match.names[0] for match in without if match.own is None]
    problems = {
        "of the model are not there": [_beside(match.names[0], there) for match in wrong if match.stored is None],
        "there are not of the model": [_beside(match.names[0], here) for match in wrong if match.own is None],
        "have another shape or kind": [
            f"{match.names[0]} {_shown(match.own.variable)} ({match.stored.name} {_shown(match.stored.value)} there)"
            for match in wrong
            if match.own and match.stored
        ],
    }
    said = "".join(f"\n  {len(texts)} {what}: {first(texts, _SHOWN)}" for what, texts in problems.items() if texts)
    if any(m.own and m.stored and True in map(_is_integer, (m.own.variable, m.stored.value)) for m in wrong):
        raise UsageError(
            f"{BINDING}: {source} does not fit the model.{said}\nIntegers are weights of a quantized model, which only "
            "one that is quantized in the same way takes. Let build() open that file by keras.saving.load_model(), or "
            "start from one that was written before quantize()"
        )
    example = min(wrong, key=lambda match: bool(match.own and match.stored)).names[0]
    pattern = re.sub(r"[/.][^/.]*$", "/.*", example)
    if new := [match for match in wrong if match.stored is None and "lora_" in match.names[0]]:
        said += "\nKeras merges LoRA's matrices into their kernels where it writes a file; these would be new ones"
        pattern = ".*lora_.*" if len(new) == len(wrong) else pattern
    raise UsageError(
        f"{BINDING}: {source} does not fit the model.{said}\nTo accept weights of the model that stay as initialised, "
        f"and stored ones that are not used, list patterns of their names: {ALLOW} = ({pattern!r},)"
    )


def told(matches: Sequence[Match], source: str) -> tuple[str, str]:
    """The matches in a line, and with a line for each weight: what is done, its name, and where its value is from."""
    loaded = [(own, array, value) for own, array, value in matches if own and array and value is not None]
    initial = [own for own, _, value in matches if own and value is None]
    left = [array for _, array, value in matches if array and value is None]
    texts = [f"started from {source}: {len(loaded)} weights"]
    for what, names in (
        ("reshaped", [own.names[0] for own, array, value in loaded if array.value.shape != value.shape]),
        ("as initialised", [own.names[0] for own in initial]),
        ("not taken from there", [array.name for array in left]),
    ):
        texts += [f"{len(names)} {what}: {first(names)}"] if names else []
    lines = [
        f"loaded\t{own.names[0]} {_shown(own.variable)}\tfrom {array.name} {_shown(array.value)}"
        for own, array, _ in loaded
    ]
    lines += [f"as initialised\t{own.names[0]} {_shown(own.variable)}" for own in initial]
    lines += [f"not taken\t{array.name} {_shown(array.value)}" for array in left]
    return "; ".join(texts), "\n".join([*lines, ""])


def names_of(stored: Stored) -> tuple[str, str]:
    """Names that patterns may call it by: its name there, and the path of its layer's names."""
    return stored.name, "/".join((*stored.layer, stored.key))


def _fitted(value: np.ndarray, variable: Any) -> np.ndarray | None:
    """The value in the variable's shape and dtype; None where more than axes of length 1 or the width differs."""
    shape, dtype = tuple(variable.shape), tf.dtypes.as_dtype(variable.dtype)
    if [size for size in value.shape if size != 1] != [size for size in shape if size != 1]:
        return None
    if value.dtype == NOT_READ or tf.dtypes.as_dtype(value.dtype).is_floating != dtype.is_floating:
        return None
    return value.reshape(shape).astype(dtype.as_numpy_dtype)


def _beside(name: str, others: Sequence[str]) -> str:
    close = nearest(name, others)
    return f"{name} (nearest: {close})" if close else name


def _is_integer(array: Any) -> bool:
    return array.dtype != NOT_READ and tf.dtypes.as_dtype(array.dtype).is_integer


def _shown(array: Any) -> str:
    if array.dtype == NOT_READ:
        return f"of a kind that is not read {list(array.shape)}"
    return f"{tf.dtypes.as_dtype(array.dtype).name}{list(array.shape)}"


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
    """The word that Keras counts up, if that is where a layer of this class has its name from."""
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
            in_order = {layer.chain: another.chain for layer, another in zip(own, other, strict=True)}
            pairs |= in_order
            by_order += in_order
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
    """Layers whose name is counted up from the base, by their number."""
    counted = re.compile(rf"{re.escape(base)}(?:_(\d+))?")
    numbered = [
        (int(match[1] or 0), layer) for layer in layers if layer.chain and (match := counted.fullmatch(layer.chain[-1]))
    ]
    return [layer for _, layer in sorted(numbered, key=operator.itemgetter(0))]


def _part_of_another(mine: Sequence[Chain], theirs: Sequence[Chain]) -> Iterator[tuple[Chain, Chain]]:
    """Chains of which one is the end of the other, where that is said of no third one."""

    def related(one: Chain, other: Chain) -> bool:
        count = min(len(one), len(other))
        return count > 0 and one[-count:] == other[-count:]

    for chain in mine:
        candidates = [other for other in theirs if related(chain, other)]
        if len(candidates) == 1 and [other for other in mine if related(other, candidates[0])] == [chain]:
            yield chain, candidates[0]

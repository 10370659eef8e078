"""Several short sequences in one row of fixed length: planned once for the whole set, deterministic.

A row never splits a sequence. Where a row holds sequences of several kinds, such as source and target, those of one
example stand in the same row, in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Rows that may still be filled; more of them would fill better and take longer.
_OPEN_ROWS = 256


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Token sequences of different lengths, int64 [n], one after another in tokens [sum of lengths]."""

    tokens: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        """The place in `tokens` where each begins."""
        return np.cumsum(self.lengths) - self.lengths

    def select(self, chosen: np.ndarray) -> Sequences:
        """The sequences at `chosen`, int64 [m], in that order."""
        lengths = self.lengths[chosen]
        return Sequences(self.tokens[ranges(self.starts[chosen], lengths)], lengths)

    def ended(self, limit: int, end: int) -> Sequences:
        """The first `limit` tokens of each, and `end` behind them."""
        lengths = np.minimum(self.lengths, limit)
        tokens = self.tokens[ranges(self.starts, lengths)]
        return Sequences(np.insert(tokens, np.cumsum(lengths), end), lengths + 1)


def joined(blocks: Iterable[Sequence[Sequences]], dtype: npt.DTypeLike) -> list[Sequences]:
    """Sequences of two kinds that come in blocks, each kind one after another."""
    none = Sequences(np.zeros(0, dtype), np.zeros(0, np.int64))
    kinds = zip((none, none), *blocks, strict=True)
    return [
        Sequences(*map(np.concatenate, zip(*((part.tokens.astype(dtype), part.lengths) for part in kind), strict=True)))
        for kind in kinds
    ]


class Plan(NamedTuple):
    """Places of sequences in rows."""

    rows: np.ndarray  # int64 [n], of each example
    offsets: np.ndarray  # int64 [n, kinds], where in the row each of its sequences begins
    num_rows: int


def first_fit(lengths: np.ndarray, capacity: int) -> Plan:
    """Puts examples of lengths int64 [n, kinds], in their order, into the first open row in which all sequences fit."""
    count, kinds = lengths.shape
    if count and int(lengths.max()) > capacity:
        raise ValueError(f"a sequence of {int(lengths.max())} tokens does not fit rows of {capacity}")
    # A column for each open row. A row that does not exist yet has room for nothing.
    free = np.full((kinds, _OPEN_ROWS), -1, np.int64)
    number = [0] * _OPEN_ROWS
    rows: list[int] = []
    offsets: list[int] = []
    used = 0
    for need in lengths.tolist():
        fits = free[0] >= need[0]
        for kind in range(1, kinds):
            fits &= free[kind] >= need[kind]
        place = int(fits.argmax())
        if not fits[place]:
            # The fullest row makes room for the new one.
            place = int(free.sum(axis=0).argmin())
            number[place], free[:, place] = used, capacity
            used += 1
        rows.append(number[place])
        for kind, size in enumerate(need):
            left = int(free[kind, place])
            offsets.append(capacity - left)
            free[kind, place] = left - size
    return Plan(np.array(rows, np.int64), np.array(offsets, np.int64).reshape(count, kinds), used)


def filled(kinds: Sequence[Sequences], capacity: int, *, packed: bool = True) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows of examples of one or more kinds of sequences, see `fill`: packed, or each in one of its own."""
    count = len(kinds[0])
    if packed:
        order = scattered(count)
        kinds = [kind.select(order) for kind in kinds]
        plan = first_fit(np.stack([kind.lengths for kind in kinds], axis=1), capacity)
    else:
        plan = Plan(np.arange(count), np.zeros((count, len(kinds)), np.int64), count)
    return [fill(sequences, plan, kind, capacity) for kind, sequences in enumerate(kinds)]


def fill(sequences: Sequences, plan: Plan, kind: int, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one kind of sequence.

    Returns:
      tokens: [num_rows, capacity], 0 where there is none.
      positions: of each token in its own sequence, from 0; same shape, uint16 or, for longer rows, int32.
    """
    lengths = sequences.lengths
    begin = plan.rows * capacity + plan.offsets[:, kind]
    where = ranges(begin, lengths)
    tokens = np.zeros(plan.num_rows * capacity, sequences.tokens.dtype)
    positions: np.ndarray = np.zeros(plan.num_rows * capacity, token_dtype(capacity))
    tokens[where] = sequences.tokens
    positions[where] = where - np.repeat(begin, lengths)
    return tokens.reshape(-1, capacity), positions.reshape(-1, capacity)


def token_dtype(size: int) -> type:
    """The smallest of the integer types used here that holds ids below `size`."""
    return np.uint16 if size <= 1 << 16 else np.int32


def scattered(count: int) -> np.ndarray:
    """A fixed permutation: neighbours of a data set, which are often alike, are to meet in no row."""
    return np.random.Generator(np.random.Philox(key=count)).permutation(count)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each of the ranges, one after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - (ends - lengths), lengths)

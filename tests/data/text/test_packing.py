from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.data.text import packing


def sequences(rows, dtype=np.int32) -> packing.Sequences:
    return packing.Sequences(
        np.array([token for row in rows for token in row], dtype), np.array([*map(len, rows)], int)
    )


@st.composite
def pairs(draw):
    """A capacity and pairs of sequences that fit it."""
    capacity = draw(st.integers(1, 12))
    sequence = st.lists(st.integers(1, 99), max_size=capacity)
    return capacity, draw(st.lists(st.tuples(sequence, sequence), max_size=40))


@given(pairs())
@settings(max_examples=150, derandomize=True)
def test_packing_loses_and_doubles_nothing_and_keeps_pairs_together(drawn):
    capacity, examples = drawn
    kinds = packing.joined([[sequences(kind) for kind in zip(*examples, strict=True)]] if examples else [], np.uint16)
    lengths = np.stack([kind.lengths for kind in kinds], axis=1)
    plan = packing.first_fit(lengths, capacity)
    rows = [packing.fill(kind, plan, index, capacity) for index, kind in enumerate(kinds)]
    taken = [np.zeros((plan.num_rows, capacity), bool) for _ in kinds]
    for number, pair in enumerate(examples):
        for kind, tokens in enumerate(pair):
            row, start = plan.rows[number], plan.offsets[number, kind]
            place = slice(start, start + len(tokens))
            assert rows[kind][0][row, place].tolist() == tokens
            assert rows[kind][1][row, place].tolist() == list(range(len(tokens)))
            assert not taken[kind][row, place].any()
            taken[kind][row, place] = True
    for (tokens, positions), used in zip(rows, taken, strict=True):
        assert not tokens[~used].any() and not positions[~used].any()
    assert set(plan.rows) == set(range(plan.num_rows))


def test_rows_are_filled_well():
    lengths = np.random.default_rng(0).integers(2, 40, (5000, 1))
    plan = packing.first_fit(lengths, 64)
    assert lengths.sum() / (plan.num_rows * 64) > 0.95


def test_a_sequence_longer_than_a_row_is_our_mistake():
    with pytest.raises(ValueError, match="of 5 tokens does not fit rows of 4"):
        packing.first_fit(np.array([[5]]), 4)


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=12), st.data())
@settings(max_examples=50, derandomize=True)
def test_selected_sequences_are_those_asked_for(rows, data):
    chosen = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(0, len(rows)))]
    cut = data.draw(st.integers(0, len(rows)))
    whole, _ = packing.joined([(sequences(part), sequences([])) for part in (rows[:cut], rows[cut:])], np.int32)
    selected = whole.select(np.array(chosen, np.int64))
    parts = np.split(selected.tokens, np.cumsum(selected.lengths))[:-1]
    assert [part.tolist() for part in parts] == [rows[index] for index in chosen]


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=8), st.integers(0, 5))
@settings(max_examples=50, derandomize=True)
def test_ended_sequences_are_cut_and_have_an_end(rows, limit):
    ended = sequences(rows).ended(limit, 77)
    parts = np.split(ended.tokens, np.cumsum(ended.lengths))[:-1]
    assert [part.tolist() for part in parts] == [[*row[:limit], 77] for row in rows]


def test_scattering_is_a_permutation_and_the_same_every_time():
    assert sorted(packing.scattered(500)) == list(range(500))
    np.testing.assert_array_equal(packing.scattered(500), packing.scattered(500))
    assert (packing.scattered(500) != np.arange(500)).mean() > 0.9


@pytest.mark.parametrize(("size", "dtype"), [(1000, np.uint16), (65536, np.uint16), (65537, np.int32)])
def test_tokens_are_stored_in_the_smallest_type_that_holds_them(size, dtype):
    assert packing.token_dtype(size) is dtype
    assert np.array(size - 1).astype(dtype) == size - 1

"""The search for the largest batch that fits, on memory that goes up in every way a compiler has been seen to."""

from __future__ import annotations

import pytest

from launcher.preflight.searches import next_size

SHARES = {
    "a line": lambda size: 0.1 + size / 700,
    "a line from the refused side": lambda size: 0.1 + size / 30,
    "steps of padding": lambda size: 0.1 + -(-size // 64) * 64 / 900,
    "computing twice before it gives up": lambda size: min(0.1 + size / 200, 0.99) if size <= 500 else size / 500,
    "computing twice over a long stretch": lambda size: (
        min(size / 4300, 0.9 + size / 1e5) if size <= 7547 else 1 + size / 5e4
    ),
    "more than in proportion": lambda size: 0.05 + (size / 300) ** 2,
    "less than in proportion": lambda size: (size / 5000) ** 0.5,
}


def searched(share, start):
    needed, fitting = {}, set()
    while (size := next_size(needed, fitting, start=start)) is not None:
        assert size >= 1
        assert size not in needed, "nothing is compiled twice"
        needed[size] = share(size)
        if needed[size] <= 1:
            fitting.add(size)
    return needed, fitting


@pytest.mark.parametrize("start", [1, 64, 4096])
@pytest.mark.parametrize("kind", SHARES)
def test_the_largest_batch_is_found_and_the_next_one_refused(kind, start):
    share = SHARES[kind]
    needed, fitting = searched(share, start)
    largest = max(size for size in range(1, 20_000) if share(size) <= 1)
    assert max(fitting) == largest
    assert largest + 1 in needed, "that the next does not fit was tried, not concluded"
    assert len(needed) <= 22, list(needed)


def test_where_not_even_the_smallest_fits_the_search_ends_there():
    needed, fitting = searched(lambda size: 1 + size / 100, 64)
    assert not fitting
    assert min(needed) == 1

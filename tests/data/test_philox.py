from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from launcher.data.philox import philox, split_words, uniform

# kat_vectors of Random123, the authors' own implementation: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _words(values):
    return tuple(tf.constant(value, tf.uint64) for value in values)


def _seeds(count: int) -> np.ndarray:
    """The least random seeds there are: 0, 1, 2, …"""
    return np.stack([np.arange(count), np.zeros(count)], axis=1).astype(np.int32)


def _chi_square(cells: np.ndarray, num_cells: int) -> float:
    """A degree of freedom; 1 for uniform ones, give or take sqrt(2 / num_cells)."""
    counts = np.bincount(cells, minlength=num_cells)
    expected = len(cells) / num_cells
    return float(((counts - expected) ** 2 / expected).sum() / (num_cells - 1))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert tuple(int(word) for word in philox(_words(key), _words(counter))) == expected


def test_split_words_gives_the_same_words_for_a_number_and_a_tensor():
    for value in (0, 1, 2**40 + 7, -1, -(2**40)):
        words = [int(word) for word in split_words(value)]
        assert words == [int(word) for word in split_words(tf.constant(value, tf.int64))]
        assert words[0] + (words[1] << 32) == value % 2**64


def test_a_seed_gives_the_same_numbers_in_any_batch():
    seeds = _seeds(50)
    together = uniform(seeds, 9, purpose=1).numpy()
    alone = np.concatenate([uniform(seeds[i : i + 1], 9, purpose=1).numpy() for i in range(50)])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(uniform(seeds, 3, purpose=1).numpy(), together[:, :3])


def test_numbers_are_uniform_over_neighbouring_seeds():
    numbers = uniform(_seeds(100_000), 5, purpose=1).numpy()
    assert numbers.dtype == np.float32
    assert numbers.min() >= 0 and numbers.max() < 1
    for draw in numbers.T:
        # 1,000 cells: the standard deviation of the statistic is 0.045.
        assert abs(_chi_square((draw * 1000).astype(int), 1000) - 1) < 0.2


def test_neighbouring_seeds_draws_and_purposes_are_independent():
    first, other_purpose = (uniform(_seeds(100_000), 5, purpose=purpose).numpy() for purpose in (1, 2))
    pairs = [
        (first[:-1, 0], first[1:, 0]),  # seeds
        (first[:, 0], first[:, 1]),  # draws of one block
        (first[:, 0], first[:, 4]),  # draws of two blocks
        (first[:, 0], other_purpose[:, 0]),
    ]
    for one, other in pairs:
        # Uniform over the cells of a 32 x 32 grid; a correlation of 0.02 would show.
        assert abs(_chi_square((one * 32).astype(int) * 32 + (other * 32).astype(int), 1024) - 1) < 0.2
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.015


def test_both_halves_of_a_seed_count():
    seeds = np.array([[1, 2], [2, 1], [1, 3], [-1, 2]], np.int32)
    assert len({tuple(row) for row in uniform(seeds, 4, purpose=1).numpy()}) == 4

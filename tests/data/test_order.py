from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from launcher.data.order import ALL_IN, example_seeds, shuffled


def _epoch(number: int, size: int, seed: int = 3) -> np.ndarray:
    epoch, index = shuffled(tf.range(number * size, (number + 1) * size, dtype=tf.int64), seed=seed, size=size)
    np.testing.assert_array_equal(epoch, number)
    return index.numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 1437])
def test_every_epoch_holds_every_example_once(size):
    for number in (0, 1, 1000):
        np.testing.assert_array_equal(np.sort(_epoch(number, size)), np.arange(size))


def test_a_batch_may_span_epochs():
    _, index = shuffled(tf.range(95, 215, dtype=tf.int64), seed=3, size=50)
    whole = np.concatenate([_epoch(number, 50) for number in range(5)])
    np.testing.assert_array_equal(index, whole[95:215])


def test_the_order_changes_with_the_epoch_and_with_the_seed():
    reference = _epoch(0, 1000)
    for other in (_epoch(1, 1000), _epoch(0, 1000, seed=4), _epoch(0, 1000, seed=3 + 2**32)):
        assert (reference == other).sum() < 10  # 1 expected


def test_positions_far_into_a_long_run_are_exact():
    size = 2**31 + 11
    start = 5 * size - 3  # past what 32 bits hold
    epoch, index = shuffled(tf.range(start, start + 6, dtype=tf.int64), seed=3, size=size)
    np.testing.assert_array_equal(epoch, [4, 4, 4, 5, 5, 5])
    assert len(set(index.numpy())) == 6
    assert index.numpy().min() >= 0 and index.numpy().max() < size


def test_consecutive_epochs_are_independent():
    # Where an example was, against where it is an epoch later: with the shuffle's default number of rounds this
    # statistic is 3,000 instead of 1 (standard deviation of 40 epochs: 0.006).
    size = 60_000
    places = np.stack([_epoch(number, size) for number in range(40)])
    steps = np.diff(places, axis=0).ravel() % size
    counts, expected = np.bincount(steps, minlength=size), len(steps) / size
    assert abs(((counts - expected) ** 2 / expected).sum() / (size - 1) - 1) < 0.05


def test_seeds_of_examples_change_with_seed_epoch_and_example_only():
    index = tf.range(1000, dtype=tf.int64)
    reference = example_seeds(seed=1, epoch=0, index=index).numpy()
    assert reference.dtype == np.int32 and reference.shape == (1000, 2)
    assert len({tuple(pair) for pair in reference}) == 1000
    np.testing.assert_array_equal(example_seeds(seed=1, epoch=0, index=index[700:710]), reference[700:710])
    np.testing.assert_array_equal(example_seeds(seed=1, epoch=tf.zeros([1000], tf.int64), index=index), reference)
    for other in ({"seed": 2, "epoch": 0}, {"seed": 1, "epoch": 1}):
        assert not (example_seeds(**other, index=index).numpy() == reference).all(axis=1).any()


@pytest.mark.parametrize("ranges", [(), ((1, 1),), ((4, 6), (5, 9)), ((12, 13), (2, 3), (4, 4))])
def test_a_step_trains_on_the_batch_of_its_number_among_those_that_are_left(ranges):
    left_out = ALL_IN.with_ranges(ranges[:1]).with_ranges(ranges[1:])
    out = {batch for first, last in ranges for batch in range(first, last + 1)}
    left = [batch for batch in range(1, 50) if batch not in out]
    assert [left_out.batch_of(step) for step in range(1, 21)] == left[:20]
    for step, parts in ((1, 1), (3, 2), (9, 3)):
        first = left_out.batch_of(step)
        elements = [number for number in range(first, 50) for _ in range(parts)]
        dataset = left_out.drop_from(tf.data.Dataset.from_tensor_slices(elements), first=first, parts=parts)
        expected = [number for number in left[step - 1 :] for _ in range(parts)]
        assert list(dataset.as_numpy_iterator()) == expected


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (-5, 3), (2**40 + 7, 2**33)])
def test_where_all_positions_are_of_one_epoch_their_order_is_drawn_to_the_same_bits(seed, epoch):
    positions = tf.range(epoch * 50, (epoch + 1) * 50, dtype=tf.int64)
    (of_each, index), (of_all, same) = (
        shuffled(positions, seed=seed, size=50, epoch=told) for told in (None, tf.constant(epoch, tf.int64))
    )
    assert index.numpy().tolist() == same.numpy().tolist() and set(of_each.numpy()) == {int(of_all)}

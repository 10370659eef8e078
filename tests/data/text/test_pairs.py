from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from assembled import TOPOLOGIES, assert_same, global_batches, joined
from cases import repeated_but
from listed import Listed, pairs
from sources import made

from launcher.data.text.pairs import TextPairs
from launcher.data.text.vocabulary import BEGIN, END
from launcher.errors import UsageError
from launcher.tasks.translation import Translation

pytestmark = pytest.mark.slow

TRAIN, HELD_OUT = pairs(160), pairs(37, start=500)
LENGTH = 40


def text(**options) -> TextPairs:
    settings = {"vocab_size": 310, "max_length": LENGTH, **options}
    data = TextPairs(Listed(TRAIN, HELD_OUT), **settings)
    data.check()
    return data


def all_of(batches, data, count):
    return global_batches(batches, hosts=1, replicas=1, batch=1, steps=count)


def unpacked(batches) -> Counter:
    """The (source, target_in, target_out) token tuples in packed rows, by how often they occur."""
    found: Counter = Counter()
    for batch in batches:
        for row in range(len(batch["source"])):
            if not batch["weight"][row]:
                continue
            source, target = (batch[f"{name}_segments"][row] for name in ("source", "target"))
            assert set(source) - {0} == set(target) - {0} == set(range(1, source.max() + 1))
            assert not batch["source"][row][source == 0].any() and not batch["target_in"][row][target == 0].any()
            for segment in range(1, source.max() + 1):
                for name, places in (("source", source == segment), ("target", target == segment)):
                    np.testing.assert_array_equal(batch[f"{name}_positions"][row][places], np.arange(places.sum()))
                here = [batch["source"][row][source == segment]]
                here += [batch[key][row][target == segment] for key in ("target_in", "target_out")]
                found[tuple(tuple(part.tolist()) for part in here)] += 1
    return found


def expected(data, wanted, limit=None) -> Counter:
    sides = (data.vocabulary.encode(side) for side in zip(*wanted, strict=True))
    result: Counter = Counter()
    for source, target in zip(*sides, strict=True):
        source, target = source[:limit], target[:limit]
        result[(*source, END), (BEGIN, *target), (*target, END)] += 1
    return result


@pytest.mark.parametrize("row_length", [None, 100])
def test_packed_rows_hold_every_pair_once_an_epoch_with_its_segments_and_positions(row_length):
    data = text(row_length=row_length)
    batches = all_of(data.train_batches, data, data.num_train_examples)
    assert data.num_train_examples < len(TRAIN) / 2  # several share a row
    assert batches[0]["source"].shape == (1, row_length or LENGTH)
    assert {value.dtype for key, value in batches[0].items()} == {np.dtype(np.int32), np.dtype(np.float32)}
    assert unpacked(batches) == expected(data, TRAIN)


def test_held_out_rows_predict_every_token_once():
    data = text()
    assert unpacked(all_of(data.eval_batches, data, data.num_eval_examples)) == expected(data, HELD_OUT)


def test_rows_that_are_not_packed_hold_one_pair_each():
    data = text(packed=False)
    assert (data.num_train_examples, data.num_eval_examples) == (len(TRAIN), len(HELD_OUT))
    found: Counter = Counter()
    for batch in all_of(data.train_batches, data, len(TRAIN)):
        assert sorted(batch) == ["source", "target_in", "target_out", "weight"]
        found[tuple(tuple(batch[key][0][batch[key][0] != 0]) for key in ("source", "target_in", "target_out"))] += 1
    assert found == expected(data, TRAIN)


def test_pairs_that_are_too_long_are_left_out_of_training_and_cut_in_evaluation():
    data = text(max_length=11)
    whole = expected(data, TRAIN)
    fitting = Counter({key: count for key, count in whole.items() if max(map(len, key)) <= 11})
    assert 0 < sum((whole - fitting).values()) < len(TRAIN)
    assert unpacked(all_of(data.train_batches, data, data.num_train_examples)) == fitting
    cut = unpacked(all_of(data.eval_batches, data, data.num_eval_examples))
    assert cut == expected(data, HELD_OUT, limit=10)
    assert data.eval_pairs == HELD_OUT  # references stay whole


def test_nothing_that_fits_is_an_error_that_names_the_binding():
    data = TextPairs(Listed(TRAIN, HELD_OUT), vocab_size=310, max_length=2)
    with pytest.raises(UsageError, match=r"no pair of 'listed' fits text_pairs\.max_length = 2"):
        data.check()
        data.num_train_examples  # noqa: B018


@pytest.mark.parametrize(("hosts", "replicas"), repeated_but([(2, 2)], TOPOLOGIES))
def test_every_sharding_sees_the_same_batches(hosts, replicas):
    data = text()
    alone = global_batches(data.train_batches, hosts=1, replicas=1, batch=8, steps=9)
    assert_same(global_batches(data.train_batches, hosts=hosts, replicas=replicas, batch=8, steps=9), alone)
    resumed = global_batches(data.train_batches, hosts=hosts, replicas=replicas, batch=8, steps=4, start_step=5)
    assert_same(resumed, alone[5:])


def test_rows_left_on_disk_are_the_rows_in_memory():
    batches = [
        global_batches(text(memory_limit_bytes=limit).train_batches, hosts=1, replicas=2, batch=6, steps=9)
        for limit in (0, 1 << 30)
    ]
    assert_same(*batches)


@pytest.mark.parametrize(("hosts", "replicas"), TOPOLOGIES)
def test_every_held_out_source_is_translated_once(hosts, replicas):
    data = text()
    task = Translation(data=data, model=lambda vocab_size: None, decode_examples=None)
    batches = global_batches(task.decode_batches, hosts=hosts, replicas=replicas, batch=8, steps=-(-len(HELD_OUT) // 8))
    weight, example = joined(batches, "weight"), joined(batches, "example")
    assert weight.sum() == len(HELD_OUT) and sorted(example[weight == 1]) == list(range(len(HELD_OUT)))
    sources = joined(batches, "source")
    assert sources.shape[1] == LENGTH and sources.dtype == np.int32
    for row, place in zip(sources[weight == 1], example[weight == 1], strict=True):
        assert row[row != 0][-1] == END
        assert data.vocabulary.decode([row]) == [data.eval_pairs[place][0]]


def test_rows_and_vocabulary_are_made_once():
    first = text()
    assert first.num_train_examples
    source = Listed(TRAIN, HELD_OUT)
    again = TextPairs(source, vocab_size=310, max_length=LENGTH)
    again.check()
    assert (again.num_train_examples, again.vocabulary.size) == (first.num_train_examples, 310)
    assert source.asked == 0


def test_nothing_is_read_before_the_check(data_dir):
    source = Listed(TRAIN, HELD_OUT)
    data = TextPairs(source, vocab_size=310, max_length=LENGTH)
    assert (data.num_train_examples, data.num_eval_examples) == (None, None)
    data.check()
    assert source.asked == 0 and not data_dir.exists()


def test_of_a_set_without_held_out_pairs_nothing_is_translated():
    data = TextPairs(Listed(TRAIN, []), vocab_size=310, max_length=LENGTH)
    data.check()
    assert data.num_eval_examples == 0 and data.eval_pairs == []
    assert not Translation(data=data, model=lambda vocab_size: None).num_decode_examples(last=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "tvs:a"}, "unknown; did you mean 'tsv:'"),
        ({"name": "wmt14_translate/de-en"}, "did you mean 'tfds:wmt14_translate/de-en'"),
        ({"vocab_size": 100}, "vocab_size = 100 is too small"),
        ({"max_length": 1}, "max_length = 1: must be 2 or more"),
        ({"row_length": 20}, "row_length = 20: must be 30, or more"),
        ({"row_length": 60, "packed": False}, "or more if packed"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_when_they_are_bound(arguments, words):
    with pytest.raises(UsageError) as caught:
        made(TextPairs, **{"name": "tsv:none", "vocab_size": 2000, "max_length": 30, **arguments})
    assert words in str(caught.value)

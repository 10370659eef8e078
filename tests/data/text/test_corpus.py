from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from assembled import TOPOLOGIES, assert_same, global_batches
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import Listed
from sources import made

from launcher.data.text.corpus import TextCorpus, cut
from launcher.data.text.packing import Sequences
from launcher.data.text.vocabulary import BEGIN, END
from launcher.errors import UsageError

pytestmark = pytest.mark.slow

TRAIN = [f"Document {n}: " + "words, more words,\n  " * (n % 9) + "end" for n in range(60)]
HELD_OUT = ["ä short one", *(f"Held out {n} " + f"text {n} " * (11 * n) for n in range(5)), "▁ odd"]
LENGTH = 24


def corpus(**options) -> TextCorpus:
    data = TextCorpus(Listed(TRAIN, HELD_OUT), **{"vocab_size": 300, "length": LENGTH, **options})
    data.check()
    return data


def pieces_of(documents: Sequences, **options):
    """Tokens and targets of each piece, as lists."""
    kinds = cut(documents, **options)
    parts = (np.split(kind.tokens, np.cumsum(kind.lengths))[:-1] for kind in kinds)
    return ((read.tolist(), targets.tolist()) for read, targets in zip(*parts, strict=True))


def all_of(batches, count):
    return global_batches(batches, hosts=1, replicas=1, batch=1, steps=count)


@given(
    documents=st.lists(st.lists(st.integers(4, 99), max_size=60), max_size=3),
    length=st.integers(2, 20),
    context=st.integers(0, 19),
)
@settings(max_examples=150, derandomize=True)
def test_pieces_predict_every_token_but_the_first_once_each_from_the_one_before(documents, length, context):
    context = min(context, length - 1)
    tokens = np.array([token for document in documents for token in document], np.int32)
    pieces = pieces_of(Sequences(tokens, np.array([*map(len, documents)], int)), length=length, context=context)
    for document in ([BEGIN, *document, END] for document in documents):
        done = 0
        while done < len(document) - 1:
            read, targets = next(pieces)
            assert 1 <= len(read) == len(targets) <= length
            seen = next(place for place, target in enumerate(targets) if target)
            assert seen == min(context, done) and not any(targets[:seen])
            start = done - seen
            assert read == document[start : start + len(read)]
            assert targets[seen:] == document[done + 1 : start + len(read) + 1]
            done = start + len(read)
    assert not list(pieces)


@pytest.mark.parametrize("context", [0, 10])
def test_every_held_out_token_is_predicted_once_and_the_bytes_are_exact(context):
    data = corpus(eval_context=context)
    batches = all_of(data.eval_batches, data.num_eval_examples)
    targets = np.concatenate([batch["targets"][batch["weight"] == 1] for batch in batches])
    encoded = [[*document, END] for document in data.vocabulary.encode(HELD_OUT)]
    assert Counter(targets[targets != 0].tolist()) == Counter(token for document in encoded for token in document)
    assert data.bytes_per_token == sum(len(text.encode()) for text in HELD_OUT) / sum(map(len, encoded))


def test_rows_of_training_hold_every_document_once_with_segments_and_positions():
    data = corpus()
    found = Counter()
    for batch in all_of(data.train_batches, data.num_train_examples):
        assert {key: value.shape[1:] for key, value in batch.items() if key != "weight"} == dict.fromkeys(
            ("tokens", "targets", "segments", "positions"), (LENGTH,)
        )
        used = batch["segments"] != 0
        np.testing.assert_array_equal(used, batch["tokens"] != 0)
        np.testing.assert_array_equal(used, batch["targets"] != 0)
        for segment in range(1, batch["segments"].max() + 1):
            here = batch["segments"] == segment
            np.testing.assert_array_equal(batch["positions"][here], np.arange(here.sum()))
            np.testing.assert_array_equal(batch["targets"][here][:-1], batch["tokens"][here][1:])
            found[tuple(batch["tokens"][here]), tuple(batch["targets"][here])] += 1
    pieces = pieces_of(data.vocabulary.sequences(TRAIN), length=LENGTH, context=0)
    assert found == Counter((tuple(read), tuple(targets)) for read, targets in pieces)


@pytest.mark.parametrize(("hosts", "replicas"), TOPOLOGIES)
def test_every_sharding_sees_the_same_batches(hosts, replicas):
    data = corpus()
    alone = global_batches(data.train_batches, hosts=1, replicas=1, batch=8, steps=9)
    assert_same(global_batches(data.train_batches, hosts=hosts, replicas=replicas, batch=8, steps=9), alone)


def test_context_is_read_and_not_predicted_again():
    with_context, without = corpus(eval_context=10), corpus()
    assert with_context.num_eval_examples > without.num_eval_examples
    assert with_context.num_train_examples == without.num_train_examples
    assert with_context.bytes_per_token == without.bytes_per_token


def test_a_corpus_without_held_out_text_has_no_bytes_per_token():
    data = TextCorpus(Listed(TRAIN, []), vocab_size=300, length=LENGTH)
    data.check()
    assert data.num_eval_examples == 0
    with pytest.raises(UsageError, match="'listed' has no held-out text"):
        data.bytes_per_token  # noqa: B018


def test_nothing_is_read_before_the_check(data_dir):
    source = Listed(TRAIN, HELD_OUT)
    data = TextCorpus(source, vocab_size=300, length=LENGTH)
    assert (data.num_train_examples, data.num_eval_examples) == (None, None)
    data.check()
    assert source.asked == 0 and not data_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "line:a"}, "unknown; did you mean 'lines:'"),
        ({"length": 1}, "text_corpus.length = 1: must be 2 or more"),
        ({"eval_context": 64}, "eval_context = 64 must be from 0 to length - 1 = 63"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_when_they_are_bound(arguments, words):
    with pytest.raises(UsageError) as caught:
        made(TextCorpus, **{"name": "lines:none", "vocab_size": 2000, "length": 64, **arguments})
    assert words in str(caught.value)

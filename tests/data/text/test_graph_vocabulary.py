"""The vocabulary in the graph against sentencepiece: the same ids, the same texts."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies

from launcher.data.text.graph_vocabulary import GraphVocabulary
from launcher.data.text.vocabulary import BEGIN, END, PADDING, Vocabulary

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "der schnelle braune Fuchs springt über den faulen Hund",
    "def run(plan):\n    return plan  # indented",
    "aaaa aaa aa a banana bananas ananas",
    *(f"{number} bottles of beer on the wall, {number} bottles of beer" for number in range(60)),
]


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary.train(TEXTS, size=420)


@pytest.fixture(scope="module")
def in_graph(vocabulary):
    graph = GraphVocabulary(vocabulary)

    class Functions:
        encode = staticmethod(tf.function(graph.encode, input_signature=[tf.TensorSpec([None], tf.string)]))
        decode = staticmethod(tf.function(graph.decode, input_signature=[tf.TensorSpec([None, None], tf.int32)]))

    return Functions


def encoded(in_graph, texts):
    return in_graph.encode(tf.constant(texts, tf.string)).to_list()


def decoded(in_graph, rows):
    return [
        text.decode() for text in in_graph.decode(tf.ragged.constant(rows, tf.int32, ragged_rank=1).to_tensor()).numpy()
    ]


ODD = [
    "", " ", "  two  spaces  ", "\n", "a\n\n b\n", "tab\there", "ünïcödé", "日本語", "🎉 party 🎉",
    "\u2581 mark \x1a sub \x1a1",
    "e\u0301 combining", "\u00a0", "\ufeffbom", "ﬁ ligature", "x" * 300, "\r\n", "0\x00zero", "aaaaaaaaaaaaa", "ßẞ",
]  # fmt: skip


def test_texts_get_the_ids_that_sentencepiece_gives(vocabulary, in_graph):
    assert encoded(in_graph, [*TEXTS, *ODD]) == vocabulary.encode([*TEXTS, *ODD])
    assert encoded(in_graph, [""]) == [[]]


def test_ids_get_the_texts_that_sentencepiece_gives(vocabulary, in_graph):
    rows = vocabulary.encode([*TEXTS, *ODD])
    assert decoded(in_graph, rows) == [*TEXTS, *ODD]


def test_text_ends_at_the_first_end_and_leaves_out_begin_and_padding(vocabulary, in_graph):
    (ids,) = vocabulary.encode(["the lazy dog"])
    row = [BEGIN, *ids, PADDING, END, *ids]
    assert decoded(in_graph, [row]) == vocabulary.decode([row]) == ["the lazy dog"]


def test_any_pieces_in_any_order_are_the_same_text(vocabulary, in_graph):
    numbers = np.random.default_rng(0)
    pieces = [number for number in range(4, vocabulary.size) if not vocabulary.processor.is_byte(number)]
    rows = numbers.choice(pieces, (200, 12)).tolist()
    assert decoded(in_graph, rows) == vocabulary.decode(rows)


def test_bytes_that_are_no_text_become_the_replacement_character(vocabulary, in_graph):
    row = [vocabulary.processor.piece_to_id("<0xC3>"), *vocabulary.encode(["dog"])[0]]
    assert decoded(in_graph, [row])[0].startswith("\ufffd")


@hypothesis.given(
    strategies.lists(strategies.text(strategies.characters(codec="utf-8"), max_size=30), min_size=1, max_size=8)
)
@hypothesis.settings(max_examples=40)
def test_any_text_is_encoded_and_decoded_as_sentencepiece_does(vocabulary, in_graph, texts):
    ids = encoded(in_graph, texts)
    assert ids == vocabulary.encode(texts)
    assert decoded(in_graph, ids) == vocabulary.decode(ids)

"""Beam search against an exhaustive search of a toy model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf
from cases import repeated_but
from toy import BEGIN, END, Toy, text_of

from launcher.decoding import beam_search, decode, without
from launcher.decoding.beam import length_penalty

pytestmark = pytest.mark.slow


def search(toy, beams, alpha, compiled=False):
    def run():
        return beam_search(
            toy.step, toy.cache(beams), rows=toy.rows, begin=BEGIN, end=END, beams=beams, max_length=toy.length,
            alpha=alpha,
        )  # fmt: skip

    ids, scores = tf.function(run, jit_compile=True)() if compiled else tf.function(run)()
    return ids.numpy(), scores.numpy()


@pytest.mark.parametrize(
    ("alpha", "seed"), repeated_but([(0.0, 0), (0.6, 1), (2.0, 2)], itertools.product([0.0, 0.6, 2.0], range(3)))
)
def test_wide_enough_it_finds_what_exhaustive_search_finds(alpha, seed):
    toy = Toy(rows=3, size=4, length=4, seed=seed)
    ids, scores = search(toy, beams=3**3, alpha=alpha)
    for row in range(toy.rows):
        text, score = toy.best(row, alpha)
        assert text_of(ids[row]) == text
        np.testing.assert_allclose(scores[row], score, rtol=1e-5)
        assert not ids[row, len(text) :].any(), "what follows the end must be padding"


def test_the_score_of_a_narrow_search_is_that_of_its_text():
    toy = Toy(rows=4, size=5, length=5, seed=7)
    ids, scores = search(toy, beams=2, alpha=0.6)
    for row in range(toy.rows):
        np.testing.assert_allclose(scores[row], toy.score(row, text_of(ids[row]), 0.6), rtol=1e-5)


def test_more_beams_are_never_worse_than_greedy_here_and_better_somewhere():
    toy = Toy(rows=40, size=5, length=5, seed=3, spread=1.0)
    ended = [END in row for row in search(toy, 1, 0.0)[0].tolist()]
    (_, narrow), (_, wide) = search(toy, 1, 0.0), search(toy, 5**3, 0.0)
    both = np.array(ended)
    assert (wide[both] >= narrow[both] - 1e-5).all()
    assert (wide[both] > narrow[both] + 1e-3).any()


def test_a_penalty_of_length_prefers_longer_texts():
    toy = Toy(rows=30, size=4, length=6, seed=1, spread=0.5)
    lengths = [np.mean([len(text_of(row)) for row in search(toy, 27, alpha)[0]]) for alpha in (0.0, 3.0)]
    assert lengths[1] > lengths[0]


def test_what_a_step_leaves_as_it_is_does_not_move_with_the_beams():
    toy = Toy(rows=3, size=4, length=4)

    def moved_by(step) -> int:
        def run():
            cache = toy.cache(2)
            return beam_search(step, cache, rows=3, begin=BEGIN, end=END, beams=2, max_length=4, alpha=0.6)

        graph = tf.function(run).get_concrete_function().graph.as_graph_def()
        return sum(node.op == "GatherV2" for function in graph.library.function for node in function.node_def)

    def changes_all(tokens, index, cache):
        logits, cache = toy.step(tokens, index, cache)
        return logits, {**cache, "row": tf.identity(cache["row"])}

    assert moved_by(toy.step) == moved_by(changes_all) - 1


def test_the_length_penalty_is_that_of_wu_et_al():
    assert float(length_penalty(tf.constant(7), 0.6)) == pytest.approx((12 / 6) ** 0.6)
    assert float(length_penalty(tf.constant(1), 5.0)) == 1.0


def test_a_row_in_which_nothing_ends_gets_the_likeliest_text_that_has_not():
    toy = Toy(rows=2, size=4, length=3, seed=5)
    toy.table[..., END] = -1e9
    ids, scores = search(toy, beams=27, alpha=0.6)
    for row in range(2):
        assert END not in ids[row]
        np.testing.assert_allclose(scores[row], toy.score(row, tuple(ids[row].tolist()), 0.6), rtol=1e-5)


def test_xla_finds_the_same():
    toy = Toy(rows=3, size=5, length=5, seed=2)
    for expected, found in zip(search(toy, 3, 0.6), search(toy, 3, 0.6, compiled=True), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_cache_follows_its_text():
    """The toy's cache is the token before the last: were it another text's, the score would not be the text's."""
    toy = Toy(rows=8, size=6, length=6, seed=11, spread=1.0)
    ids, scores = search(toy, beams=4, alpha=0.0)
    for row in range(toy.rows):
        np.testing.assert_allclose(scores[row], toy.score(row, text_of(ids[row]), 0.0), rtol=1e-4)


def test_tokens_that_are_forbidden_are_not_written():
    toy = Toy(rows=20, size=4, length=5, seed=4)
    step = without(toy.step, (0, 2))
    ids, _ = beam_search(step, toy.cache(2), rows=20, begin=BEGIN, end=END, beams=2, max_length=5, alpha=0.6)
    plain = decode(step, toy.cache(), tf.fill([20, 1], 3), max_length=5, end=END)
    assert set(np.unique(ids)) <= {0, 1, 3} and 3 in ids.numpy()
    for row in [*ids.numpy(), *plain.numpy()]:
        assert 0 not in text_of(row)


@pytest.mark.parametrize(("beams", "alpha"), [(0, 0.6), (2, -1.0)])
def test_beams_and_penalties_that_cannot_be_are_refused(beams, alpha):
    toy = Toy(rows=1, size=3, length=2)
    with pytest.raises(ValueError, match=f"got {beams} and {alpha}"):
        beam_search(toy.step, {}, rows=1, begin=BEGIN, end=END, beams=beams, max_length=2, alpha=alpha)

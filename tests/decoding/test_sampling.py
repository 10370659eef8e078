"""Greedy search and sampling, against the tables of a toy model."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from toy import BEGIN, END, Toy, text_of

from launcher.decoding import decode, drawn
from launcher.decoding.sampling import nucleus

SEED = tf.constant([3, 4])


def begins(rows):
    return tf.fill([rows, 1], 2)  # the first token is never 0


def test_greedy_takes_the_likeliest_token_each_time_until_the_end():
    toy = Toy(rows=12, size=5, length=6, seed=1)
    ids = decode(toy.step, toy.cache(), begins(12), max_length=6, end=END).numpy()
    for row in range(12):
        last, before, text = 2, BEGIN, []
        while len(text) < 6 and END not in text:
            token = int(toy.table[row, len(text), last, before].argmax())
            text.append(token)
            last, before = token, last
        assert text_of(ids[row]) == tuple(text)
        assert not ids[row, len(text) :].any()


def test_a_prompt_is_read_and_then_gone_on_with():
    toy = Toy(rows=3, size=5, length=6, seed=2)
    toy.table[..., END] = -9
    prompt = tf.constant([[2, 3, 4, 2], [3, 4, 0, 0], [4, 0, 0, 0]])
    ids = decode(toy.step, toy.cache(), prompt, max_length=6, end=END).numpy()
    np.testing.assert_array_equal(ids[0, :3], [3, 4, 2])
    assert ids[0, 3] == toy.table[0, 3, 2, 4].argmax()
    assert ids[1, 0] == 4
    assert ids[1, 1] == toy.table[1, 1, 4, 3].argmax()
    assert ids[2, 0] == toy.table[2, 0, 4, BEGIN].argmax()


def test_an_end_in_a_prompt_does_not_end_the_text():
    toy = Toy(rows=1, size=4, length=4, seed=2)
    ids = decode(toy.step, toy.cache(), tf.constant([[2, END, 3]]), max_length=4, end=END).numpy()
    np.testing.assert_array_equal(ids[0, :2], [END, 3])
    assert ids[0, 2] == toy.table[0, 2, 3, END].argmax()


def sampled(toy, seed=SEED, **kwargs):
    choose = drawn(seed, **kwargs)
    return decode(toy.step, toy.cache(), begins(toy.rows), max_length=toy.length, end=END, choose=choose).numpy()


def test_the_same_seed_draws_the_same_and_another_does_not():
    toy = Toy(rows=50, size=6, length=5, seed=3)
    np.testing.assert_array_equal(sampled(toy), sampled(toy))
    assert (sampled(toy) != sampled(toy, seed=tf.constant([3, 5]))).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature):
    rows = 20_000
    toy = Toy(rows=1, size=5, length=1, seed=4, spread=1.0)
    logits = toy.table[0, 0, 2, BEGIN].astype(np.float64) / temperature

    def step(tokens, index, cache):
        return tf.tile(tf.constant(toy.table[:, 0, 2, BEGIN]), [rows, 1]), cache

    choose = drawn(SEED, temperature=temperature)
    ids = decode(step, {}, begins(rows), max_length=1, end=END, choose=choose).numpy()[:, 0]
    wanted = np.exp(logits) / np.exp(logits).sum()
    found = np.bincount(ids, minlength=5) / rows
    np.testing.assert_allclose(found, wanted, atol=5 * np.sqrt(0.25 / rows))


def test_a_temperature_near_0_is_greedy():
    toy = Toy(rows=20, size=5, length=5, seed=5)
    expected = decode(toy.step, toy.cache(), begins(20), max_length=5, end=END).numpy()
    np.testing.assert_array_equal(sampled(toy, temperature=1e-4), expected)


def test_the_nucleus_is_the_smallest_set_of_likely_tokens_with_enough_probability():
    probabilities = np.array([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5], [0.97, 0.01, 0.01, 0.01]], np.float32)
    for top_p, kept in ((0.4, (1, 1, 1)), (0.6, (2, 2, 1)), (0.9, (3, 3, 1)), (0.98, (4, 4, 2))):
        left = nucleus(tf.math.log(probabilities), top_p).numpy() > -1e8
        if top_p < 0.98:  # the last row has equals, which stay together
            assert tuple(left.sum(axis=1)) == kept
        assert left[0, 0] and left[1, 3] and left[2, 0]
    assert nucleus(tf.zeros([1, 3]), 1.0).numpy().max() == 0


def test_sampling_stays_in_the_nucleus():
    toy = Toy(rows=200, size=6, length=4, seed=6, spread=3.0)
    np.testing.assert_array_equal(
        sampled(toy, top_p=1e-6), decode(toy.step, toy.cache(), begins(200), max_length=4, end=END).numpy()
    )


def test_xla_draws_the_same():
    toy = Toy(rows=9, size=5, length=5, seed=7)

    def run():
        choose = drawn(SEED, temperature=0.8, top_p=0.9)
        return decode(toy.step, toy.cache(), begins(9), max_length=5, end=END, choose=choose)

    np.testing.assert_array_equal(tf.function(run, jit_compile=True)().numpy(), tf.function(run)().numpy())


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match="temperature must be above 0 and top_p in"):
        sampled(Toy(rows=1, size=3, length=2), **bad)

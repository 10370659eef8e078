"""Beam search: the best of several texts that are written side by side."""

from typing import Any, NamedTuple

import tensorflow as tf

from launcher.decoding.sampling import NEVER, Cache, Step, written


class _Beams(NamedTuple):
    """The state of the search: what may go on, and the best that has ended."""

    index: tf.Tensor  # int32 []
    tokens: tf.Tensor  # int32 [rows * beams], the last of each text
    ids: tf.Tensor  # int32 [rows, beams, length], without the first token
    log_probability: tf.Tensor  # float32 [rows, beams]
    best_ids: tf.Tensor  # int32 [rows, length]
    best_score: tf.Tensor  # float32 [rows]
    cache: Any


def length_penalty(length: tf.Tensor, alpha: float) -> tf.Tensor:
    """`((5 + length) / 6) ** alpha` (Wu et al. 2016, arXiv 1609.08144, equation 14), by which log P is divided.

    Args:
      length: tokens of a text with its end.
      alpha: 0 for none; 0.6 in Vaswani et al. 2017.
    """
    return tf.pow((5.0 + tf.cast(length, tf.float32)) / 6.0, alpha)


def beam_search(
    step: Step, cache: Cache, *, rows: int | tf.Tensor, begin: int, end: int, beams: int, max_length: int, alpha: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """For each row the text of the highest score found, `log P(text) / length_penalty(its tokens)`.

    In each step every text of a row is continued by every token; those that end compete by score, and of the others
    the `beams` likeliest go on. The search of all rows stops when no text that goes on can still win. With enough beams
    it is exhaustive. A row in which no text has ended after `max_length` tokens gets the likeliest that has not.

    Args:
      step: of the model.
      cache: before the first step, for rows * beams texts: row i has those from i * beams on, all alike.
      rows: how many texts are asked for.
      begin: the token before the first one.
      end: the token that ends a text.
      beams: texts of a row that go on.
      max_length: tokens of the longest text, with its end.
      alpha: see `length_penalty`; 0 or more.

    Returns:
      int32 [rows, max_length], 0 after `end`, and float32 [rows], the scores.
    """
    if beams < 1 or alpha < 0:
        raise ValueError(f"beams must be at least 1 and alpha at least 0, got {beams} and {alpha}")
    longest = length_penalty(tf.constant(max_length), alpha)

    def running(state: _Beams) -> tf.Tensor:
        # Log-probabilities only fall, and the longest text divides by the most.
        can_win = state.log_probability[:, 0] / longest > state.best_score
        return (state.index < max_length) & tf.reduce_any(can_win)

    def body(state: _Beams) -> tuple[_Beams]:
        logits, cache = step(state.tokens, state.index, state.cache)
        size = logits.shape[-1]
        more = tf.reshape(tf.nn.log_softmax(logits), [rows, beams, size])
        totals = state.log_probability[:, :, None] + more

        ending, parent = tf.math.top_k(totals[:, :, end], k=1)
        score = ending[:, 0] / length_penalty(state.index + 1, alpha)
        ended = written(tf.gather(state.ids, parent[:, 0], batch_dims=1), state.index, tf.fill([rows], end))
        better = score > state.best_score

        going_on = tf.where(tf.range(size) == end, NEVER, totals)
        best, place = tf.math.top_k(tf.reshape(going_on, [rows, beams * size]), k=beams)
        parents, tokens = place // size, place % size
        ids = written(tf.gather(state.ids, parents, batch_dims=1), state.index, tokens)
        flat = tf.reshape(parents + beams * tf.range(rows)[:, None], [-1])
        return (
            _Beams(
                index=state.index + 1,
                tokens=tf.reshape(tokens, [-1]),
                ids=ids,
                log_probability=tf.maximum(best, NEVER),  # so that what can never be does not become less with time
                best_ids=tf.where(better[:, None], ended, state.best_ids),
                best_score=tf.where(better, score, state.best_score),
                cache=tf.nest.map_structure(
                    # What a step hands on as it was is alike for all texts of a row, as at the beginning: such as what
                    # is known of a translation's source, most of a cache.
                    lambda part, before: part if part is before else tf.gather(part, flat),
                    cache,
                    state.cache,
                ),
            ),
        )

    # All texts of a row begin alike: only the first of them counts.
    first = tf.where(tf.range(beams) == 0, 0.0, NEVER)
    start = _Beams(
        index=tf.constant(0),
        tokens=tf.fill([rows * beams], begin),
        ids=tf.zeros([rows, beams, max_length], tf.int32),
        log_probability=tf.tile(first[None], [rows, 1]),
        best_ids=tf.zeros([rows, max_length], tf.int32),
        best_score=tf.fill([rows], NEVER),
        cache=cache,
    )
    (last,) = tf.while_loop(running, body, (start,), parallel_iterations=1)
    none_ended = last.best_score <= NEVER / 2 / longest
    ids = tf.where(none_ended[:, None], last.ids[:, 0], last.best_ids)
    return ids, tf.where(none_ended, last.log_probability[:, 0] / longest, last.best_score)

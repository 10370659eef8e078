"""One text a row, token by token: the likeliest one each time, or one drawn at random; and one step of a model."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from launcher.data.philox import as_uniform, philox, split_words

Cache = Any
Step = Callable[[tf.Tensor, tf.Tensor, Cache], tuple[tf.Tensor, Cache]]
"""(tokens int32 [rows], index int32 [], cache) -> (logits float32 [rows, vocabulary], cache)"""

NEVER = -1e9
"""Below the log-probability of any text, and finite: sums and quotients of it stay so."""


def without(step: Step, tokens: Sequence[int]) -> Step:
    """The same step of a model that never writes these tokens."""

    def masked(inputs: tf.Tensor, index: tf.Tensor, cache: Cache) -> tuple[tf.Tensor, Cache]:
        logits, cache = step(inputs, index, cache)
        forbidden = tf.reduce_any(tf.range(logits.shape[-1])[:, None] == tf.constant(list(tokens), tf.int32), axis=1)
        return tf.where(forbidden, NEVER, logits), cache

    return masked


def written(ids: tf.Tensor, place: tf.Tensor, tokens: tf.Tensor) -> tf.Tensor:
    """`ids` [..., length] with `tokens` [...] at one place of every row; out of place is nowhere."""
    return tf.where(tf.range(ids.shape[-1]) == place, tokens[..., None], ids)


Choose = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(logits float32 [rows, vocabulary], index int32 []) -> the next tokens int32 [rows]"""


def likeliest(logits: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    """Greedy search: the token of the largest logit."""
    return tf.argmax(logits, axis=-1, output_type=tf.int32)


def drawn(seed: tf.Tensor, *, temperature: float = 1.0, top_p: float = 1.0) -> Choose:
    """Sampling: tokens drawn at random; the same seed draws the same.

    Args:
      seed: int32 [2].
      temperature: above 0; logits are divided by it. Below 1 likely tokens become likelier.
      top_p: in (0, 1]; drawn from are only the likeliest tokens that together have at least this probability, one or
        more (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751).
    """
    if not temperature > 0 or not 0 < top_p <= 1:
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}")

    def choose(logits: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        cumulative = tf.cumsum(tf.nn.softmax(nucleus(logits / temperature, top_p)), axis=-1)
        reached = _uniform(seed, index, tf.shape(logits)[0]) * cumulative[:, -1]
        return tf.reduce_sum(tf.cast(cumulative <= reached[:, None], tf.int32), axis=-1)

    return choose


def _uniform(seed: tf.Tensor, index: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """float32 [rows] in [0, 1), a function of the seed, the step and the row; that of TensorFlow changes under XLA."""
    key = split_words(seed[0])[0], split_words(seed[1])[0]
    zero = tf.zeros([], tf.uint64)
    words, *_ = philox(key, (split_words(tf.range(rows))[0], split_words(index)[0], zero, zero))
    return as_uniform(words)


def nucleus(logits: tf.Tensor, top_p: float) -> tf.Tensor:
    """Logits [rows, vocabulary] with all but the likeliest tokens that make up `top_p` pushed out of reach."""
    if top_p == 1:
        return logits
    ordered = tf.sort(logits, axis=-1, direction="DESCENDING")
    probabilities = tf.nn.softmax(ordered)
    # A token stays if those before it do not have enough together: the first one always does.
    stays = tf.cumsum(probabilities, axis=-1, exclusive=True) < top_p
    least = tf.reduce_min(tf.where(stays, ordered, ordered[:, :1]), axis=-1, keepdims=True)
    return tf.where(logits >= least, logits, NEVER)


def decode(
    step: Step,
    cache: Cache,
    prompt: tf.Tensor,
    *,
    max_length: int,
    end: int,
    lengths: tf.Tensor | None = None,
    choose: Choose = likeliest,
) -> tf.Tensor:
    """Tokens of each row, one after another, until its `end`.

    Args:
      step: of the model.
      cache: before the first step.
      prompt: int32 [rows, 1 or more]: what each row begins with. 0 is where it is over and the model goes on; the
        first token is never 0.
      max_length: steps, and tokens of a result.
      end: the token that ends a row.
      lengths: int32 [rows], tokens after which a row is over without `end`; None for `max_length`.
      choose: takes the next token of each row, `likeliest` or as `drawn`.

    Returns:
      int32 [rows, max_length]: all that follows the first token, the rest of the prompt included; 0 after `end`.
    """
    rows = tf.shape(prompt)[0]
    # Token `index` of the prompt and those the model writes after it, in one row; the first one is never returned.
    given = tf.pad(prompt, [[0, 0], [0, max(0, max_length + 1 - prompt.shape[1])]])[:, : max_length + 1]

    def running(index: tf.Tensor, tokens: tf.Tensor, ended: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
        return (index < max_length) & ~tf.reduce_all(ended)

    def body(
        index: tf.Tensor, tokens: tf.Tensor, ended: tf.Tensor, ids: tf.Tensor, cache: Cache
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, Cache]:
        logits, cache = step(tokens, index, cache)
        forced = tf.gather(given, index + 1, axis=1)
        tokens = tf.where(forced != 0, forced, choose(logits, index))
        tokens = tf.where(ended, 0, tokens)
        ids = written(ids, index, tokens)
        ended |= (tokens == end) & (forced == 0)
        if lengths is not None:
            ended |= index + 1 >= lengths
        return index + 1, tokens, ended, ids, cache

    ids = tf.zeros([rows, max_length], tf.int32)
    state = (tf.constant(0), given[:, 0], tf.zeros([rows], tf.bool), ids, cache)
    return tf.while_loop(running, body, state, parallel_iterations=1)[3]

"""Models small enough to be searched to the end: the next token depends on the last two and on the place."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

BEGIN, END = 0, 1


class Toy:
    """Random logits for every (row, place, last token, token before that); its cache is the token before.

    Args:
      rows: texts with tables of their own.
      size: of the vocabulary.
      length: steps at most.
      spread: of the logits; large ones make sure models.
    """

    def __init__(self, rows: int, size: int, length: int, seed: int = 0, spread: float = 2.0):
        numbers = np.random.default_rng(seed)
        self.rows, self.size, self.length = rows, size, length
        self.table = (spread * numbers.standard_normal((rows, length, size, size, size))).astype(np.float32)

    def cache(self, beams: int = 1) -> dict[str, tf.Tensor]:
        rows = tf.repeat(tf.range(self.rows), beams)
        return {"row": rows, "before": tf.fill([self.rows * beams], BEGIN)}

    def step(self, tokens: tf.Tensor, index: tf.Tensor, cache: dict[str, tf.Tensor]):
        places = tf.stack([cache["row"], tf.fill(tf.shape(tokens), index), tokens, cache["before"]], axis=1)
        return tf.gather_nd(tf.constant(self.table), places), {"row": cache["row"], "before": tokens}

    def log_probabilities(self, row: int, index: int, last: int, before: int) -> np.ndarray:
        logits = self.table[row, index, last, before].astype(np.float64)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    def score(self, row: int, text: tuple[int, ...], alpha: float) -> float:
        last, before, total = BEGIN, BEGIN, 0.0
        for index, token in enumerate(text):
            total += self.log_probabilities(row, index, last, before)[token]
            last, before = token, last
        return total / ((5 + len(text)) / 6) ** alpha

    def best(self, row: int, alpha: float) -> tuple[tuple[int, ...], float]:
        """The best of all texts that end, by trying every one."""
        others = [token for token in range(self.size) if token != END]
        texts = [(*body, END) for count in range(self.length) for body in itertools.product(others, repeat=count)]
        scores = [self.score(row, text, alpha) for text in texts]
        return texts[int(np.argmax(scores))], max(scores)


def text_of(ids: np.ndarray) -> tuple[int, ...]:
    """Up to and with its end."""
    row = ids.tolist()
    return tuple(row[: row.index(END) + 1]) if END in row else tuple(row)

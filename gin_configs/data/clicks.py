"""Clicks on items of a large catalogue, made up, and two towers over one table of them.

    import launcher.gin_configs.data.clicks
    train.task = @Clicks()

Who has looked at items of a kind clicks on another of that kind nine times of ten, and else once of ten. A few items
are in great demand, as in any catalogue, and most are hardly ever seen.
"""

from __future__ import annotations

import gin
import keras
import numpy as np
import tensorflow as tf

from launcher.data.pipeline import ArrayExamples, Data, RandomAccessData

_KINDS = 4


@gin.configurable
class Clicks:
    """Task of clicks.

    Args:
      items: rows of the table.
      width: its columns.
      history: items that somebody has looked at.
      examples: of training; an eighth of them again is held out.
    """

    def __init__(self, items: int = 1_000_000, width: int = 64, history: int = 8, examples: int = 64 * 1024):
        self.items, self.width, self.history, self.examples = items, width, history, examples

    def data(self) -> Data:
        """Examples of numbers alone."""
        return RandomAccessData(train=self._made(self.examples, 0), evaluation=self._made(self.examples // 8, 1))

    def model(self) -> keras.Model:
        """Logits [batch, 1] from `seen` [batch, history] and `offered` [batch, 1]."""
        seen = keras.Input((self.history,), dtype="int32", name="seen")
        offered = keras.Input((1,), dtype="int32", name="offered")
        table = keras.layers.Embedding(self.items, self.width, name="items")
        user = keras.layers.Dense(32, "relu")(keras.layers.GlobalAveragePooling1D()(table(seen)))
        item = keras.layers.Dense(32, "relu")(keras.layers.Flatten()(table(offered)))
        alike = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()([user, item, user * item]))
        return keras.Model([seen, offered], keras.layers.Dense(1, dtype="float32", name="logit")(alike))

    def loss(
        self, model: keras.Model, batch: dict[str, tf.Tensor], training: bool
    ) -> tuple[tf.Tensor, tf.Tensor, dict[str, tf.Tensor]]:
        """Cross entropy of whether the item is clicked on."""
        logits = model([batch["seen"], batch["offered"]], training=training)[:, 0]
        weight, clicked = batch["weight"], tf.cast(batch["clicked"], tf.float32)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits)
        right = tf.cast(tf.equal(logits > 0, clicked > 0.5), tf.float32)
        return tf.reduce_sum(losses * weight), tf.reduce_sum(weight), {"accuracy": tf.reduce_sum(right * weight)}

    def _made(self, count: int, seed: int) -> ArrayExamples:
        random = np.random.default_rng(seed)
        kinds = random.integers(0, _KINDS, (2, count, 1))
        kinds[1] = np.where(random.random((count, 1)) < 0.5, kinds[0], kinds[1])
        demand = np.exp(random.uniform(0, np.log(self.items), (count, self.history + 1))).astype("int32")
        ids = np.minimum(demand, self.items - 1) // _KINDS * _KINDS
        clicked = random.random(count) < np.where(kinds[0] == kinds[1], 0.9, 0.1)[:, 0]
        return ArrayExamples(
            {
                "seen": ids[:, 1:] + kinds[0].astype("int32"),
                "offered": ids[:, :1] + kinds[1].astype("int32"),
                "clicked": clicked.astype("int32"),
            }
        )

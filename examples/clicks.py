"""Recommendation: two towers over one table of a million items, on made-up clicks.

A step costs the rows that its batch looks up, not the table: the plan says how many. Adagrad moves no other row; for
Adam say lazy_embeddings=True to `launcher.fit`.
"""

import keras
import numpy as np

import launcher

ITEMS, KINDS, HISTORY, EXAMPLES = 1_000_000, 4, 8, 64 * 1024

random = np.random.default_rng(0)


def items(*shape):
    """Ids of items, of which a few are in great demand: as many below 1,000 as above."""
    return np.exp(random.uniform(0, np.log(ITEMS), shape)).astype("int32") % ITEMS


# Who has looked at items of a kind clicks on another of that kind nine times of ten, and else once of ten.
kind = random.integers(0, KINDS, (EXAMPLES, 1))
history = items(EXAMPLES, HISTORY) // KINDS * KINDS + kind.astype("int32")
is_of_kind = random.random((EXAMPLES, 1)) < 0.5
other = random.integers(0, KINDS, (EXAMPLES, 1))
offered = items(EXAMPLES, 1) // KINDS * KINDS + np.where(is_of_kind, kind, other).astype("int32")
clicked = random.random((EXAMPLES, 1)) < np.where(offered % KINDS == kind, 0.9, 0.1)


def build():
    seen = keras.Input((HISTORY,), dtype="int32", name="seen")
    offer = keras.Input((1,), dtype="int32", name="offer")
    table = keras.layers.Embedding(ITEMS, 64, name="items")
    user = keras.layers.Dense(32, "relu")(keras.layers.GlobalAveragePooling1D()(table(seen)))
    item = keras.layers.Dense(32, "relu")(keras.layers.Flatten()(table(offer)))
    alike = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()([user, item, user * item]))
    model = keras.Model([seen, offer], keras.layers.Dense(1, activation="sigmoid")(alike))
    model.compile(
        keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-6), "binary_crossentropy", metrics=["accuracy"]
    )
    return model


inputs = {"seen": history, "offer": offered}
launcher.fit(build, (inputs, clicked.astype("float32")), batch_size=512, epochs=2, validation_split=0.1)

"""A model with several inputs and two losses: the priority of a ticket, and the department that should have it.

After "Models with multiple inputs and outputs" of https://keras.io/guides/functional_api/.
"""

import keras
import numpy as np
from keras import layers

import launcher

num_tags = 12  # Number of unique issue tags
num_words = 1000  # Size of vocabulary obtained when preprocessing text data
num_departments = 4  # Number of departments for predictions


def build():
    title_input = keras.Input(shape=(None,), name="title")  # Variable-length sequence of ints
    body_input = keras.Input(shape=(None,), name="body")  # Variable-length sequence of ints
    tags_input = keras.Input(shape=(num_tags,), name="tags")  # Binary vectors of size `num_tags`

    title_features = layers.Embedding(num_words, 16)(title_input)
    body_features = layers.Embedding(num_words, 16)(body_input)
    title_features = layers.LSTM(16)(title_features)
    body_features = layers.LSTM(8)(body_features)
    x = layers.concatenate([title_features, body_features, tags_input])

    priority_pred = layers.Dense(1, name="priority")(x)
    department_pred = layers.Dense(num_departments, name="department")(x)

    model = keras.Model(
        inputs=[title_input, body_input, tags_input],
        outputs={"priority": priority_pred, "department": department_pred},
    )
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    return model


# Dummy input data
random = np.random.default_rng(0)
title_data = random.integers(num_words, size=(320, 10)).astype("float32")
body_data = random.integers(num_words, size=(320, 30)).astype("float32")
tags_data = random.integers(2, size=(320, num_tags)).astype("float32")

# Dummy target data
priority_targets = random.random(size=(320, 1)).astype("float32")
dept_targets = np.eye(num_departments, dtype="float32")[random.integers(num_departments, size=320)]

launcher.fit(
    build,
    (
        {"title": title_data, "body": body_data, "tags": tags_data},
        {"priority": priority_targets, "department": dept_targets},
    ),
    epochs=2,
    batch_size=32,
)

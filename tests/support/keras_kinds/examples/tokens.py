"""Tokens padded with 0 under a mask, labels of which some are ignored, and a metric that takes the mask."""

import keras
import numpy as np

random = np.random.default_rng(0)
x = random.integers(1, 20, (24, 6))
for row, length in enumerate(random.integers(2, 7, 24)):
    x[row, length:] = 0
y = np.where(x % 5 == 1, -1, x % 4)

model = keras.Sequential(
    [
        keras.Input((6,)),
        keras.layers.Embedding(20, 4, mask_zero=True),
        keras.layers.LSTM(4, return_sequences=True),
        keras.layers.Dense(4),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
model.compile("sgd", loss, weighted_metrics=["accuracy"])
model.fit(x, y, epochs=2, batch_size=8, validation_data=(x[:10], y[:10]))
assert model.predict(x, verbose=0).shape == (24, 6, 4)

"""An embedding whose rows occur more than once in a batch, trained by Adam."""

import keras
import numpy as np

x = np.arange(24 * 5).reshape(24, 5) % 7
y = (np.arange(24) % 2).astype("float32")

model = keras.Sequential(
    [
        keras.Input((5,)),
        keras.layers.Embedding(7, 4),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1, "sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy", "auc"])
model.fit(x, y, epochs=2, batch_size=8)
model.evaluate(x, y, verbose=0)

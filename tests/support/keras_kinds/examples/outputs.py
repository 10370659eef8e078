"""Several outputs by name, each with its loss and weight; one has a mask; examples and classes have weights."""

import keras
import numpy as np

random = np.random.default_rng(0)
x = random.normal(size=(36, 4, 3)).astype("float32")
x[::3, 2:] = 0.0
price, kind = random.normal(size=(36, 4, 1)).astype("float32"), np.arange(36) % 3

inputs = keras.Input((4, 3), name="series")
hidden = keras.layers.GRU(4, return_sequences=True)(keras.layers.Masking()(inputs))
outputs = {
    "price": keras.layers.Dense(1, name="price")(hidden),
    "kind": keras.layers.Dense(3, "softmax", name="kind")(keras.layers.GRU(3)(hidden)),
}
model = keras.Model(inputs, outputs)
model.compile(
    "adam",
    loss={"price": "mse", "kind": "sparse_categorical_crossentropy"},
    loss_weights={"price": 0.3, "kind": 1.0},
    metrics={"price": ["mae"], "kind": ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]},
)
labels = {"price": price, "kind": kind}
model.fit(x, labels, sample_weight={"price": np.ones((36, 4)), "kind": 1.0 + kind}, epochs=2, batch_size=16)

one = keras.Model(inputs, outputs["kind"])
one.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
one.fit(x, kind, class_weight={0: 0.5, 1: 1.0, 2: 3.0}, validation_split=0.25, batch_size=8, epochs=2)
assert one.predict(x, verbose=0).shape == (36, 3)

"""Pairs through one tower, and a contrastive loss written as a function."""

import keras
import numpy as np

random = np.random.default_rng(0)
left, right = random.normal(size=(2, 40, 5)).astype("float32")
y = (np.arange(40) % 2).astype("float32")

tower = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()])
inputs = [keras.Input((5,)), keras.Input((5,))]
a, b = tower(inputs[0]), tower(inputs[1])
apart = keras.layers.Lambda(lambda both: keras.ops.sqrt(keras.ops.sum((both[0] - both[1]) ** 2, 1, True) + 1e-6))(
    [a, b]
)
model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(apart))


def loss(margin=1.0):
    def contrastive(y_true, y_pred):
        return keras.ops.mean((1 - y_true) * y_pred**2 + y_true * keras.ops.maximum(margin - y_pred, 0) ** 2)

    return contrastive


model.compile("rmsprop", loss(), metrics=["accuracy"])
history = model.fit([left, right], y, validation_data=([left[:10], right[:10]], y[:10]), batch_size=16, epochs=2)
assert len(history.history["val_loss"]) == 2
print("test loss, test acc:", model.evaluate([left, right], y, verbose=0))

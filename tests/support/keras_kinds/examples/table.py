"""A data frame's columns, text and numbers, through preprocessing layers; an own metric, a schedule, callbacks."""

import keras
import numpy as np
import tensorflow as tf

colours, sizes = np.array(["red", "green", "blue"])[np.arange(48) % 3], np.linspace(-3.0, 9.0, 48)
y = (np.arange(48) % 4 == 0).astype("float32")
lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
scale = keras.layers.Normalization(axis=None)
scale.adapt(sizes)


class Positives(keras.metrics.Metric):
    """Adds up over the batch."""

    def __init__(self, name="positives"):
        super().__init__(name=name)
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(keras.ops.sum(keras.ops.cast(y_pred > 0.5, "float32")))

    def result(self):
        return self.count * 1.0  # of a variable itself Keras shows what validation has left

    def reset_state(self):
        self.count.assign(0.0)


def prepared(row, label):
    return {"colour": lookup(row["colour"]), "size": scale(row["size"])[..., None]}, label


data = tf.data.Dataset.from_tensor_slices(({"colour": colours, "size": sizes.astype("float32")}, y)).batch(8)
inputs = {"colour": keras.Input((4,), name="colour"), "size": keras.Input((1,), name="size")}
hidden = keras.layers.Dense(6, "relu")(keras.layers.Concatenate()(list(inputs.values())))
model = keras.Model(inputs, keras.layers.Dense(1, "sigmoid")(keras.layers.Dropout(0.5)(hidden)))
rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.7)
model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=[Positives(), "accuracy"])
seen = []
told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(sorted(logs)))
model.fit(
    data.map(prepared), epochs=2, class_weight={0: 1.0, 1: 4.0}, validation_data=data.map(prepared), callbacks=[told]
)
assert len(seen) == 2 and "val_positives" in seen[0], seen

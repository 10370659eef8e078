import keras
import numpy as np

import launcher


def build():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
launcher.fit(build, (x, y), validation=(x, y), epochs=2, batch_size=16, keep_checkpoints=5, checkpoint_every=2)

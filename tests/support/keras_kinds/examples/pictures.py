"""A convolutional network with batch normalisation, trained twice, saved, loaded and trained on."""

import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(40, 8, 8, 1)).astype("float32")
y = keras.utils.to_categorical(np.arange(40) % 4, 4)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.RandomFlip(),
        keras.layers.Conv2D(4, 3, kernel_regularizer="l2"),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(4),
    ]
)
loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
model.compile(
    keras.optimizers.SGD(0.01, momentum=0.9, weight_decay=0.01),
    loss,
    metrics=["accuracy", keras.metrics.F1Score(name="f1")],
)
model.fit(x, y, batch_size=16, epochs=2, validation_split=0.2)
model.save("pictures.keras")
model = keras.models.load_model("pictures.keras")
model.fit(x, y, batch_size=8, epochs=2)
model.evaluate(x, y, verbose=0)

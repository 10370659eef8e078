"""Transfer learning and fine-tuning: a new head on a frozen base first, then all of it at a low rate.

After https://keras.io/guides/transfer_learning/; the base is a model file instead of one of keras.applications.
"""

import keras
from keras import layers

import launcher

train_ds = keras.utils.image_dataset_from_directory("PetImages", image_size=(32, 32), batch_size=16, seed=1)


def build(trainable=False, rate=1e-3):
    base_model = keras.saving.load_model("base.keras")
    base_model.trainable = trainable

    inputs = keras.Input(shape=(32, 32, 3))
    # The scale of pixels that the base was trained with: (0, 255) to (-1., +1.)
    x = layers.Rescaling(scale=1 / 127.5, offset=-1)(inputs)
    # Keep the BatchNormalization layers in inference mode, also when the base is unfrozen
    x = base_model(x, training=False)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.2)(x)
    outputs = layers.Dense(1)(x)
    model = keras.Model(inputs, outputs)

    model.compile(
        optimizer=keras.optimizers.Adam(rate),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    return model


head = launcher.fit(build, train_ds, epochs=2)

launcher.fit(
    lambda: build(trainable=True, rate=1e-5),
    train_ds,
    epochs=1,
    start={"path": head.model_dir},
)

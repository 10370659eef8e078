"""Windows of a time series, and callbacks that stop, lower the rate and keep the best weights."""

import keras
import numpy as np

values = np.sin(np.arange(120) / 5.0)[:, None].astype("float32")
data = keras.utils.timeseries_dataset_from_array(values[:-4], values[4:], sequence_length=4, batch_size=8)
held = keras.utils.timeseries_dataset_from_array(values[60:-4], values[64:], sequence_length=4, batch_size=8)

model = keras.Sequential([keras.Input((4, 1)), keras.layers.LSTM(5), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), loss="mse", metrics=["mae"])
model.fit(
    data,
    epochs=2,
    validation_data=held,
    callbacks=[
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, min_delta=10.0),
        keras.callbacks.ModelCheckpoint("best.weights.h5", save_best_only=True, save_weights_only=True),
    ],
)
model.load_weights("best.weights.h5")
assert np.isfinite(model.predict(held, verbose=0)).all()

#!/usr/bin/env bash
# Keras: fit tells 0 for the loss that a train_step of one's own returns as {"loss": loss}.
#
# Where a step returns values under exactly the names of the model's metrics, fit tells what these metrics say at the end, and not what the
# step returned. A compiled model has one metric by itself, "loss", which only Keras's own step updates. So a step that computes its loss by
# hand and returns it by the obvious name trains, and shows 0.0 at each epoch, in History, to callbacks and to EarlyStopping. Under any
# other name, or with a second value beside it, the last batch's loss is told.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: the loss, as {"my_loss": loss} tells it.
#
# Output seen:
#   {"loss": loss}: [0.0, 0.0]
#   {"my_loss": loss}: [1.0, 0.8836]
#   {"loss": loss, "again": loss}: [1.0, 0.8836]
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PY'
import sys

import keras
import numpy as np
import tensorflow as tf

x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")


class ByHand(keras.Sequential):
    names = ()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {name: loss for name in self.names}


def told(*names):
    model = ByHand([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.names = names
    model.compile(keras.optimizers.SGD(0.01), "mse")
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    return [round(float(value), 4) for value in history[names[0]]]


found = {'{"loss": loss}': told("loss"), '{"my_loss": loss}': told("my_loss"), '{"loss": loss, "again": loss}': told("loss", "again")}
for name, losses in found.items():
    print(f"{name}: {losses}")
zero, other, both = found.values()
sys.exit(not (zero == [0.0, 0.0] and other == both and other[0] == 1.0))
PY

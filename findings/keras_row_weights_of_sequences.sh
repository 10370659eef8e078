#!/usr/bin/env bash
# Keras 3: a weight for each row of a batch of sequences weighs the positions, where a batch has as many rows as positions.
#
# sample_weight of shape [rows] beside an output of [rows, positions, features]. Keras's pages call it a weight for each
# sample. The loss of such an output has the shape [rows, positions], and the weights are multiplied with it as they
# are, so NumPy's rule of shapes lines them up with the last axis: the positions.
#   - rows != positions: an error about shapes in the graph (nothing silent).
#   - rows == positions: no error; row 0 loses its weight, and position 0 of every row has it. A last, shorter batch of
#     the same data then fails or is weighed otherwise than the batches before it.
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, in evaluate; fit multiplies by the same
# function. Who has weights for rows gives them as [rows, 1], which is right for any length.
#
# Output seen (mean over 16 positions; the first row is wrong by 1 everywhere and has weight 10, all others weight 0):
#   weights of shape (4,): loss 0.625 (by rows 2.5)
#   weights of shape (4, 1): loss 2.5 (by rows 2.5)
#   5 positions, weights of shape (4,): InvalidArgumentError
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PY'
import sys

import keras
import numpy as np


def loss(positions, weights):
    model = keras.Sequential([keras.Input((None, 1)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("sgd", "mse")
    x, y = np.ones((4, positions, 1), "float32"), np.zeros((4, positions, 1), "float32")
    y[0] = 1.0
    return float(model.evaluate(x, y, sample_weight=weights, verbose=0))


rows = np.array([10.0, 0.0, 0.0, 0.0], "float32")
flat, upright = loss(4, rows), loss(4, rows[:, None])
print(f"weights of shape (4,): loss {flat} (by rows 2.5)")
print(f"weights of shape (4, 1): loss {upright} (by rows 2.5)")
try:
    other = f"loss {loss(5, rows)}"
except Exception as error:
    other = type(error).__name__
print(f"5 positions, weights of shape (4,): {other}")
sys.exit((flat, upright, other) != (0.625, 2.5, "InvalidArgumentError"))
PY

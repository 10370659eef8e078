#!/usr/bin/env bash
# Keras: RandomCrop gives a picture of its own size in training, and outside of it the picture as it came.
#
# `compute_output_shape` and a functional model's symbolic output promise the crop's size for both. A layer called with
# training=False returns its input, uncropped and unresized. So a model with a Dense layer on the flattened crop trains, and
# `evaluate` and `predict` end with an error about an incompatible shape; a convolutional model with global pooling evaluates,
# silently, pictures of another size than it was trained on. CenterCrop gives its own size in both.
#
# Seen with keras 3.15.1, tensorflow-cpu 2.21.0 on Linux x86-64, Python 3.11, on 2026-11-28.
# Expected: what the layer's page says, that outside of training the largest window of the wanted shape is cut out and resized.
#
# Output seen:
#   RandomCrop: promised 6 x 6, training 6 x 6, evaluation 8 x 8
#   CenterCrop: promised 6 x 6, training 6 x 6, evaluation 6 x 6
#   a trained model evaluates: ValueError
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

pictures = np.random.default_rng(0).uniform(size=(8, 8, 8, 3)).astype("float32")
seen = []
for kind in (keras.layers.RandomCrop, keras.layers.CenterCrop):
    layer = kind(6, 6)
    shapes = [layer.compute_output_shape(pictures.shape)]
    shapes += [layer(pictures, training=training).shape for training in (True, False)]
    sizes = [f"{shape[1]} x {shape[2]}" for shape in shapes]
    print(f"{kind.__name__}: promised {sizes[0]}, training {sizes[1]}, evaluation {sizes[2]}")
    seen.append(sizes)

model = keras.Sequential([keras.layers.RandomCrop(6, 6), keras.layers.Flatten(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(pictures, np.zeros((8, 1)), verbose=0)
try:
    model.evaluate(pictures, np.zeros((8, 1)), verbose=0)
    outcome = "ok"
except ValueError as error:
    outcome = type(error).__name__
print(f"a trained model evaluates: {outcome}")
sys.exit((seen, outcome) != ([["6 x 6", "6 x 6", "8 x 8"], ["6 x 6"] * 3], "ValueError"))
PY

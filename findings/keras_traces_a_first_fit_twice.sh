#!/usr/bin/env bash
# Keras: the first fit traces the train step twice with Adam, or any optimizer that keeps something for each weight.
#
# tf.function traces a function once more where its first trace has made variables. Keras 3 makes the slots of an optimizer in the first
# trace of the train step, unless they are there. So the first fit of any model traces twice with Adam (with SGD without
# momentum, once, where the model is built), which takes twice the seconds for a large one, and Python in a train_step of one's own (counts, prints,
# a list that grows, a seed drawn from NumPy) runs twice. A later fit traces no more. All batches are whole here, so neither is for a
# shorter last one. What helps: model.optimizer.build(model.trainable_variables) before the first fit.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: once.
#
# Output seen:
#   SGD: traces of the first and of the second fit [1, 0]
#   Adam: traces of the first and of the second fit [2, 0]
#   Adam, built before: traces of the first and of the second fit [1, 0]
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

x, y = np.ones((64, 2), "float32"), np.ones((64, 1), "float32")
traced = []


class Counts(keras.Sequential):
    def train_step(self, data):
        traced.append(1)
        return super().train_step(data)


def times(optimizer, built=False):
    model = Counts([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    if built:
        model.optimizer.build(model.trainable_variables)
    found = []
    for _ in range(2):
        traced.clear()
        model.fit(x, y, batch_size=8, verbose=0)
        found.append(len(traced))
    return found


found = {"SGD": times("sgd"), "Adam": times("adam"), "Adam, built before": times("adam", built=True)}
for name, counts in found.items():
    print(f"{name}: traces of the first and of the second fit {counts}")
sys.exit([*found.values()] != [[1, 0], [2, 0], [1, 0]])
PY

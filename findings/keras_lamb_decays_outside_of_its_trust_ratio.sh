#!/usr/bin/env bash
# Keras: the weight decay of Lamb stands outside of its trust ratio, which is another optimizer than the paper's.
#
# Algorithm 2 of You et al. (2019) adds the weight decay to the update before the update is scaled to the size of the weight; the
# decay is what keeps the trust ratio in check, and it is scaled by it. keras.optimizers.Lamb(weight_decay=...) decays every weight by rate
# times weight_decay first, as its base class does for all optimizers, and takes the ratio of the update alone. With the paper's
# settings (rate 0.00176 to 0.01, decay 0.01) the difference is small in one step; with a decay of the size of the update it is
# not. NVIDIA's and optax's lamb are the paper's. Without weight decay Keras's is, too.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: the paper's step.
#
# Output seen:
#   without decay: Keras [2.6464 3.6464], paper [2.6464 3.6464]
#   decay 0.5: Keras [2.5141 3.4641], paper [2.6799 3.6159]
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

start, gradient, rate = np.array([3.0, 4.0]), np.array([1.0, 1.0]), 0.1


def by_keras(decay):
    weight = keras.Variable(start.astype("float32"))
    optimizer = keras.optimizers.Lamb(rate, weight_decay=decay or None, epsilon=1e-8)
    optimizer.build([weight])
    optimizer.apply([keras.ops.convert_to_tensor(gradient, "float32")])
    return np.asarray(weight)


def by_the_paper(decay):
    update = gradient / np.abs(gradient) + decay * start  # of the first step, whose moments are corrected
    return start - rate * np.linalg.norm(start) / np.linalg.norm(update) * update


apart = []
for decay, name in ((0.0, "without decay"), (0.5, "decay 0.5")):
    ours, paper = by_keras(decay), by_the_paper(decay)
    print(f"{name}: Keras {np.round(ours, 4)}, paper {np.round(paper, 4)}")
    apart.append(float(np.max(np.abs(ours - paper))))
sys.exit(not (apart[0] < 1e-5 and apart[1] > 0.1))
PY

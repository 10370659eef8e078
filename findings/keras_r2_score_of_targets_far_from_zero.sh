#!/usr/bin/env bash
# Keras: R2Score of targets far from zero is any number, above 1 as well, and whatever is predicted.
#
# keras.metrics.R2Score adds up targets and squares of targets in float32 and takes the variance from their difference. Of
# targets around 10,000 that spread by 1, as prices or years may, nothing is left of it: a prediction that is no better
# than the mean got 0.98; others above 1, which no score can be. Around 1,000 it was -9 where it is -0.03. There is no warning,
# and EarlyStopping that waits for a larger score keeps the epoch with the largest error of rounding. Keras's Normalization and scikit-learn's
# r2_score have the same data right: they subtract a mean first. What helps: give the metric targets and predictions without
# their mean, which leaves R2 as it is.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: what float64 gives,
# to three digits.
#
# Output seen:
#   around 0: 0.0082 (float64: 0.0082)
#   around 1000: -9.0818 (float64: -0.0341)
#   around 10000: 0.9811 (float64: 0.0099)
#   around 10000, mean taken off: 0.0099
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

random = np.random.default_rng(0)


def score(targets, predictions):
    metric = keras.metrics.R2Score()
    for start in range(0, len(targets), 100):
        metric.update_state(targets[start : start + 100], predictions[start : start + 100])
    return float(metric.result())


def exact(targets, predictions):
    targets, predictions = targets.astype("float64"), predictions.astype("float64")
    return 1 - np.sum((targets - predictions) ** 2) / np.sum((targets - targets.mean()) ** 2)


found = {}
for middle in (0, 1000, 10000):
    targets = (middle + random.normal(size=(10000, 1))).astype("float32")
    predictions = targets + random.normal(size=targets.shape).astype("float32")
    found[middle] = score(targets, predictions), exact(targets, predictions)
    print(f"around {middle}: {found[middle][0]:.4f} (float64: {found[middle][1]:.4f})")
mean = np.float32(targets.mean())
centred = score(targets - mean, predictions - mean)
print(f"around 10000, mean taken off: {centred:.4f}")
right = [abs(keras_has - wanted) < 1e-3 for keras_has, wanted in (*found.values(), (centred, found[10000][1]))]
sys.exit(right != [True, False, False, True])
PY

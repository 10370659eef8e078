#!/usr/bin/env bash
# Keras: the AUC of a model that ranks rare events perfectly is 0.5 where all its probabilities are below 1/199.
#
# keras.metrics.AUC asks 200 thresholds, evenly between 0 and 1, whatever the scores are. A model of rare events (clicks, fraud,
# failures), calibrated to their share, gives probabilities such as 0.001 and 0.002, all of which lie between two thresholds: the
# area is 0.5 exactly, that of a coin, although every event stands above every other example. curve="PR" gives the share of events. With
# 2,000 thresholds it is 1.0. `from_logits=True` makes probabilities of logits first and is no help. scikit-learn's roc_auc_score
# goes by rank. What helps: `thresholds=` at the quantiles of some scores, or many more of them.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: near 1.
#
# Output seen:
#   AUC() 0.5, with 2,000 thresholds 1.0, from logits 0.5, curve="PR" 0.01
#   AUC() of the same ranks at probabilities of 0.3 and 0.6: 1.0
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

events = (np.arange(1000) % 100 == 0).astype("float32")
scores = np.where(events == 1, 2e-3, 1e-3).astype("float32")


def area(values, **settings):
    return round(float(keras.metrics.AUC(**settings)(events, values)), 3)


plain, fine = area(scores), area(scores, num_thresholds=2000)
logits, recall = area(np.log(scores / (1 - scores)), from_logits=True), area(scores, curve="PR")
print(f'AUC() {plain}, with 2,000 thresholds {fine}, from logits {logits}, curve="PR" {recall}')
wide = area(np.where(events == 1, 0.6, 0.3))
print(f"AUC() of the same ranks at probabilities of 0.3 and 0.6: {wide}")
sys.exit((plain, fine, logits, recall, wide) != (0.5, 1.0, 0.5, 0.01, 1.0))
PY

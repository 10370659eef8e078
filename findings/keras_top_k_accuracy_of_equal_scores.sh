#!/usr/bin/env bash
# Keras on TensorFlow: the top-5 accuracy of a model that gives all classes one score is 100%, its accuracy 1%.
#
# tf.math.in_top_k, and so Keras's TopKCategoricalAccuracy and SparseTopKCategoricalAccuracy on TensorFlow, count every
# class as among the first k whose score is as large as the k-th. Where all scores are equal, that is every class: a model of
# 100 classes that has not begun to learn, whose ReLUs are dead or whose softmax has rounded to one value, is told as perfect.
# `accuracy` of the same model is that of a guess, and k=1, which should be the same number, is 1.0 too.
# ModelCheckpoint or EarlyStopping by it keep the collapsed epoch as the best. The page of in_top_k says it; those of the metrics
# say nothing. scikit-learn's top_k_accuracy_score breaks ties by order. What helps: watch the loss beside it.
#
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11, on 2026-11-28. Expected: 0.05 and 0.01.
#
# Output seen:
#   100 classes, all equal: accuracy 0.01, top-1 1.00, top-5 1.00
#   100 classes, drawn: accuracy 0.00, top-1 0.00, top-5 0.05
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

labels = np.arange(100)


def told(scores):
    metrics = {"accuracy": keras.metrics.SparseCategoricalAccuracy()}
    metrics |= {f"top-{k}": keras.metrics.SparseTopKCategoricalAccuracy(k) for k in (1, 5)}
    return {name: round(float(metric(labels, scores)), 2) for name, metric in metrics.items()}


equal = told(np.full((100, 100), 0.01, "float32"))
drawn = told(np.random.default_rng(1).random((100, 100), dtype="float32"))
for name, one in (("all equal", equal), ("drawn", drawn)):
    print(f"100 classes, {name}: {', '.join(f'{key} {value:.2f}' for key, value in one.items())}")
sys.exit(equal != {"accuracy": 0.01, "top-1": 1.0, "top-5": 1.0} or drawn["accuracy"] != drawn["top-1"])
PY

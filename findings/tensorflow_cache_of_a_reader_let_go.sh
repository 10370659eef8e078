#!/usr/bin/env bash
# TensorFlow's tf.data: a reader that is let go early can leave cache() with its first elements alone, for good.
#
# dataset.prefetch(a).cache().prefetch(b), the order of many input pipelines: the loaders of keras.utils end with a
# prefetch, and tutorials go on with .cache().prefetch(). Somebody reads one batch, to look at it or for its shapes, and
# lets the iterator go. TensorFlow says, and warns, that what a reader has cached by then is discarded if it has not
# read to the end. Sometimes it is kept instead, as the whole: every later pass over this dataset object, by whomever,
# ends after one or two elements. There is no error and no warning; an epoch is short, a validation is over one batch.
#
# Only with a prefetch (or another thread that reads ahead) on both sides of the cache. As it looks, the reader that is
# let go ends the lower prefetch while the upper one waits for it, which takes that for the end of the data.
# What helps: keep the iterator for a while, or look at a batch before .cache() is called.
#
# Seen with tensorflow-cpu 2.21.0 on Linux x86-64, Python 3.11, two cores. How often differs from run to run.
#
# Output seen (300 datasets of 50 elements; how many elements each has after one was read and its reader let go):
#   prefetch, cache, prefetch: {1: 50, 50: 250}
#   cache, prefetch: {50: 300}
#   prefetch, cache, prefetch, readers kept: {50: 300}
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PY'
import collections
import sys

import tensorflow as tf


def lengths(below, count, kept=None):
    """How long datasets are, after one element of each was read."""
    found = collections.Counter()
    for _ in range(count):
        dataset = tf.data.Dataset.range(50)
        dataset = (dataset.prefetch(16) if below else dataset).cache().prefetch(2)
        reader = iter(dataset)
        next(reader)
        if kept is not None:
            kept.append(reader)
        del reader
        found[sum(1 for _ in dataset)] += 1
    return dict(found)


cut, alone, kept = lengths(True, 300), lengths(False, 300), lengths(True, 300, [])
print(f"prefetch, cache, prefetch: {cut}")
print(f"cache, prefetch: {alone}")
print(f"prefetch, cache, prefetch, readers kept: {kept}")
sys.exit(not (len(cut) > 1 and min(cut) < 50 and alone == kept == {50: 300}))
PY

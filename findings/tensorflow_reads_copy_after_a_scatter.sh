#!/usr/bin/env bash
# TensorFlow: one update of some rows of a variable makes a copy of every later read of the whole, for its life.
#
# Reads of a resource variable share its buffer, and an update copies it only where a read is still held. The first
# scatter_add, scatter_sub or scatter_update turns that round: from then on each read copies the whole variable, also
# after assign() has given it another value. Nothing says so, and no number changes; a step pays for the whole table.
# Keras 3 meets it: its Embedding reads the table whole and then takes rows, and SGD without momentum applies the
# gradient of a lookup as a scatter. Each forward pass after the first step copies the table. SGD with momentum and Adam
# make the gradient dense, and their tables are read as before (at the cost of an update of all rows).
# Seen with tensorflow-cpu 2.21.0 and Keras 3.15.1 on Linux x86-64, Python 3.11. Who updates rows by themselves reads
# rows by themselves: Variable.sparse_read, or tf.gather of a tf.Variable that is not mirrored.
#
# Output seen (whether two reads that are both held lie at one address):
#   new True, after assign_add True, after scatter_add False, after assign False
#   table trained by SGD False, by SGD with momentum True, by Adam True
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
import tensorflow as tf


def is_shared(variable):
    reads = variable.read_value(), variable.read_value()
    first, second = (np.asarray(memoryview(read)).__array_interface__["data"][0] for read in reads)
    return first == second


table = tf.Variable(tf.zeros([512, 512]))
seen = [is_shared(table)]
table.assign_add(tf.ones([512, 512]))
seen.append(is_shared(table))
table.scatter_add(tf.IndexedSlices(tf.ones([1, 512]), [3]))
seen.append(is_shared(table))
table.assign(tf.zeros([512, 512]))
seen.append(is_shared(table))
print("new {}, after assign_add {}, after scatter_add {}, after assign {}".format(*seen))


def table_after_a_step(optimizer):
    embedding = keras.layers.Embedding(512, 512)
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    model.train_on_batch(np.array([[1, 2]]), np.array([[1.0]]))
    return is_shared(embedding.embeddings.value)


optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam()
trained = [*map(table_after_a_step, optimizers)]
print("table trained by SGD {}, by SGD with momentum {}, by Adam {}".format(*trained))
sys.exit((seen, trained) != ([True, True, False, False], [False, True, True]))
PY

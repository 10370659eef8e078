#!/usr/bin/env bash
# Keras: keras.ops.slice_update has a gradient under JAX, and none under TensorFlow.
#
# The same layer, which writes rows into a buffer as a cache or a memory does, answers alike under both. In training TensorFlow ends with
# "gradient registry has no entry for: XlaDynamicUpdateSlice": Keras calls XLA's operation by its TensorFlow name, which has a
# kernel but no gradient, also without jit_compile. `keras.ops.scatter_update` of the same rows has one under both.
#
# Seen with keras 3.15.1, tensorflow-cpu 2.21.0, jax 0.10.2 on Linux x86-64, Python 3.11, on 2026-11-28.
# Expected: that what one backend differentiates the other does, too, or that the page of the operation says otherwise.
#
# Output seen:
#   tensorflow: answer 21.0, slice_update LookupError, scatter_update [[0, 0], [2, 2], [2, 2]]
#   jax: answer 21.0, slice_update [[0, 0], [2, 2], [2, 2]], scatter_update [[0, 0], [2, 2], [2, 2]]
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1 jax==0.10.2
cat >"$folder/rows.py" <<'PY'
import os

import keras
import numpy as np

TABLE = np.ones((3, 2), "float32")


def by_slice(table):
    return keras.ops.slice_update(table, (0, 0), keras.ops.full((1, 2), 3.0))


def by_scatter(table):
    return keras.ops.scatter_update(table, [[0, 0], [0, 1]], keras.ops.full((2,), 3.0))


def total(table, write):
    return keras.ops.sum(write(table) ** 2) - 1.0


def gradient(write):
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        return jax.grad(lambda table: total(table, write))(TABLE)
    import tensorflow as tf

    table = tf.constant(TABLE)
    with tf.GradientTape() as tape:
        tape.watch(table)
        loss = total(table, write)
    return tape.gradient(loss, table)


def seen(write):
    try:
        return np.asarray(gradient(write)).astype(int).tolist()
    except LookupError as error:
        return type(error).__name__


print(f"answer {float(total(TABLE, by_slice))}, slice_update {seen(by_slice)}, scatter_update {seen(by_scatter)}")
PY
for backend in tensorflow jax; do
  found="$(KERAS_BACKEND="$backend" TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" "$folder/rows.py")"
  printf '%s: %s\n' "$backend" "$found"
  rows='[[0, 0], [2, 2], [2, 2]]'
  case "$backend" in
    tensorflow) expected="answer 21.0, slice_update LookupError, scatter_update $rows" ;;
    *) expected="answer 21.0, slice_update $rows, scatter_update $rows" ;;
  esac
  [[ "$found" == "$expected" ]]
done

#!/usr/bin/env bash
# TensorFlow's segment sums in 16 bits on a CPU: a sum of ones stops at 256, a mean of ones is 0.26, and so does the gradient of a gather.
#
# tf.math.segment_sum, unsorted_segment_sum, segment_mean and tf.scatter_nd add row after row in the type of their rows.
# In bfloat16 a sum of ones is never more than 256 (there is no 257), in float16 never more than 2048. tf.math.segment_mean
# divides that by the true count: the mean of 1,000 ones is 0.256. unsorted_segment_mean gives 1, but because its count
# stops at 256, too. There is no warning. tf.reduce_sum of the same values is right; XLA (jit_compile=True), which
# is right in bias gradients where TensorFlow's own kernel is not, makes the same mistake here.
#
# It reaches training through the gradient of tf.gather: a table in bfloat16 of which one row is read 1,000 times by a
# batch (padding, a frequent word, a node with many edges) gets 256 for 1,000. Message passing over graphs and pooling by
# segments have it in the forward pass. What helps: cast to float32 before the sum. Keras's Embedding
# does: it reads its table in float32, and casts the rows afterwards.
#
# Seen with tensorflow-cpu 2.21.0 on Linux x86-64, Python 3.11.
#
# Output seen (1,000 ones in bfloat16, 4,096 in float16, one segment):
#   bfloat16 of 1000: segment_sum 256, unsorted_segment_sum 256, scatter_nd 256, gradient of gather 256, reduce_sum 1000
#   bfloat16 of 1000: segment_mean 0.256, unsorted_segment_mean 1
#   bfloat16 of 1000 by XLA: unsorted_segment_sum 256
#   float16 of 4096: segment_sum 2048, unsorted_segment_sum 2048, scatter_nd 2048, gradient of gather 2048, reduce_sum 4096
#   float16 of 4096: segment_mean 0.5, unsorted_segment_mean 1
#   float16 of 4096 by XLA: unsorted_segment_sum 2048
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PY'
import sys

import tensorflow as tf


def number(tensor):
    return round(float(tf.cast(tf.reshape(tensor, [-1])[0], tf.float32)), 3)


def of_gather(ones, segments):
    table = tf.zeros([2, 1], ones.dtype)
    with tf.GradientTape() as tape:
        tape.watch(table)
        rows = tf.gather(table, segments)
    return tf.convert_to_tensor(tape.gradient(rows, table))


@tf.function(jit_compile=True, autograph=False)
def by_xla(ones, segments):
    return tf.math.unsorted_segment_sum(ones, segments, 1)


def told(dtype, count):
    ones, segments = tf.ones([count, 1], dtype), tf.zeros([count], tf.int32)
    sums = {
        "segment_sum": tf.math.segment_sum(ones, segments),
        "unsorted_segment_sum": tf.math.unsorted_segment_sum(ones, segments, 1),
        "scatter_nd": tf.scatter_nd(segments[:, None], ones, [1, 1]),
        "gradient of gather": of_gather(ones, segments),
        "reduce_sum": tf.reduce_sum(ones),
    }
    means = {
        "segment_mean": tf.math.segment_mean(ones, segments),
        "unsorted_segment_mean": tf.math.unsorted_segment_mean(ones, segments, 1),
    }
    compiled = by_xla(ones, segments)
    sums, means = ({name: number(one) for name, one in group.items()} for group in (sums, means))
    for group in (sums, means):
        print(f"{dtype.name} of {count}:", ", ".join(f"{name} {one:g}" for name, one in group.items()))
    print(f"{dtype.name} of {count} by XLA: unsorted_segment_sum {number(compiled):g}")
    return list(sums.values()), list(means.values()), number(compiled)


ok = told(tf.bfloat16, 1000) == ([256, 256, 256, 256, 1000], [0.256, 1], 256)
ok &= told(tf.float16, 4096) == ([2048, 2048, 2048, 2048, 4096], [0.5, 1], 2048)
sys.exit(not ok)
PY

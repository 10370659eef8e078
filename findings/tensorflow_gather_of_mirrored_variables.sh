#!/usr/bin/env bash
# TensorFlow: tf.gather of a variable reads the rows alone on one device, and the whole variable under MirroredStrategy.
#
# Of a tf.Variable, tf.gather and tf.nn.embedding_lookup build ResourceGather, which reads the rows that are asked for.
# Of a variable with a copy on each replica, and inside of strategy.run, where it stands for the replica's own copy, they
# build ReadVariableOp and GatherV2: the whole table is read. The copy itself, taken from `values`, is gathered by rows.
# The gradient is one of rows either way. What it costs is told by a table whose rows are updated by themselves: there,
# each read of the whole is a copy of it (see tensorflow_reads_copy_after_a_scatter.sh).
# Seen with tensorflow-cpu 2.21.0 on Linux x86-64, Python 3.11, with one and two logical CPUs.
#
# Output seen (operations that read in the graph of one replica's function):
#   no strategy: ResourceGather
#   mirrored: GatherV2, ReadVariableOp
#   the replica's own copy: ResourceGather
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'PY'
import sys

import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
READS = {"ResourceGather", "GatherV2", "ReadVariableOp"}


def reads(lookup):
    function = tf.function(lookup, autograph=False).get_concrete_function()
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return sorted({node.op for node in nodes} & READS)


ids = tf.constant([3, 5])
plain = tf.Variable(tf.zeros([8, 2]))
alone = reads(lambda: tf.gather(plain, ids))
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    mirrored = tf.Variable(tf.zeros([8, 2]))


def own_copy():
    return next(one for one in mirrored.values if one.handle is mirrored.handle)


of_mirrored = reads(lambda: strategy.run(lambda: tf.gather(mirrored, ids)))
of_copy = reads(lambda: strategy.run(lambda: tf.gather(own_copy(), ids)))
print("no strategy:", ", ".join(alone))
print("mirrored:", ", ".join(of_mirrored))
print("the replica's own copy:", ", ".join(of_copy))
sys.exit((alone, of_mirrored, of_copy) != (["ResourceGather"], ["GatherV2", "ReadVariableOp"], ["ResourceGather"]))
PY

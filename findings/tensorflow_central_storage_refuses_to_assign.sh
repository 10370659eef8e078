#!/usr/bin/env bash
# TensorFlow: a variable that MirroredStrategy lets each replica assign is refused by CentralStorageStrategy.
#
# A variable made without an aggregation, tf.Variable(0.0), may be assigned by replicas under MirroredStrategy: each assigns its copy. Under
# CentralStorageStrategy, which has one copy, the same program ends in a ValueError when it is traced, which names `aggregation`
# and no way to say it to a library: Keras's counters, moving statistics and seeds come without one, so a model with dropout or
# batch normalisation that trains mirrored does not there. With aggregation=ONLY_FIRST_REPLICA both run.
#
# Seen with tensorflow-cpu 2.21.0 on Linux x86-64, Python 3.11, on 2026-11-28; the strategy is tf.distribute.experimental's.
# Expected: that of variables of one strategy those of the other, with fewer copies, take no less.
#
# Output seen:
#   MirroredStrategy: no aggregation: 1.0; ONLY_FIRST_REPLICA: 1.0
#   CentralStorageStrategy: no aggregation: ValueError; ONLY_FIRST_REPLICA: 1.0
#
# Ends with 0 where this is still so, with 1 where it has changed. Needs the network for pip; no accelerator.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf -- "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q tensorflow-cpu==2.21.0 keras==3.15.1
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 "$folder/venv/bin/python" - <<'PY'
import sys

import tensorflow as tf

CPUS = ["CPU:0", "CPU:1"]
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
experimental = tf.distribute.experimental
STRATEGIES = {
    "MirroredStrategy": lambda: tf.distribute.MirroredStrategy(
        CPUS, cross_device_ops=tf.distribute.ReductionToOneDevice()
    ),
    "CentralStorageStrategy": lambda: experimental.CentralStorageStrategy(CPUS, parameter_device="CPU:0"),
}


def assigned(strategy, aggregation):
    with strategy.scope():
        variable = tf.Variable(0.0, aggregation=aggregation)
    try:
        strategy.run(tf.function(lambda: variable.assign(1.0)))
    except ValueError as error:
        return type(error).__name__
    return float(variable.numpy())


found = []
for name, make in STRATEGIES.items():
    kinds = tf.VariableAggregation.NONE, tf.VariableAggregation.ONLY_FIRST_REPLICA
    one, other = (assigned(make(), kind) for kind in kinds)
    print(f"{name}: no aggregation: {one}; ONLY_FIRST_REPLICA: {other}")
    found += [one, other]
sys.exit(found != [1.0, 1.0, "ValueError", 1.0])
PY

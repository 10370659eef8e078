"""A worker of two, whose update the gradient of one of them decides about; prints what came of it."""

from __future__ import annotations

import json
import os

import keras
import numpy as np
import tensorflow as tf

from launcher import optimizers
from launcher.machine import cluster, strategy

me = cluster.resolve(os.environ)
decided = strategy.plan(requested="auto", replicas=None, tpu=None, cluster=me, environ=os.environ)
# The ranks must be those of `cluster`, also when TensorFlow would now read something else.
os.environ["TF_CONFIG"] = "{}"
built = strategy.build(decided, me)
with built.scope():
    weight = keras.Variable(np.ones([3], "float32"), name="kernel")
    optimizer = optimizers.adamw(learning_rate=0.1, weight_decay=0.1)
    optimizer.build([weight], 3)


@tf.function
def train(gradient, step):
    def replica():
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("sum", tf.identity(gradient))

        def apply():
            optimizer.apply([total], step)
            return tf.constant(True)

        tf.cond(tf.reduce_all(tf.math.is_finite(total)), apply, lambda: tf.constant(False))
        return context.replica_id_in_sync_group

    return built.run(replica)


for step in range(3):
    value = [1.0 + me.index, float("inf") if step == 1 and me.index == 1 else 2.0, -3.0 * step]
    rank = train(tf.constant(value), tf.constant(float(step)))
print(
    "RESULT",
    json.dumps(
        {
            "kind": decided.kind,
            "replicas": built.num_replicas_in_sync,
            "planned": decided.num_replicas,
            "index": me.index,
            "rank": int(built.experimental_local_results(rank)[0]),
            "state": [np.asarray(v.numpy(), np.float64).tolist() for v in [weight, *optimizer.variables]],
        }
    ),
)

"""What a step sends, by its graph and by the plan of its buckets; as a program, a worker's answer in JSON.

TF_CONFIG=… python -m collectives_run OUTPUT_PREFIX
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path

import graph_walk
import keras
import numpy as np
import small_run
import tensorflow as tf

from launcher.step import gradients
from launcher.step.statistics import is_moving

METRICS = 2
SETTINGS = {
    "as it is": {},
    "small buckets": {"bucket_bytes": 64},
    "float16": {"precision": "mixed_float16"},
    "float16 in small buckets": {"precision": "mixed_float16", "bucket_bytes": 64},
    "bfloat16 wire": {"reduce_dtype": "bfloat16", "bucket_bytes": 64},
    "microbatches": {"microbatches": 2},
    "compiled": {"jit_compile": True, "microbatches": 2},
    "all that is gated": {
        "clipping": {"global_norm": 1.0},
        "ema_decay": 0.9,
        "loss_scale": "auto",
        "precision": "mixed_float16",
    },
}

BETWEEN_DEVICES = ("as it is", "float16 in small buckets", "bfloat16 wire", "compiled", "all that is gated")
"""Between devices of their own, which takes longer, those that hold what the others hold."""


def model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, name="one", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(0.1, name="drop"),
            keras.layers.Dense(3, name="two"),
        ]
    )


def loss(model, batch, training):
    outputs = tf.cast(model(batch["x"], training=training), tf.float32)
    total = tf.reduce_sum(batch["weight"])
    value = tf.reduce_sum(tf.reduce_sum(tf.square(outputs), -1) * batch["weight"])
    return value, total, {f"metric {index}": total for index in range(METRICS)}


def session(replicas: int | None, make_model=model, **options):
    task = small_run.GivenTask(small_run.linear_batches(np.ones((2, 8, 6))), make_model, loss)
    return small_run.build(task, replicas, **options)


def planned(made) -> Counter:
    """How many collectives of which dtype and size one replica should take part in a step."""
    wire = made.plan.reduce_dtype
    weights = [variable.value.shape.num_elements() for variable in made.model.trainable_variables]
    moving = [variable.value.shape.num_elements() for variable in filter(is_moving, made.trainer.statistics)]
    sizes = [*weights, *moving, *[1] * (2 + METRICS)]
    dtypes = [wire] * len(weights) + [tf.float32] * (len(sizes) - len(weights))
    buckets = gradients.plan_buckets(sizes, dtypes, made.plan.bucket_bytes)
    return Counter((dtypes[bucket[0]].name, sum(sizes[index] for index in bucket)) for bucket in buckets)


def in_training(made) -> list[graph_walk.Collective]:
    batches = made.trainer.batches(made.plan.data)
    return graph_walk.collectives(made.trainer._loop.run.get_concrete_function(batches, tf.constant(1, tf.int32)))


def in_evaluation(made) -> list[graph_walk.Collective]:
    evaluator = made.evaluator
    size = made.plan.eval_batch_size
    batches = iter(made.runtime.batches(made.plan.data.eval_batches, global_batch_size=size))
    return graph_walk.collectives(
        evaluator._batches.settle([])[1].run.get_concrete_function(batches, tf.constant(1, tf.int32))
    )


def main() -> None:
    answer, strategy = {}, None
    for name in sys.argv[2:]:
        made = session(None, environ=os.environ, on=strategy, **SETTINGS[name])
        strategy = made.runtime.strategy
        found = [dataclasses.asdict(collective) for collective in in_training(made)]
        answer[name] = {"planned": sorted(planned(made).elements()), "found": found}
    answer["evaluation"] = {"found": [dataclasses.asdict(collective) for collective in in_evaluation(made)]}
    records = small_run.train(made)
    answer["trained"] = {"replicas": strategy.num_replicas_in_sync, "finite": records.finite.tolist()}
    Path(f"{sys.argv[1]}.{made.plan.cluster.index}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main()

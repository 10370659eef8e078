"""One of two workers: of Keras's `Model.fit`, or of ours, whose gradients overflow by a pattern.

    TF_CONFIG=… python -m keras_worker keras OUTPUT_PREFIX
    TF_CONFIG=… python -m keras_worker ours OUTPUT_PREFIX PATTERN

PATTERN is JSON: for each step, the ranks of the workers that overflow in it. Every event is a line of JSON in
OUTPUT_PREFIX.RANK.
"""

from __future__ import annotations

import json
import os
import sys

import keras
import numpy as np
import small_run
import tensorflow as tf

from launcher.step.precision import DynamicLossScale


def my_rank() -> int:
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def tell(prefix: str, **event: object) -> None:
    with open(f"{prefix}.{my_rank()}", "a") as file:
        file.write(json.dumps(event) + "\n")


def rows(pattern: list[list[int]], workers: int = 2) -> np.ndarray:
    """Inputs [step, worker, 1]: one example a worker, 1 or infinite."""
    return np.array([[[np.inf if rank in bad else 1.0] for rank in range(workers)] for bad in pattern], np.float32)


def fit(strategy: tf.distribute.Strategy, policy: str) -> str:
    """What `Model.fit` says."""
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        model = small_run.linear_model(2)
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 2), np.float32), np.zeros((8, 1), np.float32)))
    try:
        model.fit(data.batch(4, drop_remainder=True), shuffle=False, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        keras.config.set_dtype_policy("float32")
    return "trained"


def run_keras(prefix: str) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    for policy in ("float32", "mixed_float16"):
        tell(prefix, event="fit", policy=policy, said=fit(strategy, policy))


def run_ours(prefix: str, given: str) -> None:
    pattern = json.loads(given)
    task = small_run.GivenTask(
        small_run.linear_batches(rows(pattern)), lambda: small_run.linear_model(1), small_run.negative_sum
    )
    made = small_run.build(task, None, environ=os.environ, loss_scale=DynamicLossScale(initial_scale=1024.0))
    batches = made.trainer.batches(made.plan.data)
    for number in range(len(pattern)):
        finite = bool(made.trainer.train(batches, 1).finite[0])
        weight, scale = made.model.weights[0].numpy().item(), made.trainer.loss_scale
        tell(prefix, event="left", step=number, weight=weight, scale=scale, finite=finite)


if __name__ == "__main__":
    {"keras": run_keras, "ours": run_ours}[sys.argv[1]](*sys.argv[2:])

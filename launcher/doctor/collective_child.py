"""All-reduces over the replicas that a training would have: run as a process of its own.

What is summed up goes through `launcher.step.gradients.reduce_sum`, as the gradients of a training do.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from launcher.doctor import child
from launcher.machine.tensorflow_import import import_tensorflow

# Chained in one graph, so that the start of it and the check of its result count little.
REDUCTIONS = 4
_MOST_CALLS = 5
_SECONDS_A_SIZE = 5.0
SIZES = {"small": 4 * 2**10, "medium": 2**20, "large": 32 * 2**20}


def _build(request: dict[str, Any]) -> dict[str, Any]:
    """Makes the strategy; waits until all workers are there."""
    import_tensorflow()
    from launcher.machine import cluster, strategy

    peers = cluster.resolve(os.environ)
    requested = request["strategy"] or "auto"
    plan = strategy.plan(
        requested=requested, replicas=request["replicas"], tpu=request["tpu"], cluster=peers, environ=os.environ
    )
    if plan.kind == "one_device" and plan.accelerator == "cpu" and request["replicas"] is None:
        # One replica has nothing to reduce: two logical devices show at least that TensorFlow can.
        plan = strategy.plan(requested="mirrored", replicas=2, tpu=None, cluster=peers, environ=os.environ)
    request["built"] = strategy.build(plan, peers)
    return {"kind": plan.kind, "accelerator": plan.accelerator, "replicas": request["built"].num_replicas_in_sync}


def _measure(size: int, request: dict[str, Any]) -> dict[str, Any] | None:
    """Seconds of one all-reduce of `size` bytes of float32, the best of some; raises where the sum is wrong."""
    import tensorflow as tf

    from launcher.step.gradients import reduce_sum

    if "built" not in request:
        return None
    strategy = request["built"]
    replicas = strategy.num_replicas_in_sync
    mean = (replicas + 1) / 2

    def own_values() -> tf.Tensor:
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.fill([size // 4], tf.cast(index, tf.float32) + 1.0)

    def replica_step(values: tf.Tensor) -> tf.Tensor:
        for _ in range(REDUCTIONS):
            values = reduce_sum([values])[0] / replicas
        return tf.reduce_max(tf.abs(values - mean))

    def agree(seconds: tf.Tensor) -> tf.Tensor:
        return reduce_sum([seconds])[0] / replicas

    # An argument, on the devices already: TensorFlow would compute with constants once, while it optimises the graph.
    values = tf.function(lambda: strategy.run(own_values))()
    reduce_once = tf.function(lambda values: strategy.run(replica_step, args=(values,)))
    agree_once = tf.function(lambda seconds: strategy.run(agree, args=(seconds,)))

    def call() -> float:
        started = time.monotonic()
        errors = [float(error) for error in strategy.experimental_local_results(reduce_once(values))]
        seconds = time.monotonic() - started
        if not max(errors) <= 1e-5 * mean:
            raise RuntimeError(f"the sum over {replicas} replicas is wrong: the mean is off by {max(errors):g}")
        return seconds

    call()  # traced and connected
    first = call()
    # The same number everywhere, or somebody would wait for a reduction that the others do not do.
    agreed = float(strategy.experimental_local_results(agree_once(tf.constant(first, tf.float32)))[0])
    more = max(0, min(_MOST_CALLS, int(_SECONDS_A_SIZE / max(agreed, 1e-6))) - 1)
    best = min([first, *(call() for _ in range(more))])
    return {"bytes": size, "seconds": best / REDUCTIONS, "calls": more + 1}


TOPICS: dict[str, Any] = {"build": _build}
for _name, _size in SIZES.items():
    TOPICS[_name] = lambda request, size=_size: _measure(size, request)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("NCCL_DEBUG", "VERSION")
    sys.exit(child.answer_topics(sys.argv[1], TOPICS, essential="build"))

"""Collective self-test: whether an all-reduce over the replicas ends, sums correctly, and how fast it is.

The all-reduces run in a process of their own, through `launcher.step.gradients.reduce_sum` as a training's do.
"""

import functools
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from launcher.doctor import child, peer_exchange
from launcher.doctor.check import Context, Finding, Skip, check, fail, ok, warn
from launcher.errors import EXIT_RETRY
from launcher.machine.tensorflow_import import import_tensorflow
from launcher.reporting.units import bytes_text, milliseconds

LIMIT_SECONDS = 120.0

# What gigabit Ethernet carries, and one lane of PCIe 3.0.
_SLOW_NETWORK = 0.118e9
_SLOW_BUS = 0.985e9

# Chained in one graph, so that the start of it and the check of its result count little.
REDUCTIONS = 4
_CALLS = 3  # the same number everywhere, or somebody would wait for a reduction that the others do not do
SIZES = {"small": 4 * 2**10, "medium": 2**20, "large": 32 * 2**20}


@check(
    "all-reduces over replicas and workers: right, and how fast",
    waits_for=f"all-reduces, for {LIMIT_SECONDS:.0f} s at most",
)
def collective(context: Context) -> Iterator[Finding]:
    workers = context.cluster.num_workers
    if workers > 1 and not peer_exchange.exchanged(context).all_in_place:
        raise Skip("not all workers reach each other, and a collective waits for all")
    done = context.run_child("collective", timeout_seconds=LIMIT_SECONDS)
    yield collective_finding(done, workers=workers)


def collective_finding(outcome: child.ChildResult, *, workers: int) -> Finding:
    """The finding on the process that ran the all-reduces."""
    built = outcome.answers.get("build")
    sizes = [outcome.answers[name] for name in SIZES if name in outcome.answers]
    wrong = next((answer for answer in (built, *sizes) if answer and answer.problem), None)
    if wrong is not None and wrong.refused:
        return fail(wrong.refused, "change the flag or the variable that the message names")
    if wrong is not None:
        fix = "run it again; if it fails again, NCCL_DEBUG=INFO and TF_CPP_MIN_LOG_LEVEL=0 say more"
        return fail(wrong.error, fix, exit_code=EXIT_RETRY)
    if built is None or len(sizes) < len(SIZES):
        reached = f"; {_speeds(sizes, built.values['replicas'])}" if built and sizes else ""
        where = "before the strategy was made" if built is None else f"with {built.values['replicas']} replicas"
        return fail(
            f"{where}, the test {outcome.how}{reached}",
            "between workers: see that TensorFlow's and NCCL's ports are open in both directions, and name the network "
            "interface with NCCL_SOCKET_IFNAME; between GPUs: NCCL_P2P_DISABLE=1 tells whether direct access is broken",
            exit_code=EXIT_RETRY,
        )
    replicas = built.values["replicas"]
    kind = f"{built.values['kind']}, {replicas} replica{'s' if replicas > 1 else ''} on {built.values['accelerator']}"
    if replicas == 1:
        return ok(f"{kind}: nothing to reduce, and it computes rightly")
    nccl = re.search(r"NCCL version (\S+)", outcome.log)
    seen = f"{kind}{f', NCCL {nccl[1]}' if nccl else ''}: sums are right; {_speeds(sizes, replicas)}"
    bandwidth = _bus_bandwidth(sizes[-1], replicas)
    if workers > 1 and bandwidth < _SLOW_NETWORK:
        return warn(
            f"{seen}: less than gigabit Ethernet",
            "name the fast network interface with NCCL_SOCKET_IFNAME, or by its address in the cluster",
        )
    if workers == 1 and built.values["accelerator"] == "gpu" and bandwidth < _SLOW_BUS:
        return warn(
            f"{seen}: less than one lane of PCIe 3.0",
            "nvidia-smi topo -m shows how the GPUs are connected; NCCL_DEBUG=INFO, what NCCL makes of it",
        )
    return ok(seen)


def _speeds(sizes: list[child.Answer], replicas: int) -> str:
    parts = [f"{bytes_text(size.values['bytes'])} in {milliseconds(size.values['seconds'])}" for size in sizes]
    return f"{', '.join(parts)}: {_bus_bandwidth(sizes[-1], replicas) / 1e9:.3g} GB/s a replica"


def _bus_bandwidth(answer: child.Answer, replicas: int) -> float:
    """Bytes a second that each replica sends in a ring, as nccl-tests counts them (its PERFORMANCE.md)."""
    return float(answer.values["bytes"] / answer.values["seconds"] * 2 * (replicas - 1) / replicas)


# ------------------------------------------------------------------------------------------------- in its own process


def _build(request: dict[str, Any]) -> dict[str, Any]:
    """Builds the strategy, which waits for all workers."""
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
    """Measures one all-reduce of `size` bytes of float32, the best of some; raises if the sum is wrong."""
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

    # An argument, on the devices already: TensorFlow would compute with constants once, while it optimises the graph.
    values = tf.function(lambda: strategy.run(own_values))()
    reduce_once = tf.function(lambda values: strategy.run(replica_step, args=(values,)))

    def call() -> float:
        started = time.monotonic()
        errors = [float(error) for error in strategy.experimental_local_results(reduce_once(values))]
        seconds = time.monotonic() - started
        if not max(errors) <= 1e-5 * mean:
            raise RuntimeError(f"the sum over {replicas} replicas is wrong: the mean is off by {max(errors):g}")
        return seconds

    call()  # traced and connected
    return {"bytes": size, "seconds": min(call() for _ in range(_CALLS)) / REDUCTIONS}


TOPICS: dict[str, Any] = {"build": _build, **{name: functools.partial(_measure, size) for name, size in SIZES.items()}}


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    os.environ.setdefault("NCCL_DEBUG", "VERSION")
    sys.exit(child.answer_topics(sys.argv[1], TOPICS, essential="build"))

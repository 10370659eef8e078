"""The global batches of a run, put together from what each of its hosts feeds to each of its replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from launcher.data import batch_spec
from launcher.data.images.image_data import ImageData
from launcher.data.pipeline import Shard

TOPOLOGIES = [(1, 1), (1, 4), (2, 1), (2, 2)]  # hosts, replicas a host

Batches = list[dict[str, np.ndarray]]


def shards(*, hosts: int, replicas: int, batch: int, seed: int = 5, start_step: int = 0) -> list[Shard]:
    """What each host is asked for."""
    return [
        Shard(
            global_batch_size=batch,
            num_replicas=hosts * replicas,
            first_replica=host * replicas,
            local_replicas=replicas,
            seed=seed,
            start_step=start_step,
        )
        for host in range(hosts)
    ]


def global_batches(
    make: Callable[[Shard], tf.data.Dataset], *, hosts: int, replicas: int, batch: int, steps: int, **options: int
) -> Batches:
    """Plays the hosts one after another; `make` is a `train_batches` or an `eval_batches`."""
    fed = [make(shard).as_numpy_iterator() for shard in shards(hosts=hosts, replicas=replicas, batch=batch, **options)]
    result = []
    for _ in range(steps):
        parts = [next(host) for host in fed for _ in range(replicas)]
        result.append({key: np.concatenate([part[key] for part in parts]) for key in parts[0]})
    return result


def joined(batches: Batches, key: str) -> np.ndarray:
    """The batches' values one after another."""
    return np.concatenate([batch[key] for batch in batches])


def assert_same(first: Batches, second: Batches) -> None:
    """Every batch equal, bit for bit."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert sorted(one) == sorted(other)
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], err_msg=key)


def assert_finished_by_the_step(data: ImageData) -> None:
    """Batches of bytes, and what a step makes of them, are the batches that come finished, to the bit."""
    finished = Shard(global_batch_size=8, seed=5, start_step=3)
    stored = dataclasses.replace(finished, as_stored=True)
    batches = data.train_batches(stored)
    assert batch_spec.of_one_replica(data, stored) == batches.element_spec
    batch = next(iter(batches))
    assert batch["image"].dtype == tf.uint8 and data.finish_stored is not None
    once = data.finish_stored(batch)
    for key, expected in next(iter(data.train_batches(finished))).items():
        np.testing.assert_array_equal(once[key], expected)
    assert data.finish_stored(once) is once

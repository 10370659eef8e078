"""Fewer workers do the work of all: the same global batch, in pieces that are no larger."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import small_run
from cases import repeated_but

from launcher.config import gin_bindings, gin_used
from launcher.data.pipeline import ArrayExamples, RandomAccessData, Shard
from launcher.errors import UsageError
from launcher.machine.cluster import FULL_WORKERS, full_workers
from launcher.run.loading import Machine
from launcher.runtime.batches import share_of_host


def linear_run(steps=3, batch=8, **options):
    rows = np.random.default_rng(0).normal(size=(steps, batch, 2)).tolist()
    task = small_run.GivenTask(
        small_run.linear_batches(rows), lambda: small_run.linear_model(2), small_run.negative_sum
    )
    return small_run.build(task, **options)


def test_a_worker_that_stands_for_three_takes_three_times_the_microbatches():
    alone = linear_run(batch=12, microbatches=2)
    for_three = linear_run(batch=12, microbatches=2, environ={FULL_WORKERS: "3"})
    assert for_three.plan.microbatches == 6
    assert for_three.plan.recipe.global_batch_size == alone.plan.recipe.global_batch_size
    assert for_three.plan.microbatch_size * 3 == alone.plan.microbatch_size
    assert not any("microbatches" in note for note in alone.plan.notes)
    assert "1 of 3 workers are there, for the same global batch: 6 microbatches a replica" in for_three.plan.notes[-1]
    for made in (alone, for_three):
        small_run.train(made)
    expected, found = small_run.state_copies(alone), small_run.state_copies(for_three)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name][0], expected[name][0], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("value", ["none", "0", "-2", "1.5"])
def test_a_senseless_number_of_workers_is_refused(value):
    with pytest.raises(UsageError, match=FULL_WORKERS):
        linear_run(environ={FULL_WORKERS: value})


def test_fewer_workers_of_a_job_than_there_are_are_refused():
    with pytest.raises(UsageError, match=r"LAUNCHER_FULL_WORKERS='1' is not a whole number of 2 or more"):
        full_workers({FULL_WORKERS: "1"}, 2)


@pytest.mark.parametrize(
    ("full", "here", "parts", "size"),
    repeated_but(
        [(8, 5, 3, 48), (4, 3, 2, 8)], [(3, 2, 1, 24), (8, 7, 1, 64), (8, 5, 3, 48), (4, 3, 2, 8), (5, 4, 1, 5)]
    ),
)
def test_workers_of_which_some_are_missing_have_all_examples_once_in_pieces_as_before(full, here, parts, size):
    rows = -(-parts * full // here) * (size // (full * parts))
    shards = [Shard(global_batch_size=size, num_replicas=n, first_replica=0, local_replicas=n, seed=3, start_step=5,
                    rows=rows if n == here else 0) for n in (full, here)]  # fmt: skip
    data = RandomAccessData(train=ArrayExamples({"x": np.arange(40), "weight": np.arange(40) + 1.0}))
    whole = np.concatenate([part["x"] for part in data.train_batches(shards[0]).take(2 * full).as_numpy_iterator()])
    of_workers = [dataclasses.replace(shards[1], first_replica=worker, local_replicas=1) for worker in range(here)]
    found = [list(share_of_host(data.train_batches, full, one).take(2).as_numpy_iterator()) for one in of_workers]
    for step in range(2):
        stream = {key: np.concatenate([batches[step][key] for batches in found]) for key in ("x", "weight")}
        np.testing.assert_array_equal(stream["x"][:size], whole[step * size :][:size])
        np.testing.assert_array_equal(stream["weight"][:size], stream["x"][:size] + 1)
        assert not stream["weight"][size:].any() and len(stream["x"]) == here * rows


def test_the_operative_configuration_keeps_the_microbatches_of_the_recipe():
    from launcher.run import loading
    from launcher.run.recipe import Recipe

    loading.import_builtins()
    gin_bindings.load(["resnet_cpu.gin"], ["train.microbatches = 2"])
    resolved = Machine(environ={FULL_WORKERS: "2"}, replicas=1).plan_of(Recipe())
    assert resolved.microbatches == 4
    assert "train.microbatches = 2" in gin_used.operative_config()

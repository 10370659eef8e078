"""Fewer workers do the work of all: the same global batch, in as many more microbatches."""

from __future__ import annotations

import numpy as np
import pytest
import small_run

from launcher.config import gin_bindings, gin_used
from launcher.errors import UsageError
from launcher.machine.cluster import elastic
from launcher.run.loading import Machine


def linear_run(steps=3, batch=8, **options):
    rows = np.random.default_rng(0).normal(size=(steps, batch, 2)).tolist()
    task = small_run.GivenTask(
        small_run.linear_batches(rows), lambda: small_run.linear_model(2), small_run.negative_sum
    )
    return small_run.build(task, **options)


@pytest.mark.parametrize(
    ("full", "there", "least", "found"),
    [(4, 4, 2, 4), (4, 3, 2, 2), (4, 3, 3, None), (8, 7, 1, 4), (6, 5, 2, 3), (5, 4, 1, 1), (4, 0, 1, None)],
)
def test_the_largest_divisor_that_is_there_goes_on(full, there, least, found):
    assert elastic.workers_of(full, there, least) == found


def test_a_least_number_that_could_never_be_used_is_refused_with_those_that_could():
    elastic.check_least(2, 4)
    elastic.check_least(4, 4)
    with pytest.raises(UsageError, match=r"--min_workers=3: .* 1, 2; give 2 or less"):
        elastic.check_least(3, 4)
    with pytest.raises(UsageError, match=r"--min_workers=5: must be from 1 to --workers=4"):
        elastic.check_least(5, 4)


def test_a_worker_that_stands_for_three_takes_three_times_the_microbatches():
    alone = linear_run(batch=12, microbatches=2)
    for_three = linear_run(batch=12, microbatches=2, environ={elastic.FULL_WORKERS: "3"})
    assert for_three.plan.microbatches == 6
    assert for_three.plan.recipe.global_batch_size == alone.plan.recipe.global_batch_size
    assert for_three.plan.microbatch_size * 3 == alone.plan.microbatch_size
    assert not any("microbatches" in note for note in alone.plan.notes)
    assert "1 of 3 workers are there: 3 times the microbatches of train.microbatches = 2" in for_three.plan.notes[-1]
    for made in (alone, for_three):
        small_run.train(made)
    expected, found = small_run.state_copies(alone), small_run.state_copies(for_three)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name][0], expected[name][0], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("value", ["none", "0", "-2", "1.5"])
def test_a_senseless_number_of_workers_is_refused(value):
    with pytest.raises(UsageError, match=elastic.FULL_WORKERS):
        linear_run(environ={elastic.FULL_WORKERS: value})


def test_a_number_that_is_no_multiple_of_the_workers_is_refused():
    with pytest.raises(UsageError, match=r"LAUNCHER_FULL_WORKERS=3 is not a multiple of the 2 workers there are"):
        elastic.microbatch_factor({elastic.FULL_WORKERS: "3"}, 2)


def test_the_operative_configuration_keeps_the_microbatches_of_the_recipe():
    from launcher.run import loading
    from launcher.run.recipe import Recipe

    loading.import_builtins()
    gin_bindings.load(["resnet_cpu.gin"], ["train.microbatches = 2"])
    resolved = Machine(environ={elastic.FULL_WORKERS: "2"}, replicas=1).plan_of(Recipe())
    assert resolved.microbatches == 4
    assert "train.microbatches = 2" in gin_used.operative_config()

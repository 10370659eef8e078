"""The state of a loss scale is restored where the checkpoint says that it is this run's, and only there."""

from __future__ import annotations

import dataclasses
import functools
import json

import numpy as np
import pytest
from cases import repeated_but
from small_run import GivenTask, build, linear_batches, linear_model, negative_sum, train

from launcher.checkpoints import CheckpointStore, manifest
from launcher.run.start import starting_point
from launcher.step.precision import DynamicLossScale, FixedLossScale

STEPS = 4


@functools.cache
def built(policy, loss_scale, replicas):
    task = GivenTask(linear_batches(np.ones((STEPS, 4, 2))), lambda: linear_model(2), negative_sum)
    made = build(task, replicas, precision=policy, loss_scale=loss_scale)
    return made, made.trainer.state.snapshot()


def run(policy, loss_scale, replicas=1):
    """A session at its first step; of equal arguments, it is the same one."""
    made, start = built(policy, loss_scale, replicas)
    made.trainer.state.restore(start)
    return made


def left_by(made, directory):
    """A store in which a run has left its checkpoint after two steps."""
    train(made, 2)
    store = CheckpointStore(str(directory), scaling=made.trainer.state.scaling)
    store.save(2, made.trainer.state.snapshot())
    return store


def forget_the_record(store, **other):
    """Makes the checkpoint one of a version that did not record its loss scale, or recorded something else."""
    path = store._folder(2) / manifest.MANIFEST
    content = json.loads(path.read_text())
    del content["scaling"], content["sha256"]
    content |= other
    path.write_text(json.dumps({**content, "sha256": manifest.checksum(content)}))


def scale_state(made):
    return {
        name: value.item() for name, value in made.trainer.state.snapshot().items() if name.startswith("loss_scale/")
    }


CHANGES = {
    "float32 to mixed_float16": (("float32", "auto"), ("mixed_float16", "auto"), 2.0**15),
    "mixed_float16 to float32": (("mixed_float16", "auto"), ("float32", "auto"), 1.0),
    "another fixed scale": (
        ("mixed_float16", FixedLossScale(scale=128)),
        ("mixed_float16", FixedLossScale(scale=4096)),
        4096,
    ),
    "another argument": (
        ("mixed_float16", DynamicLossScale(growth_interval=1)),
        ("mixed_float16", DynamicLossScale(growth_interval=9)),
        2.0**15,
    ),
    "only the policy": (
        ("float32", DynamicLossScale(growth_interval=1)),
        ("mixed_float16", DynamicLossScale(growth_interval=1)),
        2.0**15,
    ),
}


@pytest.mark.parametrize(
    ("change", "replicas"),
    repeated_but(
        [("another argument", 2), *((change, 1) for change in CHANGES)],
        [(change, replicas) for change in CHANGES for replicas in (1, 2)],
    ),
)
def test_a_run_that_goes_on_with_another_loss_scale_starts_with_its_own_and_says_so(tmp_path, change, replicas):
    before, after, expected = CHANGES[change]
    store = left_by(run(*before), tmp_path)
    made = run(*after, replicas)
    fresh = scale_state(made)
    start = starting_point.restore(store, made.trainer, same_order=True)
    assert (made.trainer.step, scale_state(made)) == (2, fresh)
    assert len(start.notes) == 1 and f"at {expected:g}" in start.notes[0], start.notes
    assert train(made, 1).loss_scale.tolist() == [expected]


def test_the_same_loss_scale_is_restored_with_its_counters(tmp_path):
    policy, rule = "mixed_float16", DynamicLossScale(growth_interval=2, hysteresis=3)
    left = run(policy, rule)
    store = left_by(left, tmp_path)
    made = run(policy, dataclasses.replace(rule), 2)
    start = starting_point.restore(store, made.trainer, same_order=True)
    assert start.notes == ()
    assert scale_state(made) == scale_state(left)
    assert scale_state(made)["loss_scale/scale"] == 2.0**16, "it had grown"


def test_a_loss_scale_that_another_version_recorded_in_its_own_way_is_shown_as_it_is(tmp_path):
    store = left_by(run("float32", "auto"), tmp_path)
    forget_the_record(store, scaling={"rule": "of tomorrow"})
    start = starting_point.restore(store, run("float32", "auto").trainer, same_order=True)
    assert "is of {'rule': 'of tomorrow'}; this run starts with its own" in start.notes[0]


def test_without_a_record_the_state_is_kept(tmp_path):
    rule = DynamicLossScale(growth_interval=2)
    store = left_by(run("mixed_float16", rule), tmp_path)
    forget_the_record(store)
    made = run("mixed_float16", rule)
    start = starting_point.restore(store, made.trainer, same_order=True)
    assert made.trainer.loss_scale == 2.0**16
    assert start.notes == ()

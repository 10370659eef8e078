"""One program, any topology: the ResNet recipe on real digits, on one replica and on others."""

from __future__ import annotations

import json
from pathlib import Path

import convolutions  # noqa: F401
import keras
import numpy as np
import pytest
from building import build_session

from launcher.checkpoints import CheckpointStore

pytestmark = pytest.mark.slow

STEPS = 50
RECIPE = "resnet_cpu.gin"
PARAMS = (f"train.steps = {STEPS}", "cosine.decay_steps = 281")  # the recipe's own length
RESNET = ("resnet.depth = 8",)
TWO_CONVOLUTIONS = ("image_classification.model = @two_convolutions",)


def curve_and_state(replicas=1, microbatches=1, params=RESNET, steps=STEPS):
    made = build_session(RECIPE, [*PARAMS, f"train.microbatches = {microbatches}", *params], replicas)
    records = made.trainer.train(made.trainer.batches(made.plan.data), steps)
    return records.loss / records.weight, made.trainer.state.snapshot(), made


@pytest.fixture(scope="module")
def one_replica():
    losses, state, _ = curve_and_state()
    return losses, state


def assert_same_run(losses, state, expected):
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    assert state.keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("replicas", "microbatches"),
    [
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(4, 1, marks=pytest.mark.nightly),
        pytest.param(2, 2, marks=pytest.mark.nightly),  # of each step: step/test_train_step.py
        pytest.param(1, 4, marks=pytest.mark.nightly),  # and of a run, also on workers: test_elastic_resume.py
    ],
)
def test_every_topology_trains_to_the_weights_of_one_replica(one_replica, replicas, microbatches):
    losses, state, _ = curve_and_state(replicas, microbatches)
    assert losses[-5:].mean() < 0.98 * losses[:5].mean(), "nothing was learned, so nothing is compared"
    assert_same_run(losses, state, one_replica)


@pytest.mark.nightly  # test_elastic_resume.py compares two workers with one replica
@pytest.mark.heavy
def test_two_worker_processes_train_to_the_weights_of_one_replica(one_replica, run_workers, tmp_path):
    bindings = [f"--gin_param={binding}" for binding in (*PARAMS, *RESNET, "train.log_every = 1")]
    workers = run_workers(2, f"--gin_file={RECIPE}", "--mode=train", f"--model_dir={tmp_path}/run", *bindings)
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    events = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    losses = np.array([event["loss"] for event in events if event["split"] == "train"])
    assert_same_run(losses, CheckpointStore(f"{tmp_path}/run/checkpoints").read(STEPS), one_replica)


def replica_copies(variable: keras.Variable):
    return [copy.numpy() for copy in getattr(variable.value, "values", [variable.value])]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("float32", marks=pytest.mark.nightly),
        pytest.param("mixed_bfloat16", marks=pytest.mark.nightly),
        pytest.param("mixed_float16", marks=pytest.mark.nightly),  # step/test_train_step_state.py
    ],
)
def test_replicas_of_a_run_stay_bitwise_equal_in_every_policy(policy):
    params = [*TWO_CONVOLUTIONS, f"train.precision = '{policy}'", "train.global_batch_size = 64"]
    *_, made = curve_and_state(2, params=params, steps=4)
    for variable in [*made.model.weights, *made.trainer.optimizer.variables]:
        copies = replica_copies(variable)
        assert len(copies) == 2
        for copy in copies[1:]:
            np.testing.assert_array_equal(copy, copies[0], err_msg=variable.path)


@pytest.mark.nightly  # test_train_step_state.py has its statistics
def test_synchronised_norm_on_replicas_is_local_norm_on_the_global_batch():
    whole = (*TWO_CONVOLUTIONS, "two_convolutions.group_size = None")
    losses, state, _ = curve_and_state(1, params=whole, steps=8)
    assert_same_run(
        *curve_and_state(2, params=(*whole, "two_convolutions.synchronized = True"), steps=8)[:2], (losses, state)
    )

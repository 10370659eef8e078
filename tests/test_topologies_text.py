"""One program, any topology: translation and language modelling with dropout off, on one replica and on others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import text_run
from building import build_session
from cases import repeated_but

from launcher.checkpoints import CheckpointStore

pytestmark = pytest.mark.slow

STEPS = 12
SCHEDULES = {
    # Adam divides by the root of tiny second moments at first, where summation order shows: a gentle rate.
    "translation": ("transformer.dropout = 0.0", "cosine.peak = 1e-3", "translation.decode = 'never'"),
    "language_modelling": ("language_model.dropout = 0.0", "cosine.peak = 1e-3", "train.attention = 'blocks'"),
}
RECIPES = {"translation": "transformer_cpu.gin", "language_modelling": "lm_cpu.gin"}


@pytest.fixture(scope="module", params=["translation", "language_modelling"])
def recipe(request, tmp_path_factory):
    """(recipe file, bindings) of a tiny run of the task."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TFDS_DATA_DIR", str(folder / "data"))
        if request.param == "translation":
            text_run.write_pairs(folder)
            bindings = text_run.pair_bindings(folder)
        else:
            text_run.write_corpus(folder)
            bindings = text_run.corpus_bindings(folder)
        best = ("train.best_metric = 'loss'", f"train.steps = {STEPS}")
        yield RECIPES[request.param], [*bindings, *SCHEDULES[request.param], *best], folder


def curve_and_state(recipe, replicas=1, microbatches=1, pieces=1):
    file, bindings, _ = recipe
    # In pieces, against whole logits; computed again, against kept.
    settings = [f"train.microbatches = {microbatches}", f"train.loss_chunks = {pieces}"]
    settings += [f"train.rematerialize = {pieces > 1}"]
    made = build_session(file, [*bindings, *settings], replicas)
    made.plan.data.check()
    records = made.trainer.train(made.trainer.batches(made.plan.data), STEPS)
    return records.loss / records.weight, made.trainer.state.snapshot(), made.evaluator.evaluate()


@pytest.fixture(scope="module")
def one_replica(recipe):
    return curve_and_state(recipe)


def assert_same_run(found, expected):
    losses, state = found[:2]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    assert state.keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(state[name], value, rtol=0, atol=2e-4, err_msg=name)


# Of language modelling, test_text_models_training.py has topologies.
@pytest.mark.nightly  # test_text_models_training.py has topologies, test_loss_chunks.py pieces
@pytest.mark.parametrize("recipe", repeated_but(["translation"], RECIPES), indirect=True, scope="module")
@pytest.mark.parametrize(
    ("replicas", "microbatches", "pieces"),
    [
        (2, 2, 3),
        pytest.param(1, 1, 3, marks=pytest.mark.nightly),
        pytest.param(2, 2, 1, marks=pytest.mark.nightly),
        pytest.param(2, 1, 3, marks=pytest.mark.nightly),
        pytest.param(4, 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_every_topology_and_any_pieces_of_the_loss_train_and_evaluate_as_one_replica_does(
    recipe, one_replica, replicas, microbatches, pieces
):
    found = curve_and_state(recipe, replicas, microbatches, pieces)
    np.testing.assert_allclose(found[0][0], one_replica[0][0], rtol=1e-6)
    assert one_replica[0][-1] < 0.98 * one_replica[0][0], "nothing was learned, so nothing is compared"
    assert_same_run(found, one_replica)
    assert found[2].keys() == one_replica[2].keys()
    for name, value in one_replica[2].items():
        assert found[2][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


# Of a translation, test_assets.py trains two workers.
@pytest.mark.nightly
@pytest.mark.heavy
@pytest.mark.parametrize("recipe", repeated_but(["language_modelling"], RECIPES), indirect=True, scope="module")
def test_two_worker_processes_train_to_the_weights_of_one_replica(recipe, one_replica, run_workers, tmp_path):
    file, bindings, folder = recipe
    settings = ("train.loss_chunks = 3", "train.rematerialize = True")
    params = [f"--gin_param={binding}" for binding in (*bindings, *settings)]
    workers = run_workers(
        2, f"--gin_file={file}", "--mode=train", f"--data_dir={folder}/data", f"--model_dir={tmp_path}/run", *params
    )
    assert [worker.returncode for worker in workers] == [0, 0], workers[0].stderr + workers[1].stderr
    events = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    losses = np.array([event["loss"] for event in events if event["split"] == "train"])
    assert_same_run((losses, CheckpointStore(f"{tmp_path}/run/checkpoints").read(STEPS)), one_replica)

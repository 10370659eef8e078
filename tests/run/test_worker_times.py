"""A worker that is always slower than the others is named, one that is so by chance is not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cases import repeated_but
from places import PYTHONPATH, SMALL_DIGITS

from launcher.run.actions.worker_times import StragglerDetector
from launcher.worker import progress

WINDOWS = 30
LOG_EVERY = 3


def observe(times, notes):
    watch = StragglerDetector(notes.append)
    for step, row in enumerate(times, 1):
        watch.observe(np.stack([row, np.zeros_like(row)], axis=1), step)
    return watch


@pytest.mark.parametrize("workers", repeated_but([2], [2, 3, 16]))
def test_chance_names_nobody(workers):
    notes: list[str] = []
    times = np.random.default_rng(1).lognormal(-3.0, 0.5, [20_000, workers])
    assert observe(times, notes).slow is None and notes == []


def test_one_that_is_always_slower_is_named_once_and_so_is_its_recovery():
    notes: list[str] = []
    dice = np.random.default_rng(2)
    times = dice.lognormal(-3.0, 0.1, [400, 4])
    times[100:200, 2] *= 2
    watch = observe(times, notes)
    assert watch.slow is None and len(notes) == 2
    assert notes[0].startswith("worker 2 is a straggler, to step 1") and "on computing" in notes[0]
    assert notes[1].startswith("worker 2 is no longer slower than the others, at step 2")


def test_less_than_a_millisecond_a_step_is_not_worth_a_word():
    notes: list[str] = []
    observe(np.tile([0.0002, 0.0009], [100, 1]), notes)
    assert notes == []


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("bindings", "what"),
    [
        (["image_classification.model = @slowed.perceptron", "slowed.perceptron.seconds = 0.05",
          "slowed.perceptron.worker = 1"], "own_seconds"),
        pytest.param(
            ["image_classification.data = @slowed.Batches()", "slowed.Batches.data = @image_data()",
             "slowed.Batches.seconds = 0.05", "slowed.Batches.worker = 1"], "input_seconds",
            marks=pytest.mark.nightly,
        ),
    ],
)  # fmt: skip
def test_a_worker_that_sleeps_in_each_step_is_named_while_it_trains(bindings, what, run_workers, tmp_path):
    recipe = tmp_path / "slowed.gin"
    lines = ["import slowed_digits", f"include '{SMALL_DIGITS}'", *bindings, f"train.steps = {LOG_EVERY * WINDOWS}",
             f"train.log_every = {LOG_EVERY}"]  # fmt: skip
    recipe.write_text("\n".join(lines) + "\n")
    told_to_supervisor = tmp_path / "report"
    env = {"PYTHONPATH": PYTHONPATH, progress.PROGRESS_FILE: str(told_to_supervisor)}
    chief, other = run_workers(2, f"--gin_file={recipe}", f"--model_dir={tmp_path}/run", "--mode=train", env=env)
    assert (chief.returncode, other.returncode) == (0, 0), chief.stderr
    told = "worker 1 is a straggler, to step "
    assert told in chief.stdout and told not in other.stdout
    assert progress.read_report(told_to_supervisor).straggler == 1
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    slow, well = summary["workers"][1][what], summary["workers"][0][what]
    assert summary["slow_worker"] == 1 and slow > 0.02 > well
    said = "computing" if what == "own_seconds" else "waiting for its input"
    assert f"it spends the difference on {said}" in chief.stdout
    (*_, last) = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert last["slowest_worker"] == 1 and last["slowest_worker_ratio"] > 1.25

"""Early stopping: the run ends at the evaluation that the rule says, also when it was interrupted before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from launcher import main as entry
from launcher.checkpoints import CheckpointStore
from launcher.run.actions.early_stopping import EarlyStopping, StopEarly

pytestmark = pytest.mark.slow

STEPS, PATIENCE = 60, 2
RECIPE = """
import poisoned
train.task = @poisoned.task()
train.optimizer = @momentum
momentum.learning_rate = 0.05
train.global_batch_size = 8
train.log_every = 5
train.evaluate_every = 2
train.checkpoint_every = 2
Checkpoints.save_model = 'none'
"""
RULE = ("train.early_stopping = @EarlyStopping()", f"EarlyStopping.patience = {PATIENCE}")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "stopping.gin"
    path.write_text(RECIPE)
    return f"--gin_file={path}"


def run(recipe: str, model_dir: Path, *texts: str, steps: int = STEPS, flags: tuple[str, ...] = ()) -> int:
    bindings = [f"--gin_param={text}" for text in (f"train.steps = {steps}", *texts)]
    return entry.main(["launcher", recipe, f"--model_dir={model_dir}", *flags, *bindings])


def evaluations(model_dir: Path) -> list[tuple[int, float]]:
    lines = (json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines())
    return [(event["step"], event["loss"]) for event in lines if event["split"] == "eval"]


def expected_stop(found: list[tuple[int, float]]) -> int:
    best, worse = math.inf, 0
    for step, loss in found:
        best, worse = (loss, 0) if loss < best else (best, worse + 1)
        if worse == PATIENCE:
            return step
    raise AssertionError("this training never gets worse")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_run_ends_when_its_evaluations_no_longer_get_better(recipe, tmp_path, replicas, capsys):
    flags = (f"--replicas={replicas}",) if replicas > 1 else ()
    assert run(recipe, tmp_path / "whole", flags=flags) == 0
    stop = expected_stop(evaluations(tmp_path / "whole"))
    assert 2 * PATIENCE < stop < STEPS

    assert run(recipe, tmp_path / "stopped", *RULE, flags=flags) == 0
    assert evaluations(tmp_path / "stopped")[-1][0] == stop
    assert CheckpointStore(str(tmp_path / "stopped/checkpoints")).latest() == stop
    summary = json.loads((tmp_path / "stopped/summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("completed", stop)
    assert summary["ended_early"].startswith("early stopping: loss was not better than ")
    assert summary["ended_early"] in (tmp_path / "stopped/report.html").read_text()
    assert f"ended      {summary['ended_early']}" in capsys.readouterr().out


def test_what_it_counted_goes_on_after_an_interruption(recipe, tmp_path, capsys):
    assert run(recipe, tmp_path / "stopped", *RULE) == 0
    stop = evaluations(tmp_path / "stopped")[-1][0]
    # One evaluation before its end it had counted all but one.
    assert run(recipe, tmp_path / "parts", *RULE, steps=stop - 2) == 0
    assert run(recipe, tmp_path / "parts", *RULE) == 0
    assert CheckpointStore(str(tmp_path / "parts/checkpoints")).latest() == stop
    capsys.readouterr()

    assert run(recipe, tmp_path / "parts", *RULE) == 0
    assert f"already trained to step {stop} of {STEPS}: early stopping: " in capsys.readouterr().out
    longer = ("train.early_stopping = @EarlyStopping()", f"EarlyStopping.patience = {STEPS}")
    assert run(recipe, tmp_path / "parts", *longer) == 0
    assert CheckpointStore(str(tmp_path / "parts/checkpoints")).latest() == STEPS


@pytest.mark.parametrize(
    ("texts", "flags", "message"),
    [
        (["EarlyStopping.patience = 0"], [], "EarlyStopping.patience = 0: must be 1 or more"),
        (
            ["EarlyStopping.metric = 'los'"],
            [],
            "EarlyStopping.metric = 'los' is not a metric of this task; did",
        ),
        (["train.evaluate_every = 0"], [], "train.early_stopping needs evaluations"),
        ([], ["--mode=train"], "--mode=train does not evaluate"),
    ],
)
def test_a_rule_that_could_never_stop_is_refused(recipe, tmp_path, texts, flags, message, capsys):
    assert run(recipe, tmp_path / "run", *RULE, *texts, flags=tuple(flags)) == 64
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize(
    ("metric", "values", "min_delta", "stops_at"),
    [
        ("loss", [3, 2, 2, 2.5], 0.0, 4),
        ("accuracy", [0.1, 0.3, 0.2, 0.3], 0.0, 4),
        ("accuracy", [0.1, 0.15, 0.19, 0.5], 0.1, 3),
        ("loss", [math.nan, math.nan], 0.0, 2),
        ("loss", [math.nan, 2, math.nan, math.nan], 0.0, 4),
        ("loss", [4, 3, 3, 2], 0.0, None),
    ],
)
def test_what_counts_as_better(metric, values, min_delta, stops_at):
    made = StopEarly(EarlyStopping(patience=2, min_delta=min_delta), metric=metric, total_steps=100, state={})
    stopped = None
    for step, value in enumerate(values, 1):
        made = StopEarly(
            EarlyStopping(patience=2, min_delta=min_delta), metric=metric, total_steps=100, state=made.state()
        )
        made.on_evaluation({"step": step, metric: value})
        if made.before_saving(step):
            stopped = step
            break
    assert stopped == stops_at

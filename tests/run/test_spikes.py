"""Spikes of loss and gradient norm: what is one, and that the run after it is the one without its batches."""

from __future__ import annotations

import functools
import json
import signal
import types
from pathlib import Path

import numpy as np
import pytest
from places import PYTHONPATH

from launcher import main as entry
from launcher.checkpoints import CheckpointStore
from launcher.run.actions import spikes
from launcher.run.start.starting_point import StartingPoint
from launcher.step.trainer import StepRecords

pytestmark = pytest.mark.slow

STEPS, POISONED = 40, 27
FINITE_STEPS = "loss_scale/finite_steps"
RECIPE = """
import poisoned
train.task = @poisoned.task()
train.optimizer = @momentum
momentum.learning_rate = 0.02
train.global_batch_size = 8
train.log_every = 5
train.checkpoint_every = 5
Checkpoints.every_minutes = 0
Checkpoints.keep = 5
Checkpoints.save_model = 'none'
"""
RULE = ("train.spikes = @Spikes()", "Spikes.window = 20", "Spikes.action = 'rewind'")
POISON = f"poisoned.task.poison = {{{POISONED}: 1e4}}"
INFINITE = f"poisoned.task.poison = {{{POISONED}: 1e999}}"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "poisoned.gin"
    path.write_text(RECIPE)
    return f"--gin_file={path}"


def bindings(*texts: str, steps: int = STEPS) -> list[str]:
    return [f"--gin_param={text}" for text in (f"train.steps = {steps}", *texts)]


def run(recipe: str, model_dir: Path, *texts: str, replicas: int = 1, steps: int = STEPS) -> int:
    flags = [f"--replicas={replicas}"] if replicas > 1 else []
    return entry.main(["launcher", recipe, f"--model_dir={model_dir}", *flags, *bindings(*texts, steps=steps)])


def state(model_dir: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    """Of the run's last checkpoint, without what is not weights, slots and counters."""
    found = CheckpointStore(str(model_dir / "checkpoints")).read(step)
    return {name: value for name, value in found.items() if not name.startswith("host/")}


def assert_same_state(model_dir: Path, expected: Path, *, apart_from: tuple[str, ...] = (), step: int = STEPS) -> None:
    found, wanted = state(model_dir, step), state(expected, step)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if name not in apart_from:
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert all(np.isfinite(value).all() for value in found.values())


def events(model_dir: Path, split: str) -> list[dict]:
    lines = (model_dir / "metrics.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["split"] == split]


def without_batches(first: int, last: int) -> str:
    return f"poisoned.task.left_out = {list(range(first, last + 1))}"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """undisturbed(replicas): the folder of a run whose data never had batches 26 to 28."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "poisoned.gin").write_text(RECIPE)

    @functools.cache
    def of(replicas: int) -> Path:
        where = folder / str(replicas)
        assert run(f"--gin_file={folder}/poisoned.gin", where, without_batches(26, 28), replicas=replicas) == 0
        return where

    return of


@pytest.mark.nightly  # one replica goes back where the record is looked at, and two workers do
@pytest.mark.parametrize(("replicas", "poison"), [(2, POISON), (1, INFINITE)])
def test_a_run_that_goes_back_ends_as_one_whose_data_never_had_the_batches(
    recipe, tmp_path, replicas, poison, undisturbed, capsys
):
    assert run(recipe, tmp_path / "rewound", *RULE, poison, replicas=replicas) == 0
    assert "gone back to step 25, and from there the batches 26 to 28 are left out" in capsys.readouterr().out
    assert_same_state(tmp_path / "rewound", undisturbed(replicas))


def test_a_run_whose_recipe_leaves_batches_out_is_one_whose_data_never_had_them(recipe, tmp_path, undisturbed):
    assert run(recipe, tmp_path / "listed", "train.skip_batches = [(26, 28)]", INFINITE) == 0
    assert_same_state(tmp_path / "listed", undisturbed(1))


def test_what_was_done_is_in_the_record_of_the_run(recipe, tmp_path, undisturbed, capsys):
    assert run(recipe, tmp_path / "run", *RULE, POISON) == 0
    assert_same_state(tmp_path / "run", undisturbed(1))
    (event,) = events(tmp_path / "run", "spike")
    assert (event["step"], event["spike_step"], event["left_out"]) == (25, POISONED, [26, 28])
    assert event["loss"] > 1e6 and event["what"].startswith("spike: loss ")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["spikes"]["rewinds"][0]["to_step"] == 25
    one, two = summary["attempts"]
    assert (one["from_step"], one["to_step"], two["from_step"], two["to_step"]) == (0, 28, 25, STEPS)
    assert one["ended_by"].startswith(f"step {POISONED}: spike: ") and two["ended_by"] == "done"
    page = (tmp_path / "run/report.html").read_text()
    assert "gone back to step 25, batches 26 to 28 left out" in page
    assert "went back 1 time" in capsys.readouterr().out
    assert [event["step"] for event in events(tmp_path / "run", "train")] == list(range(5, STEPS + 1, 5))


def test_it_goes_back_several_checkpoints_and_forgets_those_it_went_over(recipe, tmp_path):
    back_3 = ("Spikes.rewind_checkpoints = 3", "Spikes.skip_batches = 1", "train.evaluate_every = 5")
    assert run(recipe, tmp_path / "rewound", *RULE, POISON, *back_3) == 0
    (event,) = events(tmp_path / "rewound", "spike")
    assert (event["step"], event["left_out"]) == (15, [POISONED, POISONED])
    assert run(recipe, tmp_path / "undisturbed", without_batches(POISONED, POISONED), "train.evaluate_every = 5") == 0
    assert_same_state(tmp_path / "rewound", tmp_path / "undisturbed")
    best = [json.loads((tmp_path / name / "checkpoints/best.json").read_text()) for name in ("rewound", "undisturbed")]
    assert best[0]["step"] == best[1]["step"] and best[0]["value"] == best[1]["value"]


def test_before_the_first_checkpoint_it_goes_back_to_the_start(recipe, tmp_path):
    rule = (*RULE, "Spikes.window = 10", "Spikes.loss_factor = 100", "Spikes.gradient_norm_factor = None")
    poison = "poisoned.task.poison = {14: 1e5}"
    assert run(recipe, tmp_path / "rewound", *rule, "train.checkpoint_every = 0", poison) == 0
    (event,) = events(tmp_path / "rewound", "spike")
    assert (event["step"], event["left_out"]) == (0, [13, 15])
    assert run(recipe, tmp_path / "undisturbed", without_batches(13, 15)) == 0
    assert_same_state(tmp_path / "rewound", tmp_path / "undisturbed")


def test_when_it_has_gone_back_often_enough_the_next_spike_ends_the_run(recipe, tmp_path, capsys):
    poison = "poisoned.task.poison = {27: 1e4, 33: 1e4}"
    assert run(recipe, tmp_path / "run", *RULE, poison, "Spikes.max_rewinds = 1") == 70
    assert "after the run has gone back 1 times (Spikes.max_rewinds = 1)" in capsys.readouterr().err
    assert run(recipe, tmp_path / "twice", *RULE, poison) == 0
    # Batch 33 is that of step 30 then, as three are left out before it.
    assert [event["left_out"] for event in events(tmp_path / "twice", "spike")] == [[26, 28], [32, 34]]
    undisturbed = "poisoned.task.left_out = [26, 27, 28, 32, 33, 34]"
    assert run(recipe, tmp_path / "undisturbed", undisturbed) == 0
    assert_same_state(tmp_path / "twice", tmp_path / "undisturbed")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_skipped_step_is_one_whose_batch_has_no_weight(recipe, tmp_path, replicas, capsys):
    rule = (*RULE, "Spikes.action = 'skip'")
    assert run(recipe, tmp_path / "skipped", *rule, POISON, replicas=replicas) == 0
    assert f"step {POISONED} skipped: spike: loss " in capsys.readouterr().out
    assert run(recipe, tmp_path / "weightless", f"poisoned.task.weightless = [{POISONED}]", replicas=replicas) == 0
    assert state(tmp_path / "skipped")["counters/skipped"] == 1
    # To the loss scale, finite gradients count whether they are applied or not.
    assert_same_state(tmp_path / "skipped", tmp_path / "weightless", apart_from=(FINITE_STEPS,))
    assert events(tmp_path / "skipped", "train")[-1]["skipped_steps"] == 1


def test_a_run_that_skips_and_is_interrupted_skips_the_same_steps(recipe, tmp_path):
    """Interrupted before a step that is skipped by limits that were set some steps earlier."""
    close = (*RULE, "Spikes.action = 'skip'", "Spikes.deviations = 0", "Spikes.loss_factor = 1.5")
    assert run(recipe, tmp_path / "whole", *close, "train.steps_per_loop = 7", steps=60) == 0
    skipped = [event["step"] for event in events(tmp_path / "whole", "spike")]
    within = next(step for step in skipped if (step - 1) % 2)  # the limits move after every second step
    for steps in (within - 1, 60):
        assert run(recipe, tmp_path / "parts", *close, steps=steps) == 0
    assert [event["step"] for event in events(tmp_path / "parts", "spike")] == skipped
    assert_same_state(tmp_path / "parts", tmp_path / "whole", step=60)


def test_a_spike_is_noted_or_ends_the_run(recipe, tmp_path, capsys):
    assert run(recipe, tmp_path / "noted", *RULE, "Spikes.action = 'note'", POISON) in (0, 70)
    assert f"step {POISONED}: spike: loss " in capsys.readouterr().out
    first = events(tmp_path / "noted", "spike")[0]
    assert (first["step"], first["action"]) == (POISONED, "note")
    for _ in range(2):  # the same command comes to the same step
        assert run(recipe, tmp_path / "stopped", *RULE, "Spikes.action = 'stop'", POISON) == 70
        assert f"step {POISONED}: spike: loss " in capsys.readouterr().err
    assert CheckpointStore(str(tmp_path / "stopped/checkpoints")).latest() == 25


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["Spikes.action = 'rewnd'"], "Spikes.action = 'rewnd': must be one of 'note', 'skip', 'stop', 'rewind'"),
        (["Spikes.loss_factor = 0.5"], "Spikes.loss_factor = 0.5: must be more than 1"),
        (["Spikes.window = 1"], "Spikes.window = 1: must be 10 or more"),
        (["Spikes.rewind_checkpoints = 6"], "Checkpoints.keep = 5"),
        (["train.skip_batches = [(5, 3)]"], "(5, 3) must be a first and a last batch"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(recipe, tmp_path, texts, message, capsys):
    assert run(recipe, tmp_path / "run", *RULE, *texts) == 64
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_batches_are_not_left_out_after_they_were_trained_on(recipe, tmp_path, capsys):
    assert run(recipe, tmp_path / "run", "train.skip_batches = [(3, 4)]", steps=10) == 0
    assert run(recipe, tmp_path / "run", "train.skip_batches = [(3, 4), (30, 31)]", steps=20) == 0
    assert run(recipe, tmp_path / "run", "train.skip_batches = [(3, 4), (8, 9), (30, 31)]") == 64
    assert "is at step 20" in capsys.readouterr().err


@pytest.mark.nightly  # one that is interrupted does, above
@pytest.mark.heavy
def test_a_run_killed_after_it_went_back_leaves_the_same_batches_out(start_launcher, recipe, tmp_path):
    often = ("train.checkpoint_every = 2", "train.steps_per_loop = 1", "train.log_every = 1")
    flags = [recipe, f"--model_dir={tmp_path}/killed", *bindings(*RULE, POISON, *often)]
    env = {"PYTHONPATH": PYTHONPATH}
    # More steps than it will come to.
    first = start_launcher(*flags, "--gin_param=train.steps = 1000", env=env)
    first.wait_until((tmp_path / "killed/checkpoints/rewinds.json").exists)
    first.send(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    steps = CheckpointStore(str(tmp_path / "killed/checkpoints")).latest() + 10
    second = start_launcher(*flags, f"--gin_param=train.steps = {steps}", env=env).wait()
    assert second.returncode == 0, second.stderr
    assert "gone back" not in second.stdout
    assert run(recipe, tmp_path / "undisturbed", without_batches(26, 28), *often, steps=steps) == 0
    assert_same_state(tmp_path / "killed", tmp_path / "undisturbed", step=steps)


@pytest.mark.heavy
@pytest.mark.parametrize("action", ["rewind", pytest.param("skip", marks=pytest.mark.nightly)])
def test_two_workers_come_to_the_verdict_of_two_replicas(run_workers, recipe, tmp_path, action):
    rule = (*RULE, f"Spikes.action = '{action}'")
    env = {"PYTHONPATH": PYTHONPATH}
    workers = run_workers(2, recipe, f"--model_dir={tmp_path}/two", *bindings(*rule, POISON), env=env)
    assert [worker.returncode for worker in workers] == [0, 0], [worker.stderr for worker in workers]
    data = without_batches(26, 28) if action == "rewind" else f"poisoned.task.weightless = [{POISONED}]"
    assert run(recipe, tmp_path / "undisturbed", data, replicas=2) == 0
    assert_same_state(
        tmp_path / "two", tmp_path / "undisturbed", apart_from=(FINITE_STEPS,) if action == "skip" else ()
    )


# ---------------------------------------------------------------------------------------------------------- the rule


def records(losses: np.ndarray, norms: np.ndarray, first_step: int = 1) -> StepRecords:
    ones = np.ones(len(losses))
    return StepRecords(
        first_step, losses, ones, {}, norms, ones, ones, ones, np.zeros((len(losses), 1), bool), 0 * ones
    )  # fmt: skip


def watch(**rule) -> tuple[spikes.SpikeDetector, list[str]]:
    notes: list[str] = []
    trainer = types.SimpleNamespace(loss_scale=1.0)
    made = spikes.SpikeDetector(
        spikes.Spikes(**rule),
        trainer,
        StartingPoint(),
        types.SimpleNamespace(note=notes.append, spike=lambda row: None),
    )
    return made, notes


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("floor", [0.0, -3.0], ids=["positive", "of any sign"])
def test_steady_noise_and_a_falling_loss_raise_no_alarm(spread, floor):
    numbers = np.random.default_rng(0)
    steps = np.arange(20_000)
    falling = np.exp(3 * np.exp(-steps / 300)) * (1 + steps / 5000)
    if floor < 0:  # a long tail is no noise around 0
        losses = floor + falling + spread * numbers.standard_normal(len(steps))
    else:
        losses = falling * np.exp(spread * numbers.standard_normal(len(steps)))
    norms = np.exp(spread * numbers.standard_normal(len(steps)))
    made, notes = watch()
    made.took(records(losses, norms))
    assert notes == []


def test_a_spike_above_the_noise_is_seen_and_a_loss_that_stays_high_is_noted_once_and_gets_usual():
    numbers = np.random.default_rng(0)
    losses = np.exp(0.1 * numbers.standard_normal(1000))
    losses[400] *= 5
    losses[600:] *= 5
    made, notes = watch()
    made.took(records(losses, np.ones(1000)))
    assert [note.partition(":")[0] for note in notes] == ["step 401", "step 601"]
    assert 2 < made.summary()["spikes"]["count"] < 100

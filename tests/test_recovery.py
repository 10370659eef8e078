"""A run that is killed goes on by the same command and ends as one that nobody touched."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cases import repeated_but
from places import PYTHONPATH, SMALL_DIGITS

from launcher import main as entry
from launcher.checkpoints import CheckpointStore, find_damage
from launcher.jobs.drill import files

pytestmark = pytest.mark.slow

STEPS = 200
FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    f"--gin_param=train.steps = {STEPS}",
    "--gin_param=train.checkpoint_every = 5",
    "--gin_param=train.log_every = 1",
    "--gin_param=train.steps_per_loop = 1",
)


def events(model_dir: Path):
    return [json.loads(line) for line in (model_dir / "metrics.jsonl").read_text().splitlines()]


def test_killed_run_resumes_by_the_same_command_and_ends_bitwise_as_undisturbed(start_launcher, run_launcher, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert run_launcher(*FLAGS, f"--model_dir={undisturbed}").returncode == 0

    first = start_launcher(*FLAGS, f"--model_dir={killed}")
    store = CheckpointStore(str(killed / "checkpoints"))
    first.wait_until(lambda: len(store.steps()) >= 2)
    first.send(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    resumed_from = store.latest()
    assert 0 < resumed_from < STEPS

    second = run_launcher(*FLAGS, f"--model_dir={killed}")
    assert second.returncode == 0, second.stderr
    assert f"restored step {resumed_from}" in second.stdout
    assert f"took over {killed}/lease.json from process {first.process.pid} on " in second.stdout
    assert not (killed / "lease.json").exists()

    expected = CheckpointStore(str(undisturbed / "checkpoints")).read(STEPS)
    found = store.read(STEPS)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)

    summary = json.loads((killed / "summary.json").read_text())
    one, two = summary["attempts"]
    assert (one["from_step"], two["from_step"], two["to_step"]) == (0, resumed_from, STEPS)
    assert one["to_step"] >= resumed_from and one["started"] < one["ended"] <= two["started"] < two["ended"]
    assert one["ended_by"].startswith("killed") and two["ended_by"] == "done"
    spent = summary["goodput"]
    assert spent["train"] >= two["seconds"]["train"] > 0 and 0 < summary["goodput_share"] < 1
    assert 0 < sum(spent.values()) <= two["ended"] - one["started"]

    def losses(model_dir):
        return [(event["step"], event["loss"]) for event in events(model_dir) if event["split"] == "train"]

    assert losses(killed) == losses(undisturbed)
    assert [step for step, _ in losses(killed)] == list(range(1, STEPS + 1))


def test_finished_run_says_so_and_touches_nothing(capsys, tmp_path):
    run = tmp_path / "run"
    command = ["launcher", *FLAGS, f"--model_dir={run}", "--gin_param=train.steps = 3"]
    assert entry.main(command) == 0
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert entry.main(command) == 0
    assert "already trained to step 3 of 3" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_a_run_whose_checkpoints_are_gone_waits_for_them_and_does_not_begin_anew(capsys, tmp_path):
    run = tmp_path / "run"
    command = ["launcher", *FLAGS, f"--model_dir={run}", "--mode=train", "--gin_param=train.checkpoint_every = 2"]
    assert entry.main([*command, "--gin_param=train.steps = 3"]) == 0
    (run / "checkpoints").rename(run / "away")
    for _ in range(2):
        capsys.readouterr()
        assert entry.main([*command, "--gin_param=train.steps = 5"]) == 75
        said = capsys.readouterr().err
        assert f"{run}/checkpoints has no checkpoint, and an earlier attempt of this run had one of step 3" in said
        assert f"choose another --model_dir, or remove {run}/attempts.jsonl" in said
        (run / "checkpoints").mkdir(exist_ok=True)  # as where a disk would be mounted
    (run / "checkpoints").rmdir()
    (run / "away").rename(run / "checkpoints")
    assert entry.main([*command, "--gin_param=train.steps = 5"]) == 0
    assert f"restored step 3 from {run}" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["goodput"]["lost"] == 0
    (run / "checkpoints").rename(run / "away")
    (run / "attempts.jsonl").unlink()
    assert entry.main([*command, "--gin_param=train.steps = 2"]) == 0
    assert "restored" not in capsys.readouterr().out


@pytest.mark.heavy
def test_beside_a_training_an_evaluation_may_run_and_no_other_training(start_launcher, capsys, tmp_path):
    run = tmp_path / "run"
    flags = (*FLAGS, f"--model_dir={run}", "--gin_param=train.steps = 100000")
    training = start_launcher(*flags, "--mode=train")
    store = CheckpointStore(str(run / "checkpoints"))
    training.wait_until(lambda: len(store.steps()) >= 2)
    assert entry.main(["launcher", *flags, "--mode=train"]) == 64
    assert f"another run writes to it: process {training.process.pid} on " in capsys.readouterr().err
    assert entry.main(["launcher", *flags, "--mode=eval"]) == 0
    assert training.process.poll() is None
    # A run on another host that has waited for a heartbeat of this one in vain, as while it was suspended.
    lease = json.loads((run / "lease.json").read_text())
    del lease["crc32"]  # which would not be that of the new record
    (run / "lease.json").write_text(json.dumps({**lease, "host": "elsewhere", "process": 1}))
    finished = training.wait()
    assert finished.returncode == 70
    assert "lease.json was taken over by process 1 on elsewhere since" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (run / "summary.json").exists() and (run / "lease.json").exists()
    assert [find_damage(folder) for folder in (run / "checkpoints").glob("step_*")] == [None] * len(store.steps())


def assert_preempted(finished, model_dir):
    assert finished.returncode == 42, finished.stderr
    assert "Traceback" not in finished.stderr
    assert "goes on from there" in finished.stderr
    summary = json.loads((model_dir / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("preempted", 42)
    assert CheckpointStore(str(model_dir / "checkpoints")).latest() == summary["step"]


@pytest.mark.nightly  # so do two in a row, below
def test_sigterm_ends_the_step_saves_and_exits_42(start_launcher, tmp_path):
    flags = (*FLAGS, f"--model_dir={tmp_path}/run", "--gin_param=train.steps = 100000", "--mode=train")
    started = start_launcher(*flags)
    store = CheckpointStore(f"{tmp_path}/run/checkpoints")
    started.wait_until(lambda: len(store.steps()) >= 1)
    started.send(signal.SIGTERM)
    assert_preempted(started.wait(), tmp_path / "run")


@pytest.mark.nightly  # test_elastic_resume.py stops four workers by one
@pytest.mark.heavy
def test_sigterm_to_one_worker_stops_all_at_the_same_saved_step(start_launcher, free_ports, tmp_path):
    hosts = [f"127.0.0.1:{port}" for port in free_ports(2)]
    workers = [
        start_launcher(
            *FLAGS, f"--model_dir={tmp_path}/run", "--gin_param=train.steps = 100000", "--mode=train",
            env={"TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})},
        )
        for index in range(2)
    ]  # fmt: skip
    store = CheckpointStore(f"{tmp_path}/run/checkpoints")
    workers[0].wait_until(lambda: len(store.steps()) >= 1)
    workers[1].send(signal.SIGTERM)
    finished = [worker.wait() for worker in workers]
    assert finished[1].returncode == 42
    assert_preempted(finished[0], tmp_path / "run")


def test_sigterms_in_a_row_are_one_request_and_leave_whole_checkpoints_only(start_launcher, tmp_path):
    often = ("--gin_param=train.checkpoint_every = 1", "--gin_param=Checkpoints.keep = 50")
    endless = ("--gin_param=train.steps = 100000", "--mode=train")
    started = start_launcher(*FLAGS, f"--model_dir={tmp_path}/run", *endless, *often)
    directory = tmp_path / "run/checkpoints"
    store = CheckpointStore(str(directory))
    started.wait_until(lambda: len(store.steps()) >= 3)
    started.send(signal.SIGTERM)
    started.wait_until(lambda: "SIGTERM: finishing the step and saving" in started.stderr)
    started.send(signal.SIGTERM)
    assert_preempted(started.wait(), tmp_path / "run")
    folders = list(directory.glob("step_*"))
    assert len(folders) >= 3
    assert [find_damage(folder) for folder in folders] == [None] * len(folders)
    assert store.latest() == max(store.steps())


HELD = {"env": {"PYTHONPATH": PYTHONPATH}}


def held_recipe(folder: Path, *bindings: str) -> Path:
    """Twenty steps with an evaluation after ten and at the end, of batches that are held until `folder` has "go"."""
    lines = (
        "image_classification.data = @slowed.HeldBatches()",
        "slowed.HeldBatches.data = @image_data()",
        f"slowed.HeldBatches.file = '{folder}/go'",
        "slowed.HeldBatches.evaluation = True",
        "train.steps = 20",
        "train.evaluate_every = 10",
        "train.eval_batch_size = 16",
        "train.early_stopping = @EarlyStopping()",
        "train.ema_decay = 0.9",
        *bindings,
    )
    recipe = folder / "held.gin"
    recipe.write_text("\n".join(["import slowed_digits", f"include '{SMALL_DIGITS}'", *lines]) + "\n")
    return recipe


def reported(model_dir: Path) -> list[tuple]:
    return [(one["step"], one["split"], one["loss"], one["accuracy"]) for one in events(model_dir)]


def assert_as_undisturbed(run, disturbed: Path, *flags: str) -> None:
    """Ends a run that was interrupted, and compares it with one that nobody touched."""
    (disturbed.parent / "go").touch()
    undisturbed = disturbed.parent / "undisturbed"
    for folder in (disturbed, undisturbed):
        finished = run(*flags, "--gin_param=slowed.HeldBatches.first = 0", f"--model_dir={folder}", **HELD)
        assert finished.returncode == 0, finished.stderr
    assert files.difference(disturbed, undisturbed) == ""
    assert reported(disturbed) == reported(undisturbed)
    best = [CheckpointStore(str(folder / "checkpoints")).best_record() for folder in (disturbed, undisturbed)]
    assert best[0] == best[1]


# In the run, of averages; and at its end, of the weights themselves.
EVALUATIONS = [(10, 10, True), (20, 20, False)]


@pytest.mark.nightly  # so it is for a worker of two, below
@pytest.mark.parametrize(("step", "evaluate_every", "evaluate_ema"), EVALUATIONS)
def test_sigterm_between_the_batches_of_an_evaluation_saves_and_the_evaluation_is_made_again(
    start_launcher, run_launcher, tmp_path, step, evaluate_every, evaluate_ema
):
    more = (f"train.evaluate_every = {evaluate_every}", f"train.evaluate_ema = {evaluate_ema}")
    flags, run = (f"--gin_file={held_recipe(tmp_path, *more)}",), tmp_path / "run"
    started = start_launcher(*flags, "--gin_param=slowed.HeldBatches.first = 4", f"--model_dir={run}", **HELD)
    started.wait_until((tmp_path / "go.held").exists)
    started.send(signal.SIGTERM)
    started.wait_until(lambda: "SIGTERM: finishing the step and saving" in started.stderr)
    (tmp_path / "go").touch()
    assert_preempted(started.wait(), run)
    assert CheckpointStore(str(run / "checkpoints")).latest() == step
    assert (step, "eval") not in [one[:2] for one in reported(run)]
    assert_as_undisturbed(run_launcher, run, *flags)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("evaluate_ema", "shard"),
    repeated_but([(True, "optimizer")], itertools.product([False, True], ["none", "optimizer"])),
)
def test_sigterm_while_nobody_looks_at_it_saves_what_an_evaluation_began_with(
    start_launcher, run_launcher, tmp_path, evaluate_ema, shard
):
    more = (f"train.evaluate_ema = {evaluate_ema}", f"train.shard = '{shard}'", "train.eval_batch_size = 400")
    flags, run = (f"--gin_file={held_recipe(tmp_path, *more)}", "--replicas=2"), tmp_path / "run"
    started = start_launcher(*flags, "--gin_param=slowed.HeldBatches.first = 0", f"--model_dir={run}", **HELD)
    started.wait_until((tmp_path / "go.held").exists)
    started.send(signal.SIGTERM)
    assert_preempted(started.wait(), run)
    assert_as_undisturbed(run_launcher, run, *flags)


@pytest.mark.nightly  # test_elastic_resume.py stops four workers by one
@pytest.mark.heavy
@pytest.mark.parametrize("shard", repeated_but(["optimizer"], ["none", "optimizer"]))
def test_sigterm_to_a_worker_for_which_the_others_wait_saves_on_all(start_launcher, run_launcher, tmp_path, shard):
    more = ("slowed.HeldBatches.worker = 1", f"train.shard = '{shard}'")
    flags, run = (f"--gin_file={held_recipe(tmp_path, *more)}", "--workers=2"), tmp_path / "run"
    as_job = {"module": "launcher.launch"}
    started = start_launcher(*flags, "--gin_param=slowed.HeldBatches.first = 4", f"--model_dir={run}", **HELD, **as_job)
    started.wait_until((tmp_path / "go.held").exists)
    os.kill(int((tmp_path / "go.held").read_text()), signal.SIGTERM)
    assert started.wait().returncode == 42, started.stdout
    assert CheckpointStore(str(run / "checkpoints")).latest() == 10

    def run_job(*arguments, **options):
        return run_launcher(*arguments, **options, **as_job)

    assert_as_undisturbed(run_job, run, *flags)

"""`launcher.launch --sweep`: trials as real jobs, resumed, side by side, of a job array, compared, and refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import psutil
import pytest
from launched import LaunchedJob, fault
from report_page import Page
from running import is_running

from launcher import launch as entry
from launcher.jobs.sweep import Trial
from launcher.reporting import run_folder

GRID = "--sweep=cosine.peak = 0.0001, 0.1; mlp.units = 8, 4"
NAMES = ["peak=0.0001,units=8", "peak=0.0001,units=4", "peak=0.1,units=8", "peak=0.1,units=4"]
RECIPE = [
    "--gin_file=mlp_fashion.gin",
    *(
        f"--gin_param={binding}"
        for binding in (
            "image_data.name = 'digits'",
            "mlp.layers = 1",
            "train.epochs = None",
            "train.steps = 30",
            "train.steps_per_loop = 5",
            "train.log_every = 10",
            "train.global_batch_size = 32",
        )
    ),
]


@pytest.fixture
def sweep(start_launcher, tmp_path):
    """sweep(*flags, **variables): `launcher.launch` on the smallest recipe, in the folder `out`."""

    def start(*flags: str, **variables: str):
        return start_launcher(*RECIPE, "--model_dir=out", *flags, module="launcher.launch", env=variables)

    return start


def accuracy(folder: Path) -> float:
    return json.loads((folder / "summary.json").read_text())["metrics"]["eval"]["accuracy"]


def newest(folder: Path) -> int:
    """The step of the last checkpoint; 0 without."""
    return max((int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*")), default=0)


def begun(folder: Path) -> int:
    """How many attempts a trial has had."""
    return len(list((folder / "logs").glob("attempt_*")))


# --------------------------------------------------------------------------------------------------------- what is run


@pytest.mark.slow
def test_trials_are_run_compared_and_not_run_again(sweep, tmp_path):
    out = tmp_path / "out"
    first = sweep("--sweep=cosine.peak = 0.0001, 0.1; seed = 1").wait()
    assert first.returncode == 0, first.stderr
    names = ["peak=0.0001,seed=1", "peak=0.1,seed=1"]
    assert sorted(path.name for path in out.iterdir()) == sorted([*names, "compare.html"])
    found = {name: accuracy(out / name) for name in names}
    best = sorted(names, key=found.__getitem__, reverse=True)
    assert found[best[0]] > found[best[-1]]
    lines = first.stdout.splitlines()
    (heading,) = [line.split() for line in lines if not line.startswith("[") and set(line.split()) == set(names)]
    assert heading == best
    place = Page.of(out, "compare.html").section("Results").find
    assert [*map(place, best)] == sorted(map(place, best)) and place(best[0]) >= 0
    told = [line for line in lines if ": done, best accuracy" in line]
    assert [line.partition(":")[0] for line in told] == [
        f"[launcher] trial {number} of 2, {name}" for number, name in enumerate(names, 1)
    ]

    again = sweep("--sweep=cosine.peak = 0.1, 0.0001; seed = 1").wait()
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before") == 2 and [begun(out / name) for name in names] == [1, 1]

    longer = sweep("--sweep=cosine.peak = 0.1; seed = 1", "--gin_param=train.steps = 40").wait()
    assert longer.returncode == 0 and "trial 1 of 1, peak=0.1,seed=1: goes on" in longer.stdout  # another command
    assert json.loads((out / "peak=0.1,seed=1/summary.json").read_text())["step"] == 40


@pytest.mark.nightly  # a signal and a sudden end of one job: test_ends_of_a_job.py; a trial that goes on: above
@pytest.mark.slow
def test_the_same_command_goes_on_after_a_signal_and_after_a_sudden_end(sweep, tmp_path, eventually):
    first, second = tmp_path / "out/steps=20", tmp_path / "out/steps=3000"
    flags = ["--sweep=train.steps = 20, 3000", "--gin_param=train.checkpoint_every = 100"]
    for number, code in ((signal.SIGTERM, 42), (signal.SIGKILL, -signal.SIGKILL)):
        before, job = newest(second), sweep(*flags)
        job.wait_until(lambda before=before: newest(second) > before)
        supervisors = psutil.Process(job.process.pid).children(recursive=True)
        job.process.send_signal(number)
        assert job.wait().returncode == code
        eventually(lambda supervisors=supervisors: not any(is_running(one.pid) for one in supervisors))
        assert 0 < newest(second) < 3000
    again = sweep(*flags).wait()
    assert again.returncode == 0, again.stderr
    assert "trial 1 of 2, steps=20: done before, best accuracy" in again.stdout
    assert "trial 2 of 2, steps=3000: goes on" in again.stdout
    assert newest(second) == 3000 and "best accuracy" in again.stdout
    assert [begun(first), begun(second)] == [1, 3]


# -------------------------------------------------------------------------------------------------- with fake workers


def test_trials_side_by_side_divide_the_processors_and_write_logs(launch):
    job = launch("--sweep=a.b = 1, 2, 3", "--at_once=2", workers=1, steps=10**9, on_sigterm="save")
    trials = [LaunchedJob(job.started, job.model_dir / f"b={number}") for number in (1, 2, 3)]
    job.until(lambda: all("training from" in trial.log(1, 0) for trial in trials[:2]))
    mine = os.sched_getaffinity(0)
    shares = [os.sched_getaffinity(trial.running()[0]) for trial in trials[:2]]
    if len(mine) > 1:
        assert not shares[0] & shares[1] and shares[0] | shares[1] == mine
    job.started.process.send_signal(signal.SIGINT)
    ended = job.wait()
    assert ended.returncode == 42
    assert not trials[2].model_dir.exists() and not any(trial.running() for trial in trials)
    assert ended.stdout.count(": exit code 42") == 2 and "[worker 0] training from" not in ended.stdout
    assert all("[worker 0] training from" in (trial.model_dir / "sweep.log").read_text() for trial in trials[:2])


def test_trials_side_by_side_divide_the_gpus(launch):
    devices = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    job = launch("--sweep=a.b = 1, 2", "--at_once=2", workers=1, env=devices, show=[*devices])
    assert job.wait().returncode == 0
    logs = [LaunchedJob(job.started, job.model_dir / f"b={number}").log(1, 0) for number in (1, 2)]
    assert [log.splitlines()[0] for log in logs] == ["CUDA_VISIBLE_DEVICES=4,5", "CUDA_VISIBLE_DEVICES=6,7"]


def test_a_failed_trial_does_not_stop_the_others(launch):
    faults = [fault("raise_error", rank=0, attempt=0, kind="TrainingError", message="no", code=70, until="../b=1/pids")]
    job = launch("--sweep=a.b = 2, 1, 3", workers=1, faults=faults)
    ended = job.wait()
    assert ended.returncode == 70
    told = [line for line in ended.stdout.splitlines() if line.startswith("[launcher] trial") and "begins" not in line]
    assert [line.split(": ")[1].split(",")[0] for line in told] == ["exit code 70", "done", "done"]


def test_refusal_of_the_first_trial_ends_the_sweep(launch):
    faults = [fault("raise_error", rank=0, kind="UsageError", message="did you mean 'peak'?", code=64)]
    ended = launch("--sweep=cosine.pek = 0.1, 0.05", workers=1, faults=faults).wait()
    assert ended.returncode == 64
    assert "did you mean 'peak'?" in ended.stderr and "trial 2" not in ended.stdout


def test_a_refused_trial_beside_one_that_is_not_harms_neither_that_one_nor_the_next(launch, tmp_path):
    for name in ("b=2", "b=3"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "is_well").touch()
    faults = [fault("raise_error", rank=0, kind="UsageError", message="b = 1", code=64, until="is_well")]
    ended = launch("--sweep=a.b = 1, 2, 3", "--at_once=2", workers=1, faults=faults).wait()
    assert ended.returncode == 64
    for told in ("b=1: exit code 64", "b=2: done", "b=3: done"):
        assert told in ended.stdout


def test_a_trial_that_cannot_be_started_is_named_and_the_others_run(launch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b=1").touch()
    ended = launch("--sweep=a.b = 1, 2", "--at_once=2", workers=1).wait()
    assert ended.returncode == 75
    assert "b=1: cannot be started: File exists" in ended.stdout and "b=2: done" in ended.stdout


def test_a_task_of_a_job_array_runs_its_trial_alone(launch):
    job = launch("--sweep=a.b = 1, 2; seed = 5, 6", workers=1, env={"SLURM_ARRAY_TASK_ID": "3"})
    assert job.wait().returncode == 0
    assert [path.name for path in job.model_dir.iterdir()] == ["b=2,seed=6"]
    assert "--gin_param=a.b = 2 --seed=6 " in LaunchedJob(job.started, job.model_dir / "b=2,seed=6").log(1, 0)


# --------------------------------------------------------------------------------------------------- with nothing begun


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """run(*flags): exit code and what was printed; nothing may be written."""
    monkeypatch.chdir(tmp_path)

    def call(*flags):
        code = entry.main(["launcher.launch", *RECIPE, *flags])
        assert os.listdir(tmp_path) == []
        return code, capsys.readouterr()

    return call


def test_dry_run_prints_the_command_of_each_trial(run):
    code, printed = run("--model_dir", "out dir", "--workers=2", GRID, "--at_once=2", "--dry_run")
    assert code == 0 and printed.err == ""
    bindings = [f"--gin_param=cosine.peak = {peak}" for peak in ("0.0001", "0.1")]
    assert [shlex.split(line) for line in printed.out.splitlines()] == [
        [sys.executable, "-m", "launcher.launch", *RECIPE, "--workers=2", binding, units, f"--model_dir=out dir/{name}"]
        for (binding, units), name in zip(
            [(peak, f"--gin_param=mlp.units = {units}") for peak in bindings for units in (8, 4)], NAMES, strict=True
        )
    ]


def test_values_are_those_of_gin_and_names_as_short_as_they_can_be(run):
    text = (
        "train.optimizer = @momentum(), %OTHER; a/mlp.units = (1, 2); b/mlp.units = [3]; x.name = 'p; q, r'; seed = 7"
    )
    code, printed = run(f"--sweep={text}", "--dry_run")
    assert code == 0
    words = [shlex.split(line)[-6:] for line in printed.out.splitlines()]
    assert [one[0] for one in words] == [f"--gin_param=train.optimizer = {name}" for name in ("@momentum()", "%OTHER")]
    common = ["--gin_param=a/mlp.units = (1, 2)", "--gin_param=b/mlp.units = [3]", "--gin_param=x.name = 'p; q, r'"]
    assert [one[1:5] for one in words] == [[*common, "--seed=7"]] * 2
    folder = "runs/mlp_fashion/optimizer=_momentum__,a_mlp.units=_1,_2_,b_mlp.units=_3_,name=p__q,_r,seed=7"
    assert words[0][5] == f"--model_dir={folder}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sweep="], "--sweep=''"),
        (["--sweep=cosine.peak"], "NAME = VALUE"),
        (["--sweep=cosine.peak ="], "NAME = VALUE"),
        (["--sweep=cosine.peak = 0.1; cosine.peak = 0.2"], "once"),
        (["--sweep=cosine.peak = high"], "strings need quotes"),
        (["--sweep=cosine.peak = 0.1] + [2"], "NAME = VALUE"),
        (["--sweep=mlp.activation = 'a b', 'a_b'"], "one folder"),
        ([f"--sweep=mlp.units = {[*range(1001)]}"[:-1].replace("[", "")], "over 1,000 trials"),
        ([f"--sweep=x.name = '{'n' * 300}'"], "long name"),
        (["--at_once=2"], "--sweep=''"),
        (["--sweep=mlp.units = 1, 2", "--sweep=seed = 0, 1"], "join them"),
        (["--sweep=mlp.units = 1, 2", "--at_once=0"], "--at_once=0"),
        (["--sweep=mlp.units = 1, 2", "--at_once=3"], "2 GPU(s)"),
        (["--sweep=mlp.units = 1, 2", "--at_once=2", "--backend=ssh", "--hosts=a,b"], "--backend=local"),
        (["--sweep=mlp.units = 1, 2", "--backend=kubernetes"], "--backend=kubernetes"),
        (["--sweep=mlp.units = 1, 2", "--workers=0"], "--workers=0"),
    ],
)
def test_a_mistake_is_one_message_with_exit_code_64(run, monkeypatch, flags, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    code, printed = run(*flags)
    assert code == 64
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.out == ""
    assert said in printed.err


@pytest.mark.parametrize("task", ["2", "-1", "one"])
def test_a_task_outside_of_the_trials_is_refused(run, monkeypatch, task):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
    code, printed = run("--sweep=mlp.units = 8, 4")
    assert code == 64 and f"SLURM_ARRAY_TASK_ID='{task}'" in printed.err and "from 0 to 1" in printed.err
    assert printed.err.count("\n") == 1


def test_a_trial_whose_recipe_was_touched_or_has_python_of_its_own_is_not_taken_for_done(tmp_path):
    recipe, folder = tmp_path / "mine.gin", tmp_path / "peak=0.1"
    recipe.write_text("train.steps = 3\n")
    folder.mkdir()
    record = run_folder.RunRecord(began=1.0, started=recipe.stat().st_mtime + 1, command="a b", recipe=(str(recipe),))
    run_folder.write_record(folder, record)
    (folder / "summary.json").write_text(json.dumps({"status": "completed", "step": 3, "exit_code": 0}))
    os.utime(folder / "summary.json", (record.started + 1, record.started + 1))
    trial = Trial("one", folder, [], ["b"])
    assert trial.is_done()
    os.utime(recipe, (record.started + 9, record.started + 9))
    assert not trial.is_done()
    recipe.write_text("import json\ntrain.steps = 3\n")
    os.utime(recipe, (record.started - 1, record.started - 1))
    assert not trial.is_done()

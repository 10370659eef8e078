"""`--mode=export_step` and the runner that it writes beside the program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pods
import pytest
from building import build_session

from launcher import main as entry
from launcher.checkpoints import CheckpointStore
from launcher.step_program import runner

pytestmark = pytest.mark.slow

BINDINGS = [f"--gin_param={binding}" for binding in (*pods.SMALL_CONVOLUTIONS, "train.steps = 20")]
FLAGS = ("launcher", "--gin_file=resnet_cpu.gin", "--mode=export_step", *BINDINGS)


def refused(capsys, *flags):
    assert entry.main([*FLAGS, *flags]) == 64
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and not out, err
    return err


@pytest.fixture(scope="module")
def trained_twice():
    """A trainer after two steps, and its records of the first three."""
    made = build_session("resnet_cpu.gin", [*pods.SMALL_CONVOLUTIONS, "train.steps = 20"])
    batches = made.trainer.batches(made.plan.data)
    first = made.trainer.train(batches, 2)
    state = made.trainer.state.snapshot()
    third = made.trainer.train(batches, 1)
    return state, [*(first.loss / first.weight), *(third.loss / third.weight)]


@pytest.fixture(scope="module")
def exported(trained_twice, tmp_path_factory):
    """The step after the checkpoint of step 2, for two replicas."""
    folder = tmp_path_factory.mktemp("exported")
    store = CheckpointStore(str(folder / "run/checkpoints"), run={"seed": 0, "global_batch_size": 32})
    store.save(2, trained_twice[0])
    assert entry.main([*FLAGS, "--replicas=2", f"--model_dir={folder}/run"]) == 0
    return folder / "run/export_step"


def test_the_runner_takes_the_trainers_next_step(exported, trained_twice):
    # The copy beside the program, in isolation: it finds neither Launcher nor this folder.
    done = subprocess.run(
        [sys.executable, "-I", str(exported / "run.py"), "--steps=4", "--platform=cpu"],
        env={**os.environ, "XLA_FLAGS": pods.FAST_COMPILE},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"2 x cpu \(cpu\), JAX \S+; compiled in [\d.]+ s", lines[0])
    steps = [re.fullmatch(r"step (\d)  loss ([\d.]+)  [\d.]+ ms", line) for line in lines[1:5]]
    assert [step[1] for step in steps] == ["1", "2", "3", "4"], done.stdout
    losses = [float(step[2]) for step in steps]
    assert losses[0] == pytest.approx(trained_twice[1][2], rel=1e-5)
    # One batch again and again, with what was learned of it fed back.
    assert losses[3] < losses[0]


def test_the_description_says_all_that_another_program_needs(exported):
    described = json.loads((exported / "arguments.json").read_text())
    assert described["num_replicas"] == 2 and described["step"] == 2 and described["global_batch_size"] == 32
    assert described["versions"].keys() == {"launcher", "tensorflow", "keras", "jax", "stablehlo"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", described["versions"]["stablehlo"])
    assert "image_classification.model = @two_convolutions" in described["config"]
    with np.load(exported / "variables.npz") as variables, np.load(exported / "batches.npz") as batches:
        for argument in described["arguments"]:
            name, shape = argument["name"], tuple(argument["shape"])
            if argument["kind"] == "batch":
                assert batches[name].shape == (1, 32, *shape[1:]) and shape[0] == 16
            else:
                assert variables[name].shape == shape and variables[name].dtype == argument["dtype"]
        assert variables["counters/step"] == 2
    names = {argument["name"] for argument in described["arguments"]}
    assert {result["name"] for result in described["results"] if result["kind"] == "variable"} <= names


def test_a_plan_of_the_program_writes_nothing(capsys, tmp_path):
    assert entry.main([*FLAGS, "--replicas=8", f"--model_dir={tmp_path}/run", "--dry_run"]) == 0
    assert "8 replicas x 1 microbatch x 4" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_flags_that_choose_devices_are_refused(capsys, tmp_path):
    assert "--strategy=mirrored: --mode=export_step makes a program for any devices" in refused(
        capsys, "--strategy=mirrored", f"--model_dir={tmp_path}/run"
    )
    assert "--tpu=local" in refused(capsys, "--tpu=local", f"--model_dir={tmp_path}/run")


def test_a_folder_that_is_full_or_remote_is_refused(capsys, tmp_path):
    (tmp_path / "something").write_text("")
    assert "is not an empty folder" in refused(capsys, f"--export_dir={tmp_path}")
    assert "a local folder" in refused(capsys, "--export_dir=gs://bucket/step")


def test_a_batch_that_cannot_be_divided_is_refused_and_nothing_is_written(capsys, tmp_path):
    said = refused(capsys, "--replicas=5", f"--model_dir={tmp_path}/run")
    assert "train.global_batch_size = 32 cannot be split evenly over 5 replicas" in said
    assert list(tmp_path.iterdir()) == []


def test_without_data_it_is_exported_without_a_batch(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "nothing"))
    small = ("--gin_param=mlp.units = 8", "--gin_param=mlp.layers = 1", f"--export_dir={tmp_path}/step")
    assert entry.main(["launcher", "--gin_file=mlp_fashion.gin", "--mode=export_step", *small]) == 0
    out = capsys.readouterr().out
    assert "without a batch: " in out and "launcher.data.prepare fashion_mnist" in out
    written = {path.name for path in (tmp_path / "step").iterdir()}
    assert written == {"step.stablehlo", "arguments.json", "variables.npz", "run.py"}


def run_runner(*arguments):
    return subprocess.run(
        [sys.executable, runner.__file__, *arguments], capture_output=True, text=True, timeout=550, check=False
    )


def test_the_runner_refuses_a_folder_that_is_no_export(tmp_path):
    done = run_runner(str(tmp_path))
    assert done.returncode == 64
    assert done.stderr == (f"error: {tmp_path} has no arguments.json: name a directory that --mode=export_step wrote\n")


def test_the_runner_says_what_to_do_where_devices_are_missing(exported, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    done = run_runner(str(exported), "--platform=cpu")
    assert done.returncode == 64 and "Traceback" not in done.stderr
    assert "the program has 2 replicas, and JAX sees 1 cpu device(s)" in done.stderr

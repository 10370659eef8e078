"""The task that scripts/skypilot.sh prints: what SkyPilot is asked for, and what then runs on each of its nodes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
import yaml
from places import PYTHONPATH, ROOT, SMALL_DIGITS

STORE = "--runs=gs://bucket/team"


def printed(*words):
    command = [str(ROOT / "scripts" / "skypilot.sh"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def task(*words):
    done = printed(*words)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return yaml.safe_load(done.stdout)


def test_nodes_store_and_recovery_are_those_asked_for():
    options = ("--nodes=4", "--accelerators=H100:8", "--spot", "--cloud=gcp", "--region=us-central1")
    found = task(STORE, *options, "--", "--gin_file=gin_configs/resnet_gpu.gin")
    assert found["resources"] == {
        "accelerators": "H100:8",
        "use_spot": True,
        "cloud": "gcp",
        "region": "us-central1",
        "job_recovery": {"recover_on_exit_codes": [42, 75]},
    }
    assert (found["name"], found["num_nodes"], found["workdir"]) == ("resnet-gpu", 4, ".")
    assert found["file_mounts"] == {"/runs": {"source": "gs://bucket/team", "mode": "MOUNT"}}
    assert found["setup"] == "scripts/install.sh cuda,demo,text\n"


def test_a_volume_a_slice_of_one_host_and_a_folder_of_ones_own():
    found = task("--runs=disk", "--accelerators=tpu-v5litepod-8", "--", "--gin_file", "a.gin", "--model_dir=/runs/b/c")
    assert found["volumes"] == {"/runs": "disk"} and "file_mounts" not in found
    assert found["setup"] == "scripts/install.sh tpu,demo,text\n"
    last = shlex.split(found["run"].splitlines()[-1])
    assert last[-4:] == ["--tpu=local", "--gin_file", "a.gin", "--model_dir=/runs/b/c"]


@pytest.mark.heavy
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_what_runs_on_the_nodes_trains_one_model(nodes, tmp_path):
    """A real training, by the variables that SkyPilot sets; its nodes are processes of this host."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    steps = "--gin_param=train.steps = 4"
    script = task(STORE, f"--nodes={nodes}", "--", f"--gin_file={SMALL_DIGITS}", steps)["run"].replace(
        "/runs/", f"{tmp_path}/"
    )
    places = "\n".join(["127.0.0.1"] * nodes)
    given = {"SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": places, "PYTHONPATH": PYTHONPATH}
    started = [
        subprocess.Popen(
            ["bash", "-c", script],
            cwd=tmp_path,
            env={**os.environ, **given, "SKYPILOT_NODE_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(nodes)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * nodes, "\n".join(outputs)
    summary = json.loads((tmp_path / "small-digits" / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["num_replicas"]) == ("completed", 4, nodes)


RECIPE = ("--", "--gin_file=a.gin")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (RECIPE, "--runs is missing"),
        (["--runs=gs://b c", *RECIPE], "--runs=gs://b c: use letters"),
        ([STORE, "--nodes=0", *RECIPE], "--nodes=0: give a whole number"),
        ([STORE, "--gpus=8", *RECIPE], "unknown option --gpus=8"),
        ([STORE], "no --gin_file behind --"),
        ([STORE, "--name=9_x", *RECIPE], "--name=9_x"),
        ([STORE, *RECIPE, "--model_dir=runs/x"], "--model_dir=runs/x: only /runs outlives the nodes"),
        ([STORE, *RECIPE, "--model_dir", "/tmp/x"], "--model_dir=/tmp/x"),
        ([STORE, *RECIPE, "--workers=2"], "--workers: --nodes says"),
        ([STORE, *RECIPE, "--gin_param=a = 1\nb = 2"], "line break"),
        ([STORE, "--nodes=2", "--accelerators=tpu-v5litepod-8", *RECIPE], "a slice of one host"),
    ],
)
def test_a_mistake_is_one_message_and_no_task(words, said):
    done = printed(*words)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr

"""The network namespace of a job on one host: nobody outside reaches its workers, and it trains to the same weights."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from launcher import launch as entry
from launcher import modes
from launcher.checkpoints import CheckpointStore
from launcher.errors import UsageError
from launcher.jobs import private_network
from launcher.jobs.job import Job

SUPPORT = ROOT / "tests" / "support"

needs_namespaces = pytest.mark.skipif(
    bool(private_network._refusal()), reason="the kernel allows no network namespace here"
)


def is_reached(address):
    host, port = address.split(":")
    with socket.socket() as client:
        client.settimeout(10)
        return client.connect_ex((host, int(port))) == 0


@pytest.mark.heavy
@needs_namespaces
def test_nobody_outside_reaches_a_worker_and_the_weights_are_the_same(start_launcher, tmp_path):
    weights = {}
    (tmp_path / "task.gin").write_text(
        "import lagging\ntrain.task = @Lagging()\ntrain.optimizer = @adam\nadam.learning_rate = 0.01\n"
        "train.steps = 4\ntrain.global_batch_size = 8\n"
    )
    for wanted in ("on", "off"):
        folder = tmp_path / wanted
        folder.mkdir()
        job = start_launcher(
            "--workers=2", "--gin_file=task.gin", f"--model_dir={folder}/run", f"--private_network={wanted}",
            module="launcher.launch",
            env={"LAGGING_FOLDER": str(folder), "PYTHONPATH": f"{ROOT}:{SUPPORT}"},
        )  # fmt: skip
        # Both have trained, and worker 1 stays.
        job.wait_until(lambda folder=folder: (folder / "run" / "summary.json").exists())
        found = json.loads((folder / "TF_CONFIG").read_text())["cluster"]["worker"]
        assert len(found) == 2
        assert is_reached(found[1]) is (wanted == "off")
        assert ("network of their own" in job.stdout + job.stderr) is (wanted == "on")
        (folder / "go").touch()
        finished = job.wait()
        assert finished.returncode == 0, finished.stdout + finished.stderr
        store = CheckpointStore(str(folder / "run" / "checkpoints"))
        weights[wanted] = store.read(store.latest())
    assert weights["on"].keys() == weights["off"].keys()
    for name, array in weights["on"].items():
        np.testing.assert_array_equal(array, weights["off"][name], err_msg=name)


@needs_namespaces
def test_signals_restarts_and_exit_codes_are_as_ever(run_job):
    left = {"rank": 1, "attempt": 1, "step": 2, "do": "leave", "code": 75}
    job, finished = run_job("--private_network=on", faults=[left], checkpoint=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert job.attempts() == ["attempt_1", "attempt_2"]


def needs(*flags, **environ):
    values = modes.define_flags()
    values(["launcher.main", *flags])
    job = Job(
        identity="", workers=2, module="", arguments=flags, model_dir="", scratch=Path(),
        request=modes.make_request(values),
    )  # fmt: skip
    return private_network._needs_network(job, environ)


def test_what_may_need_the_network_keeps_it_unless_it_is_asked_to_do_without(tmp_path, monkeypatch):
    monkeypatch.setattr(private_network.gce, "on_gce", lambda environ: "GCE_METADATA_HOST" in environ)
    (tmp_path / "mine.gin").write_text("import mine\n")
    (tmp_path / "far.gin").write_text("include 'resnet_cpu.gin'\nimage_data.name = 'http://example.com/x'\n")
    plain = "--gin_file=resnet_cpu.gin"
    assert not needs(plain)
    assert needs(plain, "--data_dir=gs://bucket/data")
    assert needs(plain, "--tpu=node")
    assert needs(plain, TPU_NAME="local")
    assert needs(plain, TFDS_DATA_DIR="gs://bucket/data")
    assert needs(plain, GCE_METADATA_HOST="x")
    assert needs(plain, "--gin_param=import mine")
    assert needs(f"--gin_file={tmp_path}/mine.gin")
    assert needs(f"--gin_file={tmp_path}/far.gin")
    assert needs("--gin_file=nonesuch.gin")


def test_a_kernel_that_refuses_is_an_error_only_where_it_was_asked(monkeypatch):
    options, rest = entry.define_flags(), ["--gin_file=resnet_cpu.gin"]
    options(["launcher.launch", "--workers=2"])
    job = entry.make_job(options, rest)
    monkeypatch.setattr(private_network, "_refusal", lambda: "no")
    environ = {"CUDA_VISIBLE_DEVICES": "-1"}
    assert private_network.enter("auto", job, environ) == ""
    with pytest.raises(UsageError, match="--private_network=on: no"):
        private_network.enter("on", job, environ)
    assert "NCCL_SOCKET_IFNAME" not in environ and os.path.exists("/proc/net")


def test_a_command_that_is_told_of_events_has_the_network_of_this_host(monkeypatch):
    entered = []
    monkeypatch.setattr(private_network, "_refusal", lambda: "")
    monkeypatch.setattr(private_network, "_unshare", lambda: entered.append(True))
    for more in (["--on_event=cat"], []):
        options = entry.define_flags()
        options(["launcher.launch", "--workers=2", *more])
        private_network.enter("auto", entry.make_job(options, ["--gin_file=resnet_cpu.gin"]), {})
        assert bool(entered) is (not more)

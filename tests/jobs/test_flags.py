"""The command line of python -m launcher.launch: what it accepts, refuses and prints, with nothing started."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import launch as entry
from launcher.modes import define_flags


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """run(*flags): exit code and what was printed; nothing may be written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def call(*flags):
        code = entry.main(["launcher.launch", *flags])
        assert os.listdir(tmp_path) == []
        return code, capsys.readouterr()

    return call


def dry_run(run, *flags):
    """The commands that --dry_run prints: for each worker its variables and its words."""
    code, printed = run("--dry_run", *flags)
    assert code == 0 and printed.err == ""
    commands = []
    for line in printed.out.splitlines():
        if line.startswith("# "):
            continue
        words = shlex.split(line)
        count = next(index for index, word in enumerate(words) if "=" not in word)
        commands.append((dict(word.split("=", 1) for word in words[:count]), words[count:]))
    return commands


def test_dry_run_prints_the_command_of_every_worker(run):
    flags = ["--gin_file=resnet_cpu.gin", "--gin_param", "train.steps = 3", "--model_dir=out dir"]
    commands = dry_run(run, "--workers=3", *flags)
    configs = [json.loads(variables["TF_CONFIG"]) for variables, _ in commands]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 3 and all(address.startswith("127.0.0.1:") for address in addresses)
    assert configs == [
        {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}} for rank in range(3)
    ]
    assert all(words == [sys.executable, "-m", "launcher.main", *flags] for _, words in commands)


def test_what_dry_run_prints_can_be_run_by_a_shell(launch, fake_environment, tmp_path):
    line = launch("--dry_run", workers=1).wait().stdout.splitlines()[1]
    variables = dict(word.split("=", 1) for word in shlex.split(line) if word.split("=")[0].isupper())
    Path(variables["LAUNCHER_PROGRESS_FILE"]).parent.mkdir()
    environ = {**os.environ, **fake_environment()}
    by_hand = subprocess.run(["sh", "-c", line], env=environ, check=True, capture_output=True, text=True)
    launched = launch(workers=1)
    assert launched.wait().returncode == 0
    assert by_hand.stdout == launched.log(1, 0)


def test_workers_are_told_the_model_dir_that_the_supervisor_takes(run):
    _, words = dry_run(run, "--gin_file=base.gin", "--gin_file=recipes/mine.gin")[0]
    assert words[-1] == "--model_dir=runs/mine"


def test_gpus_are_divided_among_the_workers(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    commands = dry_run(run, "--workers=2", "--gin_file=x.gin")
    assert [variables["CUDA_VISIBLE_DEVICES"] for variables, _ in commands] == ["4,5", "6,7"]
    code, printed = run("--workers=3", "--gin_file=x.gin")
    assert code == 64 and "4 GPU(s)" in printed.err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert all("CUDA_VISIBLE_DEVICES" not in variables for variables, _ in dry_run(run, "--gin_file=x.gin"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers=0"], ["--workers=0"]),
        (["--workers=two"], ["workers", "two"]),
        (["--worker=2"], ["worker", "workers"]),
        (["--gin_fil=x.gin"], ["gin_fil", "gin_file"]),
        (["--backend=sh"], ["--backend=sh", "local", "ssh", "slurm", "kubernetes", "tpu_vm", "member"]),
        (["--hosts=a,b"], ["--hosts=a,b", "--backend=ssh", "--backend=local"]),
        (["--backend=slurm", "--image=x"], ["--image=x", "--backend=kubernetes", "--backend=slurm"]),
        (["--max_restarts=-1"], ["--max_restarts=-1"]),
        (["--stall_timeout=0"], ["--stall_timeout=0"]),
        (["--grace_period=nan"], ["--grace_period=nan"]),
        (["--replicas=two"], ["replicas", "two"]),
        (["--replicas=0"], ["--replicas=0"]),
        (["--tpu_type=v5litepod-8"], ["--tpu_type", "--mode=preflight", "train_and_eval"]),
        (["--mode=verify"], ["verify", "launcher.main"]),
        (["--model_dir=gs://bucket/run"], ["gs://bucket/run"]),
        (["stray"], ["stray"]),
    ],
)
def test_a_mistake_is_one_message_with_exit_code_64(run, flags, said):
    code, printed = run("--gin_file=resnet_cpu.gin", *flags)
    assert code == 64
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1 and printed.out == ""
    for part in said:
        assert part in printed.err


def test_a_job_without_a_recipe_is_refused(run):
    code, printed = run("--workers=2")
    assert code == 64 and "--gin_file" in printed.err


def test_help_names_every_flag_but_the_tests_own(run):
    code, printed = run("--help")
    assert code == 0
    for name in set(entry.define_flags()) - {"h", "worker_module"}:
        assert f"  --{name}" in printed.out
    assert "worker_module" not in printed.out


def test_no_flag_of_the_workers_is_taken_from_them():
    assert set(entry.define_flags()) & set(define_flags()) == {"help", "h", "version", "dry_run"}


def test_the_supervisor_never_imports_tensorflow():
    program = (
        "import sys; from launcher import launch; import launcher.checkpoints, launcher.jobs.supervisor\n"
        "launch.main(['launch', '--gin_file=x.gin', '--dry_run'])\n"
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras')))"
    )
    finished = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.DEVNULL)
    assert finished.returncode == 0

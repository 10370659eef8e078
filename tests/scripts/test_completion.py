"""Completion of flags by bash, from files that are what scripts/completion.py makes of the flags as they are."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess

import pytest
from places import ROOT

ASK = """
shopt -s progcomp; source "$1"
COMP_LINE="$3" COMP_POINT=${#3}
"$2"; printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_files_are_current():
    spec = importlib.util.spec_from_file_location("completion", ROOT / "scripts" / "completion.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    for path, text in program.files().items():
        assert path.read_text() == text, f"{path}: run python scripts/completion.py"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("launcher --mod", ["--mode=", "--model_dir="]),
        ("launcher --mode=train", ["train", "train_and_eval"]),
        ("launcher --dry", ["--dry_run"]),
        ("launcher --gin_file=resnet_c", ["resnet_cpu.gin"]),
        ("launcher --gin_file=own", ["own.gin"]),
        ("launcher --seed=1 --model_dir=r", ["runs"]),
        ("launcher-jobs --workers=2 --strategy=m", ["mirrored", "multi_worker"]),
        ("launcher-jobs --backend=s", ["slurm", "ssh"]),
        ("launcher --none", [""]),
    ],
)
def test_bash_offers_flags_and_their_values(tmp_path, typed, offered):
    (tmp_path / "own.gin").touch()
    (tmp_path / "runs").mkdir()
    command = typed.partition(" ")[0]
    words = [str(ROOT / "completions" / "bash" / command), f"_{command.replace('-', '_')}", typed]
    done = subprocess.run(["bash", "-c", ASK, "bash", *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (sorted(done.stdout.splitlines()), done.stderr) == (offered, "")


@pytest.mark.skipif(not shutil.which("zsh"), reason="there is no zsh")
def test_zsh_can_read_its_file():
    subprocess.run(["zsh", "-n", str(ROOT / "completions" / "zsh" / "_launcher")], check=True)

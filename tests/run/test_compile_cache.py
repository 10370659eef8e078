"""--compile_cache: the next start takes from a folder what XLA compiled, unless it is not as it was written."""

from __future__ import annotations

import pytest
from places import ROOT

from launcher.machine import compile_cache

RECIPE = f"--gin_file={ROOT}/tests/support/small_digits.gin"
JIT = "--gin_param=train.jit_compile = True"


@pytest.mark.heavy
def test_the_next_start_compiles_only_what_is_damaged(run_launcher, tmp_path):
    cache = tmp_path / "cache"

    def trained(name):
        """When each program was compiled, and the weights of that run."""
        model_dir = tmp_path / name
        flags = [RECIPE, JIT, "--gin_param=train.steps = 3", "--mode=train"]
        done = run_launcher(*flags, f"--model_dir={model_dir}", f"--compile_cache={cache}")
        assert done.returncode == 0, done.stderr
        (weights,) = model_dir.glob("checkpoints/*/state.data*")
        return {entry: entry.stat().st_mtime_ns for entry in cache.glob("*.pb")}, weights.read_bytes()

    compiled, weights = trained("first")
    assert compiled
    for entry in compiled:  # which TensorFlow would read and fail
        entry.write_bytes(entry.read_bytes()[:1000])
    again, same = trained("second")
    assert again.keys() == compiled.keys() and same == weights
    assert all(entry.stat().st_size > 1000 for entry in again)
    assert trained("third") == (again, weights)


def test_an_entry_that_another_worker_removes_meanwhile_is_no_failure(tmp_path):
    (tmp_path / "one.pb").symlink_to(tmp_path / "gone")  # listed, and not to be read
    (tmp_path / "one.pb.sha256").touch()
    compile_cache.prepare(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("folder", "jit", "said"),
    [
        ("a b", True, "without spaces"),
        ("gs://bucket/cache", True, "a folder of this machine"),
        ("file/cache", True, "cannot be used: Not a directory"),
        ("cache", False, "train.jit_compile is False"),
    ],
)
def test_a_folder_that_is_of_no_use_is_refused_and_nothing_is_written(run_launcher, tmp_path, folder, jit, said):
    (tmp_path / "file").touch()
    done = run_launcher(RECIPE, *[JIT] * jit, f"--compile_cache={folder}", "--model_dir=out", cwd=tmp_path)
    assert done.returncode == 64
    assert f"--compile_cache={folder}" in done.stderr and said in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "cache").exists()

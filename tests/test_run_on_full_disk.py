"""A disk that fills up while a real run goes: it stops with a retry or goes on, as configured, and loses nothing."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
from places import SMALL_DIGITS

from launcher.checkpoints import CheckpointStore, find_damage

FLAGS = (
    f"--gin_file={SMALL_DIGITS}",
    "--mode=train",
    "--gin_param=train.steps = 100000",
    "--gin_param=train.checkpoint_every = 5",
    "--gin_param=train.log_every = 1",
    "--gin_param=train.global_batch_size = 16",
    "--gin_param=mlp.units = 1024",  # files larger than the limit below
)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space left"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def assert_all_whole(directory: Path) -> None:
    folders = list(directory.glob("step_*"))
    assert folders
    assert [find_damage(folder) for folder in folders] == [None] * len(folders)


@pytest.mark.heavy
def test_a_run_that_may_miss_checkpoints_goes_on_and_saves_again_when_there_is_room(start_launcher, small_disk):
    run = small_disk / "run"
    started = start_launcher(*FLAGS, f"--model_dir={run}", "--gin_param=Checkpoints.on_error = 'continue'")
    store = CheckpointStore(str(run / "checkpoints"))
    started.wait_until(lambda: len(store.steps()) >= 2)
    filler = fill(small_disk)
    started.wait_until(lambda: started.stdout.count("tries again at the next save") >= 2)
    newest = store.latest()
    filler.unlink()
    started.wait_until(lambda: max(store.steps(), default=-1) > newest)
    started.send(signal.SIGTERM)
    finished = started.wait()
    assert finished.returncode == 42, finished.stderr
    assert "MiB; " in finished.stdout and "MiB are free" in finished.stdout
    assert finished.stdout.count("metrics.jsonl: ") <= 1
    assert finished.stderr.count("TensorBoard gets no more of this run") <= 1
    assert_all_whole(run / "checkpoints")
    summary = json.loads((run / "summary.json").read_text())
    assert store.latest() == summary["step"]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, steps[-1] + 1))


@pytest.mark.heavy
def test_a_run_that_may_not_exits_75_and_goes_on_by_the_same_command_when_there_is_room(
    start_launcher, run_launcher, tmp_path
):
    """A limit on the size of files stands for the disk: no privilege is needed to set it, nor to lift it."""
    flags = (*FLAGS, f"--model_dir={tmp_path}/run")
    started = start_launcher(*flags)
    store = CheckpointStore(f"{tmp_path}/run/checkpoints")
    started.wait_until(lambda: len(store.steps()) >= 2)
    resource.prlimit(started.process.pid, resource.RLIMIT_FSIZE, (128 * 1024, resource.RLIM_INFINITY))
    finished = started.wait()
    assert finished.returncode == 75, finished.stderr
    assert "Traceback" not in finished.stderr
    assert "Could not write the checkpoint of step" in finished.stderr
    assert "Older checkpoints are kept. Make room" in finished.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["exit_code"] == 75
    assert_all_whole(tmp_path / "run/checkpoints")
    newest = store.latest()
    again = run_launcher(*flags, f"--gin_param=train.steps = {newest + 3}")
    assert again.returncode == 0, again.stderr
    assert f"restored step {newest}" in again.stdout

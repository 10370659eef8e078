"""A disk that takes no more: a clear error, and nothing that was saved is lost.

Run as a program (`python test_full_disk.py DIRECTORY`), this file saves under a limit on the size of files.
"""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import PYTHONPATH
from saved import assert_same_bits, hidden, state_of

from launcher.checkpoints import CheckpointStore, CheckpointWriteError
from launcher.errors import EXIT_RETRY

pytestmark = pytest.mark.slow


def assert_refused(store: CheckpointStore, directory: Path, error: CheckpointWriteError, reason: str) -> None:
    assert error.exit_code == EXIT_RETRY
    assert reason in str(error)
    assert "It needs 8.00 MiB; " in str(error)
    assert "MiB are free" in str(error)
    assert hidden(directory) == []
    assert store.latest() == 1
    assert_same_bits(store.read(1), state_of(1))


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system with the options that the test names."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.call(mount, stderr=subprocess.DEVNULL) != 0:
        pytest.skip("a small file system can only be mounted by root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("disk", ["size=4m"], indirect=True)
def test_a_full_disk_loses_nothing_that_was_saved(disk: Path) -> None:
    directory = disk / "checkpoints"
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1))
    with pytest.raises(CheckpointWriteError) as caught:
        store.save(2, {"big": np.ones(2**21, np.float32)})
    assert_refused(store, directory, caught.value, "No space left on device")
    assert "inode" not in str(caught.value)
    store.save(2, state_of(2))
    assert store.latest() == 2
    filler = disk / "filler"
    with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CheckpointWriteError, match="record of the best checkpoint"):
        store.mark_best(2, metric="accuracy", value=0.5)


@pytest.mark.parametrize("disk", ["size=64m,nr_inodes=20"], indirect=True)
def test_a_disk_without_inodes_is_not_told_by_the_bytes_that_are_free(disk: Path) -> None:
    directory = disk / "checkpoints"
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1))
    with pytest.raises(OSError):
        for number in itertools.count():
            (disk / f"filler{number}").touch()
    with pytest.raises(CheckpointWriteError, match=r"MiB are free, but no inode, so no file can be made\. ") as caught:
        store.save(2, {"big": np.ones(2**21, np.float32)})
    assert_refused(store, directory, caught.value, "No space left on device")


def test_a_file_size_limit_loses_nothing_that_was_saved(directory: Path, run_launcher: Callable[..., Any]) -> None:
    program = {"module": "test_full_disk", "cwd": Path(__file__).parent, "env": {"PYTHONPATH": PYTHONPATH}}
    message = run_launcher(str(directory), **program).stdout
    assert_refused(CheckpointStore(str(directory)), directory, CheckpointWriteError(message), "File too large")


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=r"Could not write the checkpoint of step 1 .*: Not a directory"):
        CheckpointStore(str(tmp_path / "file" / "checkpoints")).save(1, state_of(1))


def limited(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    store = CheckpointStore(directory)
    store.save(1, state_of(1))
    try:
        store.save(2, {"big": np.ones(2**21, np.float32)})
    except CheckpointWriteError as error:
        print(error)


if __name__ == "__main__":
    limited(sys.argv[1])

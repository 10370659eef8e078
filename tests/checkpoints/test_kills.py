"""The store under real kills: whatever moment a writer dies at, readers see whole checkpoints only.

Run as a program (`python test_kills.py`), this file is the writer process that the tests kill.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from saved import assert_same_bits, comes, environment, flip_a_bit, hidden, state_of, wait_for

from launcher.checkpoints import CheckpointReadError, CheckpointStore, find_damage

pytestmark = pytest.mark.slow

WRITER_SECONDS = 300


def test_a_kill_between_any_two_changes_of_the_disk_loses_nothing(directory: Path, writers: Writers) -> None:
    """The writer kills itself before its first, second, ... change of the file system, until none is left."""
    pristine = directory.parent / "pristine"
    store = CheckpointStore(str(pristine))
    for step in (1, 2, 3):  # The writer keeps two, so step 1 is retired.
        store.save(step, state_of(step))
    store.mark_best(2, metric="accuracy", value=0.5)
    flip_a_bit(pristine / "step_00000003" / "state.index")  # so that step 3 is replaced, the longest path of all
    (pristine / ".writing-step_00000004-1").mkdir()
    (pristine / ".writing-step_00000004-1" / "state.index").write_bytes(b"half")
    kills = 0
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(pristine, directory)
        writers.start(f"die_at {kills}", directory)
        status = writers.wait()
        found = CheckpointStore(str(directory), keep=2)
        latest = found.latest()
        assert latest in (2, 3, 4)
        assert_same_bits(found.read(latest), state_of(latest))
        assert found.best() in (2, 4)
        assert [folder.name for folder in directory.glob("step_*") if find_damage(folder)] in ([], ["step_00000003"])
        found.save(5, state_of(5))
        assert hidden(directory) == []
        assert found.latest() == 5
        if status == 0:
            assert latest == 4
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 10


@pytest.mark.nightly  # at every single change of the disk, above
def test_kills_at_random_moments_lose_nothing(directory: Path, writers: Writers) -> None:
    """The writer is killed while files of every kind are being written; the newest checkpoint is always whole."""
    generator = random.Random(0)
    newest = 0
    for stage in ("state.data", "state.index", "manifest.json", "") * 2:
        writers.start(f"loop {newest + 1} 1000000", directory)
        wait_for(lambda: (CheckpointStore(str(directory)).steps() or [0])[-1] > newest)  # noqa: B023
        # A file that is there for a millisecond may never be seen on a busy machine: then any moment will do.
        # glob's own walk, unlike a Path's, passes over a folder that goes while it looks.
        comes(lambda: any(glob.iglob(f"{directory}/.writing-*/{stage}*")), within_seconds=5)  # noqa: B023
        time.sleep(generator.uniform(0, 0.02))  # The random moment, not a wait for anything.
        assert writers.kill() == -signal.SIGKILL
        store = CheckpointStore(str(directory))
        latest = store.latest()
        assert latest is not None and latest > newest
        assert_same_bits(store.read(latest), state_of(latest, 1_000_000))
        newest = latest
    CheckpointStore(str(directory)).save(newest + 1, state_of(1))
    assert hidden(directory) == []


def test_a_reader_beside_a_writer_sees_whole_checkpoints_only(
    directory: Path, writers: Writers, caplog: pytest.LogCaptureFixture
) -> None:
    writers.start("loop 1 20000", directory)
    reader = CheckpointStore(str(directory), is_chief=False)
    wait_for(lambda: reader.latest() is not None)
    seen: list[int] = []

    def read_fifteen() -> bool:
        step = reader.latest() or 0
        with contextlib.suppress(CheckpointReadError):  # Retired since: the reader was slow, which is no damage.
            assert_same_bits(reader.read(step), state_of(step, 20_000))
            seen.append(step)
        return len(set(seen)) == 15

    wait_for(read_fifteen)
    writers.kill()
    assert seen == sorted(seen)
    assert caplog.messages == []


class Writers:
    """Starts writers fast: a process that has TensorFlow imported (and unused) forks one for every request."""

    def __init__(self, server: subprocess.Popen[str]):
        assert server.stdin is not None
        assert server.stdout is not None
        self._requests, self._answers = server.stdin, server.stdout
        self._pid = 0

    def start(self, command: str, directory: Path) -> None:
        if self._pid:
            self.kill()  # the writer of a test that failed
        self._requests.write(f"{command} {directory}\n")
        self._requests.flush()
        self._pid = int(self._answers.readline())

    def wait(self) -> int:
        """The exit status of the writer started last, negative for a signal."""
        self._pid = 0
        return int(self._answers.readline())

    def kill(self) -> int:
        os.kill(self._pid, signal.SIGKILL)
        return self.wait()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    pipe = subprocess.PIPE
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=pipe, stdout=pipe, start_new_session=True
    ) as server:
        yield Writers(server)
        os.killpg(server.pid, signal.SIGKILL)  # With the writer of a test that failed.


def serve() -> None:
    import tensorflow  # noqa: F401  Imported once, before the forks; its runtime starts in the children.

    for line in sys.stdin:
        command, first, *rest = line.split()
        pid = os.fork()
        if pid == 0:
            write_forever(int(first), *rest) if command == "loop" else die_at(int(first), *rest)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def write_forever(first_step: int, size: str, directory: str) -> None:
    """Until it is killed, or nobody is left to do so."""
    store = CheckpointStore(directory, keep=3)
    ends_at = time.monotonic() + WRITER_SECONDS
    for step in itertools.takewhile(lambda step: time.monotonic() < ends_at, itertools.count(first_step)):
        store.save(step, state_of(step, int(size)))


def die_at(number: int, directory: str) -> None:
    """Saves twice and marks the best, but dies before change `number` of the file system under `directory`."""
    changes = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            if changes == number:
                os.kill(os.getpid(), signal.SIGKILL)
            changes += 1

    store = CheckpointStore(directory, keep=2)
    sys.addaudithook(watch)
    store.save(3, state_of(3))
    store.save(4, state_of(4))
    store.mark_best(4, metric="accuracy", value=0.75)


if __name__ == "__main__":
    serve()

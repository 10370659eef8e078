"""The checkpoint store under real kills, real damage and real full disks.

Run as a program (`python test_checkpoints.py MODE ...`), this file is the writer process that the tests kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import launcher
from launcher import checkpoints
from launcher.checkpoints import CheckpointReadError, CheckpointStore, CheckpointWriteError, find_damage
from launcher.errors import EXIT_RETRY, UsageError

DEADLINE_SECONDS = 60


def state_of(step: int, size: int = 1000) -> dict[str, np.ndarray]:
    """A state in which every array tells the step it belongs to."""
    generator = np.random.default_rng(step)
    return {
        "step": np.array(step, np.int64),
        "model/dense/kernel": generator.standard_normal((size, 4), np.float32),
        "optimizer/momentum": generator.standard_normal((4, size), np.float32),
        "loss_scale": np.array([step], ml_dtypes.bfloat16),
    }


def assert_same_bits(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert found[name].tobytes() == array.tobytes(), name


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


EXOTIC = {
    "float32 scalar": np.array(0.1, np.float32),
    "float64": np.array([np.pi, -0.0, np.inf]),
    "float16": np.array([65504, 2**-24, -0.0, np.nan, -np.inf], np.float16),
    "bfloat16/with/slashes": np.array([[1, np.nan], [-0.0, np.inf]], ml_dtypes.bfloat16),
    "nan payloads": np.array([0x7FC12345, 0xFFC00001, 0x7F812345, 0x80000000], np.uint32).view(np.float32),
    "int8": np.array([-128, 127], np.int8),
    "int64": np.array([2**63 - 1, -(2**63)], np.int64),
    "uint32": np.array([2**32 - 1], np.uint32),
    "bool": np.array([[True], [False]]),
    "empty": np.zeros((0, 3), np.float32),
    "empty bool": np.zeros((2, 0), np.bool_),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
}


def test_every_dtype_and_shape_comes_back_bit_for_bit(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    folder = store.save(7, EXOTIC, metrics={"loss": 0.5, "accuracy": float("nan")})
    assert folder == str(directory / "step_00000007")
    assert_same_bits(store.read(7), EXOTIC)
    assert store.manifest(7)["metrics"] == {"loss": 0.5, "accuracy": None}


def test_other_programs_can_read_and_verify_a_checkpoint(directory: Path) -> None:
    import tensorflow as tf

    folder = Path(CheckpointStore(str(directory)).save(1, state_of(1)))
    kernel = tf.train.load_checkpoint(str(folder / "state")).get_tensor("model/dense/kernel")
    np.testing.assert_array_equal(kernel, state_of(1)["model/dense/kernel"])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["state.data-00000-of-00001", "state.index"]
    for name, recorded in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert recorded == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert manifest["tensors"]["loss_scale"] == {"shape": [1], "dtype": "bfloat16"}


@pytest.mark.parametrize("state", [{}, {"": np.zeros(1)}, {"text": np.array(["text"])}])
def test_a_state_that_is_not_named_numbers_is_refused(directory: Path, state: dict[str, np.ndarray]) -> None:
    with pytest.raises((ValueError, TypeError), match=r"named arrays|text \(<U4\)"):
        CheckpointStore(str(directory)).save(1, state)
    assert not directory.exists()


def test_a_store_without_directory_is_empty_and_stays_so(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    assert (store.steps(), store.latest(), store.best(), store.best_record()) == ([], None, None, None)
    assert not directory.exists()
    with pytest.raises(CheckpointReadError, match=r"step_00000003 cannot be read: manifest\.json is missing"):
        store.read(3)


@pytest.mark.parametrize(
    ("path", "keep", "wrong"), [("gs://bucket/run", 3, "gs://bucket/run"), ("run", 0, "keep is 0")]
)
def test_impossible_stores_are_refused(path: str, keep: int, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        CheckpointStore(path, keep=keep)


def test_only_the_chief_writes(directory: Path) -> None:
    worker = CheckpointStore(str(directory), is_chief=False)
    assert worker.save(1, state_of(1)) == str(directory / "step_00000001")
    worker.mark_best(1, metric="accuracy", value=1.0)
    assert not directory.exists()
    CheckpointStore(str(directory)).save(1, state_of(1))
    assert_same_bits(worker.read(1), state_of(1))


def test_asking_for_steps_does_not_import_tensorflow(directory: Path) -> None:
    CheckpointStore(str(directory)).save(5, state_of(5))
    program = (
        "import sys; from launcher.checkpoints import CheckpointStore\n"
        f"print(CheckpointStore({str(directory)!r}).latest(), 'tensorflow' in sys.modules)"
    )
    answer = subprocess.check_output([sys.executable, "-c", program], env=environment(), text=True)
    assert answer.split() == ["5", "False"]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: list[tuple[Callable[[Path], None], str, str]] = [
    (flip_a_bit, "state.data-00000-of-00001", "contents of state.data-00000-of-00001 do not match the checksum"),
    (flip_a_bit, "state.index", "contents of state.index do not match the checksum"),
    (flip_a_bit, "manifest.json", r"manifest\.json (does not match its own checksum|is not JSON)"),
    (truncate, "state.data-00000-of-00001", r"state.data-00000-of-00001 has \d+ bytes, the manifest says \d+"),
    (truncate, "manifest.json", "manifest.json is not JSON"),
    (Path.unlink, "manifest.json", "manifest.json is missing"),
    (Path.unlink, "state.data-00000-of-00001", "state.data-00000-of-00001 is missing"),
    (Path.unlink, "state.index", "state.index is missing"),
]


@pytest.mark.parametrize(("damage", "file", "named"), DAMAGES)
def test_a_damaged_checkpoint_is_named_skipped_and_kept(
    directory: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], file: str, named: str
) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1))
    folder = Path(store.save(2, state_of(2)))
    damage(folder / file)
    with caplog.at_level(logging.WARNING):
        assert CheckpointStore(str(directory)).latest() == 1
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"Skipping the damaged checkpoint {folder}: ")
    assert re.search(named, caplog.messages[0])
    assert folder.is_dir()


def test_a_renamed_checkpoint_is_not_taken_for_another_step(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    os.rename(store.save(1, state_of(1)), directory / "step_00000009")
    assert store.latest() is None


def test_reading_a_damaged_checkpoint_is_an_error_and_not_other_numbers(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    flip_a_bit(Path(store.save(1, state_of(1))) / "state.data-00000-of-00001")
    assert store.latest() is None
    with pytest.raises(CheckpointReadError, match="step_00000001 cannot be read"):
        store.read(1)


def test_a_whole_checkpoint_is_not_written_again(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    assert store.save(1, state_of(1)) == store.save(1, state_of(999))
    assert_same_bits(store.read(1), state_of(1))


@pytest.mark.parametrize(("damage", "file", "named"), DAMAGES)
def test_a_damaged_checkpoint_of_the_same_step_is_replaced(
    directory: Path, damage: Callable[[Path], None], file: str, named: str
) -> None:
    store = CheckpointStore(str(directory))
    damage(Path(store.save(1, state_of(1))) / file)
    CheckpointStore(str(directory)).save(1, state_of(1))
    assert store.latest() == 1
    assert_same_bits(store.read(1), state_of(1))
    assert hidden(directory) == []


def test_the_newest_and_the_best_are_kept(directory: Path) -> None:
    store = CheckpointStore(str(directory), keep=2)
    for step in (100, 200, 300):
        store.save(step, state_of(step))
        if step == 200:
            store.mark_best(200, metric="accuracy", value=0.9)
    for step in (400, 500):
        store.save(step, state_of(step))
    assert store.steps() == [200, 400, 500]
    assert CheckpointStore(str(directory)).best() == 200
    with open(directory / "best.json") as opened:
        store.mark_best(500, metric="accuracy", value=0.95)
        assert json.load(opened)["step"] == 200  # Replaced, not rewritten: no reader sees half a record.
    store.save(600, state_of(600))
    assert store.steps() == [500, 600]
    record = CheckpointStore(str(directory)).best_record()
    assert record is not None
    assert (record.step, record.metric, record.value) == (500, "accuracy", 0.95)


def test_a_damaged_checkpoint_neither_counts_nor_is_deleted(directory: Path) -> None:
    store = CheckpointStore(str(directory), keep=2)
    for step in (1, 2, 3):
        store.save(step, state_of(step))
    flip_a_bit(directory / "step_00000003" / "state.data-00000-of-00001")
    resumed = CheckpointStore(str(directory), keep=2)
    resumed.save(4, state_of(4))
    assert resumed.steps() == [2, 3, 4]  # 2 and 4 are the newest two whole ones
    resumed.save(5, state_of(5))
    assert resumed.steps() == [3, 4, 5]
    assert resumed.latest() == 5


def test_steps_sort_as_numbers_past_eight_digits(directory: Path) -> None:
    store = CheckpointStore(str(directory), keep=2)
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        store.save(step, {"x": np.zeros(1)})
    assert store.steps() == [100_000_000, 1_000_000_000]


def test_only_a_finite_value_of_an_existing_checkpoint_can_be_the_best(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1))
    for step, value in ((1, float("nan")), (2, 0.5)):
        with pytest.raises(ValueError, match="to be best"):
            store.mark_best(step, metric="accuracy", value=value)
    assert store.best_record() is None


def test_a_damaged_best_is_no_best(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1))
    store.mark_best(1, metric="accuracy", value=0.5)
    flip_a_bit(directory / "step_00000001" / "state.index")
    assert store.best() is None
    (directory / "best.json").write_text('{"step": 1, "met')
    assert store.best_record() is None
    assert "best.json" in caplog.text


def test_the_same_model_is_compatible_however_its_dtypes_are_spelled(directory: Path) -> None:
    import tensorflow as tf

    store = CheckpointStore(str(directory))
    store.save(1, {"a": np.zeros((2, 3), np.float32), "b": np.zeros((), ml_dtypes.bfloat16)})
    for float32, bfloat16 in ((np.float32, tf.bfloat16), (np.dtype("float32"), ml_dtypes.bfloat16)):
        store.check_compatible(1, {"b": (tf.TensorShape([]), bfloat16), "a": ([2, 3], float32)})
    with pytest.raises(UsageError, match=r"b is bfloat16\[\] in the checkpoint, float32\[\] in the model"):
        store.check_compatible(1, {"b": ((), "float32"), "a": ((2, 3), "float32")})


def test_another_model_is_refused_by_name_shape_and_dtype(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, {"kernel": np.zeros((3, 3), np.float32)} | {f"old/{i}": np.zeros(i) for i in range(7)})
    expected = {"kernel": ((3, 4), "float32"), "new": ((5,), "float16")}
    with pytest.raises(UsageError) as caught:
        store.check_compatible(1, expected)
    text = str(caught.value)
    assert "holds a checkpoint of another model (step 1" in text
    assert "missing: new float16[5]" in text
    assert "unexpected: old/0 float64[0]; " in text
    assert "old/4" in text and "old/5" not in text and "and 2 more" in text
    assert "kernel is float32[3, 3] in the checkpoint, float32[3, 4] in the model" in text
    assert f"Choose another --model_dir, or remove {directory}" in text


def assert_refused(store: CheckpointStore, directory: Path, error: CheckpointWriteError, reason: str) -> None:
    assert error.exit_code == EXIT_RETRY
    assert reason in str(error)
    assert "It needs 8.00 MiB; " in str(error)
    assert "MiB are free" in str(error)
    assert hidden(directory) == []
    assert store.latest() == 1
    assert_same_bits(store.read(1), state_of(1))


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.call(mount, stderr=subprocess.DEVNULL) != 0:
        pytest.skip("a file system of 4 MiB can only be mounted by root")
    try:
        directory = disk / "checkpoints"
        store = CheckpointStore(str(directory))
        store.save(1, state_of(1))
        with pytest.raises(CheckpointWriteError) as caught:
            store.save(2, {"big": np.ones(2**21, np.float32)})
        assert_refused(store, directory, caught.value, "No space left on device")
        store.save(2, state_of(2))
        assert store.latest() == 2
        filler = disk / "filler"
        with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(CheckpointWriteError, match="record of the best checkpoint"):
            store.mark_best(2, metric="accuracy", value=0.5)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_file_size_limit_loses_nothing_that_was_saved(directory: Path) -> None:
    message = subprocess.check_output(
        [sys.executable, __file__, "limited", str(directory)], env=environment(), text=True
    )
    assert_refused(CheckpointStore(str(directory)), directory, CheckpointWriteError(message), "File too large")


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointWriteError, match=r"Could not write the checkpoint of step 1 .*: Not a directory"):
        CheckpointStore(str(tmp_path / "file" / "checkpoints")).save(1, state_of(1))


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


def test_kills_at_random_moments_lose_nothing(directory: Path, writers: Writers) -> None:
    """The writer is killed while files of every kind are being written; the newest checkpoint is always whole."""
    generator = random.Random(0)
    newest = 0
    for stage in ("state.data", "state.index", "manifest.json", "") * 2:
        writers.start(f"loop {newest + 1} 1000000", directory)
        wait_for(lambda: (CheckpointStore(str(directory)).steps() or [0])[-1] > newest)  # noqa: B023
        wait_for(lambda: any(directory.glob(f".writing-*/{stage}*")))  # noqa: B023
        time.sleep(generator.uniform(0, 0.02))  # The random moment, not a wait for anything.
        assert writers.kill() == -signal.SIGKILL
        store = CheckpointStore(str(directory))
        latest = store.latest()
        assert latest is not None and latest > newest
        assert_same_bits(store.read(latest), state_of(latest, 1_000_000))
        newest = latest
    CheckpointStore(str(directory)).save(newest + 1, state_of(1))
    assert hidden(directory) == []


def test_a_checkpoint_retired_while_it_is_verified_is_not_called_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chief = CheckpointStore(str(directory), keep=1)
    chief.save(1, state_of(1))

    def sha256_after_a_save(path: Path) -> str:
        monkeypatch.undo()
        chief.save(2, state_of(2))
        return checkpoints._sha256(path)

    monkeypatch.setattr(checkpoints, "_sha256", sha256_after_a_save)
    assert CheckpointStore(str(directory), is_chief=False).latest() == 2
    assert caplog.messages == []


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
        self._requests.write(f"{command} {directory}\n")
        self._requests.flush()
        self._pid = int(self._answers.readline())

    def wait(self) -> int:
        """The exit status of the writer started last, negative for a signal."""
        return int(self._answers.readline())

    def kill(self) -> int:
        os.kill(self._pid, signal.SIGKILL)
        return self.wait()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    pipe = subprocess.PIPE
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=pipe, stdout=pipe, start_new_session=True
    ) as server:
        yield Writers(server)
        os.killpg(server.pid, signal.SIGKILL)  # With the writer of a test that failed.


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(launcher.__file__).parents[1]), "TF_CPP_MIN_LOG_LEVEL": "3"}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come"


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
    store = CheckpointStore(directory, keep=3)
    for step in range(first_step, 2**31):
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


def limited(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    store = CheckpointStore(directory)
    store.save(1, state_of(1))
    try:
        store.save(2, {"big": np.ones(2**21, np.float32)})
    except CheckpointWriteError as error:
        print(error)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else limited(sys.argv[2])

"""What is saved comes back, the newest and the best stay, and the rest goes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from saved import assert_same_bits, environment, state_of

from launcher.checkpoints import CheckpointReadError, CheckpointStore, CheckpointWriteError

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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is reset as Linux does")
def test_a_save_takes_next_to_no_memory_beside_the_state(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    store.save(0, state_of(0))  # imports TensorFlow
    state = {f"weight_{index}": np.ones([2**21], [np.float32, ml_dtypes.bfloat16][index % 2]) for index in range(16)}
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_bytes()
    store.save(1, state)
    assert _peak_bytes() - before < sum(array.nbytes for array in state.values()) / 4


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


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


def test_a_store_without_directory_is_empty_and_stays_so(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    assert (store.steps(), store.latest(), store.best(), store.best_record()) == ([], None, None, None)
    assert not directory.exists()
    with pytest.raises(CheckpointReadError, match=r"step_00000003 cannot be read: manifest\.json is missing"):
        store.read(3)


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


def test_a_whole_checkpoint_is_not_written_again(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    assert store.save(1, state_of(1)) == store.save(1, state_of(999))
    assert_same_bits(store.read(1), state_of(1))


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


def test_steps_sort_as_numbers_past_eight_digits(directory: Path) -> None:
    store = CheckpointStore(str(directory), keep=2)
    for step in (99_999_999, 100_000_000, 1_000_000_000):
        store.save(step, {"x": np.zeros(1)})
    assert store.steps() == [100_000_000, 1_000_000_000]


def test_going_back_forgets_the_newer_checkpoints_and_records_why(directory: Path) -> None:
    store = CheckpointStore(str(directory), keep=5)
    for step in (5, 10, 15, 20):
        store.save(step, state_of(step))
    store.mark_best(15, metric="accuracy", value=0.5)
    assert store.go_back(5, 1, {"left_out": (6, 8)}) is None
    assert (store.steps(), store.rewinds(), store.best()) == ([5, 10, 15, 20], (), 15)
    assert store.go_back(18, 2, {"left_out": (18, 20)}) == 10
    assert (store.steps(), store.latest(), store.best_record()) == ([5, 10], 10, None)
    assert store.go_back(11, 7, {"left_out": (11, 11)}) == 5
    assert store.rewinds() == ({"left_out": [18, 20], "to_step": 10}, {"left_out": [11, 11], "to_step": 5})
    store.save(10, state_of(11))
    assert_same_bits(store.read(10), state_of(11))


def test_a_record_of_rewinds_that_cannot_be_written_or_read_is_an_error_and_no_other_order(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(directory))
    for step in (5, 10):
        store.save(step, state_of(step))

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(CheckpointWriteError, match="batches that are left out"):
        disk.setattr("launcher.checkpoints.disk.write_durably", full)
        store.go_back(10, 1, {"left_out": (10, 12)})
    assert (store.latest(), store.rewinds()) == (5, ())
    (directory / "rewinds.json").write_text("[{")
    with pytest.raises(CheckpointReadError, match=r"rewinds\.json is damaged"):
        store.rewinds()

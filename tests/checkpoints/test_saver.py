"""Saving beside the training: one write at a time, whole states, and errors that are not lost with the thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from held_disk import HeldDisk
from saved import assert_same_bits, state_of, wait_for

from launcher.checkpoints import Best, CheckpointStore, CheckpointWriteError, Saver

BEST = Best(step=1, metric="accuracy", value=0.5)


def copying(step: int) -> Callable[[], Mapping[str, np.ndarray]]:
    return lambda: state_of(step)


def test_save_returns_while_the_disk_still_writes(directory: Path, disk: HeldDisk) -> None:
    store = CheckpointStore(str(directory))
    saver = Saver(store)
    saver.save(1, copying(1))
    wait_for(lambda: disk.begun == [1])
    saver.check()
    assert store.steps() == []
    disk.release()
    saver.finish()
    assert_same_bits(store.read(1), state_of(1))


def test_synchronous_save_returns_when_all_is_written(directory: Path, disk: HeldDisk) -> None:
    disk.release()
    store = CheckpointStore(str(directory))
    Saver(store, asynchronous=False).save(1, copying(1), best=BEST)
    assert store.latest() == store.best() == 1


def test_the_next_save_copies_only_when_the_write_before_has_ended(directory: Path, disk: HeldDisk) -> None:
    store = CheckpointStore(str(directory), keep=9)
    saver = Saver(store)
    whole_when_copied = {}

    def copy(step: int) -> Mapping[str, np.ndarray]:
        whole_when_copied[step] = store.steps()
        return state_of(step)

    saver.save(1, lambda: copy(1))
    disk.release()
    for step in (2, 3, 4):
        saver.save(step, lambda step=step: copy(step))
    saver.finish()
    assert whole_when_copied == {1: [], 2: [1], 3: [1, 2], 4: [1, 2, 3]}
    assert (disk.begun, disk.most_at_once) == ([1, 2, 3, 4], 1)
    for step in (1, 2, 3, 4):
        assert_same_bits(store.read(step), state_of(step))


def test_the_best_is_known_at_once_and_recorded_after_its_checkpoint(directory: Path, disk: HeldDisk) -> None:
    store = CheckpointStore(str(directory))
    saver = Saver(store)
    saver.save(1, copying(1), best=BEST)
    wait_for(lambda: disk.begun == [1])
    assert saver.best == BEST
    assert store.best_record() is None
    disk.release()
    saver.finish()
    assert store.best_record() == BEST
    assert store.best() == 1


def test_a_best_whose_checkpoint_failed_is_no_best(directory: Path, disk: HeldDisk) -> None:
    older = Best(step=0, metric="accuracy", value=0.25)
    saver = Saver(CheckpointStore(str(directory)), on_error="continue", warn=lambda text: None, best=older)
    disk.refused = {1}
    saver.save(1, copying(1), best=BEST)
    assert saver.best == BEST
    disk.release()
    saver.save(2, copying(2))
    assert saver.best == older
    saver.finish()
    assert CheckpointStore(str(directory)).best_record() is None


def test_a_worker_without_storage_copies_nothing_and_knows_the_best(directory: Path) -> None:
    saver = Saver(CheckpointStore(str(directory), is_chief=False))

    def copy() -> Mapping[str, np.ndarray]:
        raise AssertionError("copied for nobody")

    saver.save(1, copy, best=BEST)
    saver.finish()
    assert saver.best == BEST
    assert not directory.exists()


def test_the_same_step_is_not_written_twice(directory: Path, disk: HeldDisk) -> None:
    disk.release()
    saver = Saver(CheckpointStore(str(directory)))
    saver.save(1, copying(1))
    saver.save(1, copying(999))
    saver.finish()
    assert disk.begun == [1]


@pytest.mark.parametrize("tell", [lambda saver: saver.check(), lambda saver: saver.save(2, copying(2))])
def test_a_failed_write_stops_the_run_at_the_next_occasion(
    directory: Path, disk: HeldDisk, tell: Callable[[Saver], None]
) -> None:
    saver = Saver(CheckpointStore(str(directory)))
    disk.refused = {1}
    saver.save(1, copying(1))
    disk.release()

    def occasion() -> bool:
        tell(saver)
        return False

    with pytest.raises(CheckpointWriteError, match=r"step 1 .*No space left.*run the same command again"):
        wait_for(occasion)
    assert disk.begun == [1]


def test_a_failed_write_that_may_be_missed_is_told_and_tried_again(directory: Path, disk: HeldDisk) -> None:
    told: list[str] = []
    store = CheckpointStore(str(directory))
    saver = Saver(store, on_error="continue", warn=told.append)
    disk.release()
    disk.refused = {2}
    for step in (1, 2, 3):
        saver.save(step, copying(step))
    saver.finish()
    assert store.steps() == [1, 3]
    assert len(told) == 1
    assert "step 2" in told[0] and "It needs 8.00 MiB; " in told[0] and "MiB are free" in told[0]
    assert "tries again at the next save" in told[0] and "run the same command" not in told[0]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_last_checkpoint_that_fails_is_an_error_also_when_others_may(
    directory: Path, disk: HeldDisk, asynchronous: bool
) -> None:
    disk.release()
    disk.refused = {2}
    saver = Saver(
        CheckpointStore(str(directory)), asynchronous=asynchronous, on_error="continue", warn=lambda text: None
    )
    saver.save(1, copying(1))
    saver.save(2, copying(2))
    with pytest.raises(CheckpointWriteError, match="step 2"):
        saver.finish()


def test_a_mistake_of_ours_in_the_thread_is_never_passed_over(directory: Path) -> None:
    saver = Saver(CheckpointStore(str(directory)), on_error="continue")
    saver.save(1, lambda: 3)
    with pytest.raises(AttributeError, match="items"):
        saver.finish()


def test_closing_waits_for_the_write_and_only_warns(
    directory: Path, disk: HeldDisk, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(CheckpointStore(str(directory)))
    disk.release()
    disk.refused = {2}
    saver.save(1, copying(1))
    saver.save(2, copying(2))
    saver.close()
    saver.close()
    assert CheckpointStore(str(directory)).steps() == [1]
    assert "step 2" in caplog.text


def test_a_checkpoint_of_a_variable_in_the_hosts_memory_takes_none_of_its_own(directory: Path, peak_growth) -> None:
    import tensorflow as tf

    from launcher.runtime.tensorflow import TfRuntime

    runtime = TfRuntime(tf.distribute.OneDeviceStrategy("CPU:0"))
    table = tf.Variable(tf.zeros([1_000_000, 32]))
    table.scatter_add(tf.IndexedSlices(tf.ones([2, 32]), tf.constant([0, 999_999])))  # from then on a plain read copies
    store, changed = CheckpointStore(str(directory)), np.ones([32], np.float32)
    with peak_growth() as grown:
        snapshot = {"table": runtime.state.read(table)}
        store.save(1, snapshot)
    assert grown[0] < table.shape.num_elements() * 4 / 2
    table.scatter_add(tf.IndexedSlices(tf.ones([2, 32]), tf.constant([0, 5])))
    table.assign_add(tf.ones_like(table))
    for found in (snapshot["table"], store.read(1)["table"]):
        np.testing.assert_array_equal(found[[0, 999_999, 5]], [changed, changed, 0 * changed])

"""A checkpoint that several processes write, each its own parts: whole or not at all, and read by any."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
from saved import DEADLINE_SECONDS, assert_same_bits, hidden, state_of, wait_for

from launcher.checkpoints import Best, CheckpointStore, CheckpointWriteError, Saver, Writers
from launcher.machine.array_parts import Part, Range

AXES = {"model/dense/kernel": 0, "optimizer/momentum": 1}


def part_of(step: int, index: int, count: int = 2) -> dict[str, np.ndarray | Part]:
    found: dict[str, np.ndarray | Part] = {}
    for name, array in state_of(step).items():
        if (axis := AXES.get(name)) is None:
            found[name] = array
            continue
        where = Range(axis, index * (array.shape[axis] // count), array.shape[axis] // count)
        found[name] = Part(where.of(array).copy(), where, array.shape)
    return found


class _Processes:
    """Two that save as the workers of a job do, each in a thread of its own."""

    def __init__(self, directory: Path):
        self._barrier, self._said = threading.Barrier(2), [False, False]
        self.stores = [CheckpointStore(str(directory), is_chief=index == 0) for index in range(2)]
        self.savers = [
            Saver(store, writers=Writers(index, 2, lambda flag, index=index: self._any(index, flag)))
            for index, store in enumerate(self.stores)
        ]

    def _any(self, index: int, flag: bool) -> bool:
        self._said[index] = flag
        self._barrier.wait(DEADLINE_SECONDS)
        found = any(self._said)
        self._barrier.wait(DEADLINE_SECONDS)
        return found

    def each(self, what: Callable[[int], object]) -> list[Exception | None]:
        errors: list[Exception | None] = [None, None]

        def run(index: int) -> None:
            try:
                what(index)
            except CheckpointWriteError as error:
                errors[index] = error

        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        return errors

    def save(self, step: int, best: Best | None = None) -> list[Exception | None]:
        def one(index: int) -> None:
            self.savers[index].save(step, lambda: part_of(step, index), best=best if index == 0 else None)
            self.savers[index].finish()

        return self.each(one)


def test_what_each_writes_is_read_as_one_and_in_any_parts(directory: Path) -> None:
    both = _Processes(directory)
    assert both.save(3) == both.save(3) == both.save(4, Best(step=4, metric="loss", value=1.0)) == [None, None]
    store = CheckpointStore(str(directory))
    assert (store.latest(), store.best(), hidden(directory)) == (4, 4, [])
    assert_same_bits(store.read(3), state_of(3))
    stored = store.stored(3, lambda name: name in AXES)
    for name, axis in AXES.items():
        whole = state_of(3)[name]
        quarter = Range(axis, whole.shape[axis] // 4, whole.shape[axis] // 4)
        np.testing.assert_array_equal(stored[name](quarter), quarter.of(whole))
        np.testing.assert_array_equal(stored[name](None), whole)


def test_a_part_that_cannot_be_written_leaves_the_checkpoint_before(directory: Path, monkeypatch) -> None:
    from launcher.checkpoints import bundle

    both = _Processes(directory)
    assert both.save(1) == [None, None]
    write = bundle._write_bundle

    def refuse(prefix: Path, arrays) -> None:
        if prefix.name == "part-1":
            raise OSError(28, "No space left on device")
        write(prefix, arrays)

    monkeypatch.setattr(bundle, "_write_bundle", refuse)
    chief, other = both.save(2)
    assert "worker 1 could not write its part: " in str(chief)
    assert "No space left on device" in str(other)
    assert CheckpointStore(str(directory)).latest() == 1
    monkeypatch.setattr(bundle, "_write_bundle", write)
    assert both.save(2) == [None, None]
    assert CheckpointStore(str(directory)).latest() == 2


def test_who_ends_does_not_wait_for_parts_that_never_come(directory: Path) -> None:
    both = _Processes(directory)
    barrier = threading.Thread(target=both._any, args=(1, False))  # of a worker that is gone before it writes
    barrier.start()
    both.savers[0].save(1, lambda: part_of(1, 0))
    barrier.join(DEADLINE_SECONDS)
    wait_for(lambda: hidden(directory) != [])
    both.savers[0].close()
    assert (CheckpointStore(str(directory)).latest(), hidden(directory)) == (None, [])

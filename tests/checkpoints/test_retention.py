"""Besides the newest and the best, a long run leaves checkpoints at a distance in time, for ever."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from saved import flip_a_bit

from launcher.checkpoints import CheckpointStore
from launcher.checkpoints.store import spaced

HOUR = 3600.0


@pytest.fixture
def hours(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that manifests record, in hours, to be set by the test."""
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0] * HOUR)
    return now


def save_at(store: CheckpointStore, hours: list[float], step: int, hour: float) -> None:
    hours[0] = hour
    store.save(step, {"x": np.full(3, step)})


def test_checkpoints_at_a_distance_stay_besides_the_newest_and_the_best(directory: Path, hours: list[float]) -> None:
    store = CheckpointStore(str(directory), keep=2, keep_every_hours=2)
    for step in range(1, 12):
        save_at(store, hours, step, hour=0.75 * step)
        if step == 3:
            store.mark_best(3, metric="accuracy", value=0.5)
    # Written 0.75 h apart, so each third one lies 2 h or more behind the one kept before it.
    assert store.steps() == [1, 3, 4, 7, 10, 11]
    resumed = CheckpointStore(str(directory), keep=2, keep_every_hours=2)
    save_at(resumed, hours, 12, hour=100)
    assert resumed.steps() == [1, 3, 4, 7, 10, 11, 12]
    save_at(resumed, hours, 13, hour=100.5)
    assert resumed.steps() == [1, 3, 4, 7, 10, 12, 13]


def test_nothing_stays_by_time_unless_asked_for(directory: Path, hours: list[float]) -> None:
    store = CheckpointStore(str(directory), keep=2)
    for step in range(1, 6):
        save_at(store, hours, step, hour=1000.0 * step)
    assert store.steps() == [4, 5]


def test_a_damaged_checkpoint_is_not_deleted_when_its_time_is_over(directory: Path, hours: list[float]) -> None:
    store = CheckpointStore(str(directory), keep=1, keep_every_hours=10)
    for step in (1, 2):
        save_at(store, hours, step, hour=step)
    flip_a_bit(directory / "step_00000002" / "state.index")
    resumed = CheckpointStore(str(directory), keep=1, keep_every_hours=10)
    for step in (3, 4):
        save_at(resumed, hours, step, hour=step)
    assert resumed.steps() == [1, 2, 4]


@given(st.lists(st.floats(0, 5 * HOUR), max_size=30), st.floats(0.1, 20), st.integers(1, 4))
def test_what_is_kept_is_the_same_whenever_it_is_asked(gaps: list[float], hours: float, newest: int) -> None:
    """Retiring after every save keeps what one look at all checkpoints would have kept."""
    times: dict[int, float] = {}
    now = 0.0
    everything: dict[int, float] = {}
    for step, gap in enumerate(gaps):
        now += gap
        everything[step] = times[step] = now
        kept = {*sorted(times)[-newest:], *spaced(times, hours)}
        times = {step: when for step, when in times.items() if step in kept}
        assert spaced(times, hours) == spaced(everything, hours)
    permanent = [everything[step] for step in sorted(spaced(everything, hours))]
    assert all(later - earlier >= hours * HOUR for earlier, later in itertools.pairwise(permanent))

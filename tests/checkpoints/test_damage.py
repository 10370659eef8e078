"""A damaged checkpoint is named, skipped and kept for a person to look at."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from saved import assert_same_bits, environment, flip_a_bit, hidden, state_of, truncate

from launcher.checkpoints import (
    CheckpointReadError,
    CheckpointStore,
    NoWholeCheckpointError,
    find_damage,
    manifest,
)

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
    with pytest.raises(NoWholeCheckpointError, match=r"step_00000009: manifest\.json is of step 1"):
        store.latest()


def test_reading_a_damaged_checkpoint_is_an_error_and_not_other_numbers(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    flip_a_bit(Path(store.save(1, state_of(1))) / "state.data-00000-of-00001")
    with pytest.raises(CheckpointReadError, match="step_00000001 cannot be read"):
        store.read(1)


def test_when_every_checkpoint_is_damaged_nothing_begins_anew(directory: Path) -> None:
    store = CheckpointStore(str(directory))
    truncate(Path(store.save(1, state_of(1))) / "state.index")
    (Path(store.save(2, state_of(2))) / "state.index").unlink()
    with pytest.raises(NoWholeCheckpointError) as raised:
        store.latest()
    assert raised.value.exit_code == 70
    message = str(raised.value)
    assert "step_00000001: state.index has " in message and "step_00000002: state.index is missing" in message
    assert "choose another --model_dir" in message


@pytest.mark.parametrize("file", ["manifest.json", "best.json"])
def test_what_cannot_be_read_is_not_called_damaged(directory: Path, file: str) -> None:
    """Linux answers the reading of a process's memory at 0, where nothing is, as a disk answers that fails: EIO."""
    store = CheckpointStore(str(directory), keep=1)
    older, folder = Path(store.save(1, state_of(1))), Path(store.save(2, state_of(2)))
    store.mark_best(2, metric="accuracy", value=0.5)
    path = (directory if file == "best.json" else folder) / file
    path.rename(path.with_suffix(".whole"))
    path.symlink_to("/proc/self/mem")
    resumed = CheckpointStore(str(directory), keep=1)
    read = resumed.best if file == "best.json" else resumed.latest
    what = "best.json" if file == "best.json" else "step_00000002"
    with pytest.raises(CheckpointReadError, match=f"{what} cannot be read: Input/output error. It may be") as raised:
        read()
    assert raised.value.exit_code == 75
    assert not older.exists()
    resumed.save(3, state_of(3))  # deletes nothing of which nobody knows whether it is still needed
    assert folder.is_dir()
    path.unlink()
    path.with_suffix(".whole").rename(path)
    assert (resumed.latest(), resumed.best()) == (3, 2)


def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(directory: Path) -> None:
    folder = Path(CheckpointStore(str(directory)).save(1, state_of(1)))
    directory.parent.chmod(0o755)
    (folder / "state.index").chmod(0)
    program = (
        "import os; from launcher.checkpoints import CheckpointStore\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        f"CheckpointStore({directory.name!r}).latest()"  # relative, for the folders above let no other user in
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory.parent,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "CheckpointReadError" in ended.stderr and "state.index cannot be read: Permission denied" in ended.stderr


@pytest.mark.parametrize(("damage", "file", "named"), DAMAGES)
def test_a_damaged_checkpoint_of_the_same_step_makes_way_and_is_kept_to_be_looked_at(
    directory: Path, damage: Callable[[Path], None], file: str, named: str
) -> None:
    store = CheckpointStore(str(directory))
    damage(Path(store.save(1, state_of(1))) / file)
    CheckpointStore(str(directory)).save(1, state_of(1))
    assert store.latest() == 1
    assert_same_bits(store.read(1), state_of(1))
    assert hidden(directory) == []
    assert find_damage(directory / "damaged_step_00000001")
    damage(directory / "step_00000001" / file)
    CheckpointStore(str(directory)).save(1, state_of(1))
    assert find_damage(directory / "damaged_step_00000001_2")
    assert store.steps() == [1]


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


def test_a_damaged_best_is_no_best(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(str(directory))
    store.save(1, state_of(1))
    store.mark_best(1, metric="accuracy", value=0.5)
    flip_a_bit(directory / "step_00000001" / "state.index")
    assert store.best() is None
    (directory / "best.json").write_text('{"step": 1, "met')
    assert store.best_record() is None
    assert "best.json" in caplog.text


def test_a_checkpoint_retired_while_it_is_verified_is_not_called_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chief = CheckpointStore(str(directory), keep=1)
    chief.save(1, state_of(1))

    def sha256_after_a_save(path: Path) -> str:
        monkeypatch.undo()
        chief.save(2, state_of(2))
        return manifest.sha256_of(path)

    monkeypatch.setattr(manifest, "sha256_of", sha256_after_a_save)
    assert CheckpointStore(str(directory), is_chief=False).latest() == 2
    assert caplog.messages == []

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from held_disk import HeldDisk


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDisk]:
    held = HeldDisk(monkeypatch)
    yield held
    held.release()
